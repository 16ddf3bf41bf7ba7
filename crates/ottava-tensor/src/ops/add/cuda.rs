use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{Result, Tensor};

kernel_source!("add");

pub(super) fn add(gpu: &CudaDevice, a: &Tensor, b: &Tensor, y: &mut Tensor) -> Result<()> {
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(a.dtype())?, entry: "add" };
    let args =
        [Arg::Ptr(y.device_ptr_mut()), Arg::Ptr(a.device_ptr()), Arg::Ptr(b.device_ptr()), Arg::U64(a.len() as u64)];
    // SAFETY: all three tensors have `a.len()` elements of one type.
    unsafe { gpu.launch(&kernel, launch::elements_by_eight(gpu, a.len()), BLOCK, 0, &args) }
}
