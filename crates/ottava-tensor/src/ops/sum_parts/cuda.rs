use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{Result, Tensor};

kernel_source!("sum_parts");

pub(super) fn sum_parts(
    gpu: &CudaDevice,
    own: &Tensor,
    place: usize,
    others: &Tensor,
    addend: Option<&Tensor>,
    y: &mut Tensor,
) -> Result<()> {
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(own.dtype())?, entry: "sum_parts" };
    let args = [
        Arg::Ptr(y.device_ptr_mut()),
        Arg::Ptr(own.device_ptr()),
        Arg::Ptr(others.device_ptr()),
        Arg::Ptr(addend.map_or(0, Tensor::device_ptr)),
        Arg::I32(place as i32),
        Arg::I32((others.len() / y.len().max(1)) as i32),
        Arg::U64(y.len() as u64),
    ];
    // SAFETY: `own`, each of the others, and the addend, if there is one, have the elements of `y`, checked by the op.
    unsafe { gpu.launch(&kernel, launch::elements_by_eight(gpu, y.len()), BLOCK, 0, &args) }
}
