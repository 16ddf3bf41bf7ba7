use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK};
use crate::stored::Nf4Tensor;
use crate::{DType, Result, Tensor};

kernels! {
    static SOURCE = { file: "nf4", variants: launch::STORAGE };
    kernel quantize_nf4(codes: *mut u8, amaxes: *mut f32, x: *const f32, levels: *const f32, n: u64);
    kernel dequantize_nf4(
        y: *mut X, codes: *const u8, scales: *const u8, groups: *const f32, levels: *const f32, mean: f32, n: u64
    );
}

pub(super) fn quantize(
    gpu: &CudaDevice,
    x: &Tensor,
    levels: &Tensor,
    codes: &mut Tensor,
    amaxes: &mut Tensor,
) -> Result<()> {
    let n = x.len();
    let kernel = SOURCE.kernel(launch::storage(DType::F32)?, kernel::quantize_nf4(codes, amaxes, x, levels, n));
    // SAFETY: `x` has `n` elements, `codes` has a byte for two of them and `amaxes` one element for 64 of them. `levels` has more than 16 elements.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, n.div_ceil(2)), BLOCK, 0) }
}

pub(super) fn dequantize(gpu: &CudaDevice, x: &Nf4Tensor, y: &mut Tensor) -> Result<()> {
    let (Nf4Tensor { codes, scales, groups, levels, mean, .. }, n, defines) = (x, y.len(), launch::storage(y.dtype())?);
    let kernel = SOURCE.kernel(defines, kernel::dequantize_nf4(y, codes, scales, groups, levels, *mean, n));
    // SAFETY: `y` has `n` elements. `codes` has a byte for two of them, `scales` one for 64 of them, and `groups` one element for 256 scales.
    // `levels` has 16 and 256 elements.
    unsafe { gpu.launch(&kernel, launch::elements_by_eight(gpu, n), BLOCK, 0) }
}
