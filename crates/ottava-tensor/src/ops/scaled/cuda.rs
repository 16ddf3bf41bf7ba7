use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::{BLOCK, Defines, elements, elements_by_eight};
use crate::stored::ScaledTensor;
use crate::{DType, Result, Tensor};

kernels! {
    static SOURCE = { file: "scaled", headers: ["stored.cuh"], variants: VARIANTS };
    kernel scaled(y: *mut Y, scale_inv: *mut f32, x: *const X, amax: *const f32, largest: f32, n: u64);
    kernel unscaled(x: *mut X, y: *const Y, scale_inv: *const f32, n: u64);
    kernel split(upper: *mut u16, rest: *mut u16, x: *const f32, n: u64);
}

/// The variants: each plain type with each stored type.
const VARIANTS: &[Defines] = &[
    &[("X", "f32"), ("Y", "f16")],
    &[("X", "f32"), ("Y", "e4m3")],
    &[("X", "bf16"), ("Y", "f16")],
    &[("X", "bf16"), ("Y", "e4m3")],
    &[("X", "f16"), ("Y", "f16")],
    &[("X", "f16"), ("Y", "e4m3")],
];

fn variant(plain: DType, stored: DType) -> Defines {
    let plain = match plain {
        DType::F32 => 0,
        DType::BF16 => 1,
        _ => 2,
    };
    VARIANTS[2 * plain + usize::from(stored == DType::E4M3)]
}

pub(super) fn scaled(gpu: &CudaDevice, x: &Tensor, amax: &Tensor, out: &mut ScaledTensor) -> Result<()> {
    let largest = out.values.dtype().max_finite().expect("F16 and E4M3 have one");
    let defines = variant(x.dtype(), out.values.dtype());
    let entry = kernel::scaled(&mut out.values, &mut out.scale_inv, x, amax, largest, x.len());
    let kernel = SOURCE.kernel(defines, entry);
    // SAFETY: `x` and `values` have as many elements as the last argument says, of the types in the defines. The other tensors have one F32 element.
    unsafe { gpu.launch(&kernel, elements_by_eight(gpu, x.len()), BLOCK, 0) }
}

pub(super) fn unscaled(gpu: &CudaDevice, x: &ScaledTensor, y: &mut Tensor) -> Result<()> {
    let (n, defines) = (y.len(), variant(y.dtype(), x.values.dtype()));
    let kernel = SOURCE.kernel(defines, kernel::unscaled(y, &x.values, &x.scale_inv, x.values.len()));
    // SAFETY: as above.
    unsafe { gpu.launch(&kernel, elements_by_eight(gpu, n), BLOCK, 0) }
}

pub(super) fn split(gpu: &CudaDevice, x: &Tensor, upper: &mut Tensor, rest: &mut Tensor) -> Result<()> {
    let kernel = SOURCE.kernel(VARIANTS[0], kernel::split(upper, rest, x, x.len()));
    // SAFETY: all three tensors have as many elements as the last argument says, of the types of the kernel.
    unsafe { gpu.launch(&kernel, elements(gpu, x.len()), BLOCK, 0) }
}
