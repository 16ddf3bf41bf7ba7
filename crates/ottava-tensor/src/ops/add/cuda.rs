use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK};
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "add", variants: launch::STORAGE };
    kernel add(y: *mut X, a: *const X, b: *const X, n: u64);
}

pub(super) fn add(gpu: &CudaDevice, a: &Tensor, b: &Tensor, y: &mut Tensor) -> Result<()> {
    let kernel = SOURCE.kernel(launch::storage(a.dtype())?, kernel::add(y, a, b, a.len()));
    // SAFETY: all three tensors have `a.len()` elements of one type.
    unsafe { gpu.launch(&kernel, launch::elements_by_eight(gpu, a.len()), BLOCK, 0) }
}
