use super::{COEFFICIENTS, EPSILON};
use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK, UNTYPED};
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "newton_schulz", variants: UNTYPED };
    kernel normalize(y: *mut bf16, x: *const bf16, norm: *const f32, epsilon: f32, n: u64);
    kernel polynomial(gram: *mut bf16, square: *const f32, a: f32, b: f32, c: f32, factor: f32, n: u64, elements: u64);
}

pub(super) fn normalize(gpu: &CudaDevice, x: &Tensor, norm: &Tensor, y: &mut Tensor) -> Result<()> {
    let kernel = SOURCE.kernel(&[], kernel::normalize(y, x, norm, EPSILON, x.len()));
    // SAFETY: both matrices have `x.len()` elements, BF16, and the norm has one, F32.
    unsafe { gpu.launch(&kernel, launch::elements_by_eight(gpu, x.len()), BLOCK, 0) }
}

pub(super) fn polynomial(gpu: &CudaDevice, gram: &mut Tensor, square: &Tensor, factor: f32) -> Result<()> {
    let [a, b, c] = COEFFICIENTS;
    let entry = kernel::polynomial(gram, square, a, b, c, factor, square.shape()[0], square.len());
    let kernel = SOURCE.kernel(&[], entry);
    // SAFETY: both matrices have `square.len()` elements, BF16 and F32, in rows of the given length.
    unsafe { gpu.launch(&kernel, launch::elements_by_eight(gpu, square.len()), BLOCK, 0) }
}
