use super::DescendParameter;
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, Defines, kernel_source};
use crate::ops::parameter::{UpdatedWeight, WeightCopy};
use crate::{DType, Result, Tensor};

kernel_source!(SOURCE, "descend", "stored.cuh", "parameter.cuh");

/// By storage of the weights, and type of the weights that layers read.
pub(crate) const VARIANTS: &[Defines] = &[
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
    let args = [
        Arg::Ptr(weight),
        Arg::Ptr(copy),
        Arg::Ptr(rest),
        Arg::Ptr(amax),
        Arg::Ptr(parameter.direction.device_ptr()),
        Arg::U64(parameter.weight_decay.to_bits()),
        Arg::Ptr(norm.device_ptr()),
        Arg::Ptr(scalars.device_ptr()),
        Arg::U64(parameter.seed),
        Arg::U64(parameter.offset as u64),
        Arg::U64(n as u64),
    ];
    let (defines, entry) = (VARIANTS[variant], if stores { "descend" } else { "descend_amax" });
    let kernel = Kernel { source: &SOURCE, defines, entry };
    // SAFETY: weights, their copy and the direction have `n` elements of the types in the defines, checked by the op; scaled weights have
    // one scale and an amax, split ones a remainder per element.
    unsafe { gpu.launch(&kernel, launch::elements_by_eight(gpu, n), BLOCK, 0, &args)? };
    if is_scaled && stores {
        let args = [Arg::Ptr(rest), Arg::Ptr(amax), Arg::Ptr(norm.device_ptr())];
        let kernel = Kernel { source: &SOURCE, defines, entry: "descend_scale" };
        // SAFETY: each has one element.
        unsafe { gpu.launch(&kernel, [1, 1, 1], 32, 0, &args)? };
    }
    Ok(())
}
