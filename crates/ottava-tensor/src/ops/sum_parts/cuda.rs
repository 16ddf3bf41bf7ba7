use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK};
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "sum_parts", variants: launch::STORAGE };
    kernel sum_parts(y: *mut X, own: *const X, others: *const X, addend: *const X, place: i32, count: i32, n: u64);
}

pub(super) fn sum_parts(
    gpu: &CudaDevice,
    own: &Tensor,
    place: usize,
    others: &Tensor,
    addend: Option<&Tensor>,
    y: &mut Tensor,
) -> Result<()> {
    let (n, count) = (y.len(), others.len() / y.len().max(1));
    let entry = kernel::sum_parts(y, own, others, addend, place, count, n);
    let kernel = SOURCE.kernel(launch::storage(own.dtype())?, entry);
    // SAFETY: the op has checked that `own`, each of the other parts, and the addend (if given) have as many elements as `y`.
    unsafe { gpu.launch(&kernel, launch::elements_by_eight(gpu, n), BLOCK, 0) }
}
