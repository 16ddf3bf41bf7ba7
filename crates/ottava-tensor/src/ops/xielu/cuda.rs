use super::XieluAlphas;
use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK};
use crate::{DType, Result, Tensor};

/// The number of parts in which the sums of the alphas' gradients are computed.
const PARTS: usize = BLOCK as usize;

kernels! {
    static SOURCE = { file: "xielu", constants: [PARTS], variants: launch::STORAGE };
    kernel xielu(y: *mut X, x: *const X, alpha_p: *const X, alpha_n: *const X, n: u64);
    kernel xielu_backward(
        dx: *mut X, parts: *mut f32, dy: *const X, x: *const X, alpha_p: *const X, alpha_n: *const X, n: u64
    );
    kernel xielu_alphas(
        dpositive: *mut f32, dnegative: *mut f32, parts: *const f32, alpha_p: *const X, alpha_n: *const X
    );
}

pub(super) fn xielu(gpu: &CudaDevice, x: &Tensor, alphas: XieluAlphas, y: &mut Tensor) -> Result<()> {
    let entry = kernel::xielu(y, x, alphas.positive, alphas.negative, x.len());
    let kernel = SOURCE.kernel(launch::storage(x.dtype())?, entry);
    // SAFETY: both tensors have `x.len()` elements, and each alpha has one.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, x.len()), BLOCK, 0) }
}

pub(super) fn xielu_backward(
    gpu: &CudaDevice,
    [dy, x]: [&Tensor; 2],
    XieluAlphas { positive, negative }: XieluAlphas,
    dx: &mut Tensor,
    [dpositive, dnegative]: [&mut Tensor; 2],
) -> Result<()> {
    let mut parts = Tensor::empty(x.device(), &[2 * PARTS], DType::F32)?;
    let storage = launch::storage(x.dtype())?;
    let kernel = SOURCE.kernel(storage, kernel::xielu_backward(dx, &mut parts, dy, x, positive, negative, x.len()));
    // SAFETY: all tensors except `parts` and the alphas have `x.len()` elements; each block writes two of `2 * PARTS` parts.
    unsafe { gpu.launch(&kernel, [PARTS as u32, 1, 1], BLOCK, 0)? };
    let kernel = SOURCE.kernel(storage, kernel::xielu_alphas(dpositive, dnegative, &parts, positive, negative));
    // SAFETY: each thread reads one of `2 * PARTS` parts; gradients and alphas have one element.
    unsafe { gpu.launch(&kernel, [2, 1, 1], BLOCK, 0) }
}
