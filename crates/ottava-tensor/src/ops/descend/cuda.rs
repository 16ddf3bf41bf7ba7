use super::DescendParameter;
use crate::cuda::CudaDevice;
use crate::ops::declaration::{Address, AddressMut, kernels};
use crate::ops::launch::{self, BLOCK, Defines};
use crate::ops::parameter::{UpdatedWeight, WeightCopy};
use crate::{DType, Result, Tensor};

kernels! {
    static SOURCE = { file: "descend", headers: ["stored.cuh", "parameter.cuh"], variants: VARIANTS };
    kernel descend, descend_amax(
        weight: *mut W, copy: *mut X, rest: *mut void, amax: *mut f32, direction: *const bf16, weight_decay: f64, norm: *const f32,
        scalars: *const Scalars, seed: u64, offset: u64, n: u64
    );
    kernel descend_scale(scale: *mut f32, amax: *const f32, norm: *const f32);
}

/// The variants: the storage format of the weights, and the type that layers read.
const VARIANTS: &[Defines] = &[
    &[("WEIGHTS", "Master"), ("X", "f32")],
    &[("WEIGHTS", "Master"), ("X", "f16")],
    &[("WEIGHTS", "Master"), ("X", "bf16")],
    &[("WEIGHTS", "ScaledMaster"), ("X", "f32")],
    &[("WEIGHTS", "ScaledMaster"), ("X", "f16")],
    &[("WEIGHTS", "ScaledMaster"), ("X", "bf16")],
    &[("WEIGHTS", "Split"), ("X", "bf16")],
    &[("WEIGHTS", "Chance"), ("X", "bf16")],
];

pub(super) fn descend(
    gpu: &CudaDevice,
    mut parameter: DescendParameter,
    norm: &Tensor,
    scalars: &Tensor,
    stores: bool,
) -> Result<()> {
    let n = parameter.direction.len();
    if n == 0 {
        return Ok(());
    }
    let is_scaled = super::is_scaled(&parameter);
    let read = match parameter.weight.read_dtype() {
        DType::F32 => 0,
        DType::F16 => 1,
        _ => 2,
    };
    let copied = |copy: &mut WeightCopy| copy.stored().map_or(0, Tensor::device_ptr_mut);
    let (variant, [weight, copy, rest]) = match &mut parameter.weight {
        UpdatedWeight::Master { master, copy } => (read, [master.device_ptr_mut(), copied(copy), 0]),
        UpdatedWeight::Scaled { master, copy } => {
            (3 + read, [master.values.device_ptr_mut(), copied(copy), master.scale_inv.device_ptr_mut()])
        }
        UpdatedWeight::Split { weight, rest } => (6, [weight.device_ptr_mut(), 0, rest.device_ptr_mut()]),
        UpdatedWeight::Stochastic { weight } => (7, [weight.device_ptr_mut(), 0, 0]),
    };
    let amax = parameter.amaxes.filter(|_| is_scaled).map_or(0, |amaxes| amaxes.device_ptr_mut());
    let entry = if stores { kernel::descend } else { kernel::descend_amax };
    let entry = entry(
        AddressMut(weight),
        AddressMut(copy),
        AddressMut(rest),
        AddressMut(amax),
        parameter.direction,
        parameter.weight_decay,
        norm,
        scalars,
        parameter.seed,
        parameter.offset,
        n,
    );
    let defines = VARIANTS[variant];
    let kernel = SOURCE.kernel(defines, entry);
    // SAFETY: the op has checked that weights, their copy and the direction have `n` elements of the types in the defines. Scaled weights have
    // one scale and an amax; split weights have a remainder per element.
    unsafe { gpu.launch(&kernel, launch::elements_by_eight(gpu, n), BLOCK, 0)? };
    if is_scaled && stores {
        let kernel = SOURCE.kernel(defines, kernel::descend_scale(AddressMut(rest), Address(amax), norm));
        // SAFETY: each pointer has one element.
        unsafe { gpu.launch(&kernel, [1, 1, 1], 32, 0)? };
    }
    Ok(())
}
