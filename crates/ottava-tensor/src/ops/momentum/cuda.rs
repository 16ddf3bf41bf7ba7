use super::{Direction, Momentum, MomentumParameter};
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{BLOCK, Defines, kernel_source};
use crate::ops::parameter::Gradient;
use crate::{DType, ExpandedTensor, Result, Tensor};

kernel_source!(SOURCE, "momentum", "stored.cuh", "expanded.cuh", "parameter.cuh"; CHUNK);

/// Elements per block.
const CHUNK: usize = 1 << 14;

/// By type of the gradient, type and storage of the momentum, and rule.
pub(crate) const VARIANTS: &[Defines] = &[
    &[("G", "f32"), ("M", "f32"), ("MOMENTS", "Float32"), ("RULE", "Nesterov")],
    &[("G", "f32"), ("M", "f32"), ("MOMENTS", "Float32"), ("RULE", "Sign")],
    &[("G", "f32"), ("M", "bf16"), ("MOMENTS", "Bfloat16"), ("RULE", "Nesterov")],
    &[("G", "f32"), ("M", "bf16"), ("MOMENTS", "Bfloat16"), ("RULE", "Sign")],
    &[("G", "f32"), ("M", "e4m3"), ("MOMENTS", "ScaledMoments"), ("RULE", "Nesterov")],
    &[("G", "f32"), ("M", "e4m3"), ("MOMENTS", "ScaledMoments"), ("RULE", "Sign")],
    &[("G", "f32"), ("M", "u8"), ("MOMENTS", "Expanded"), ("RULE", "Nesterov")],
    &[("G", "f32"), ("M", "u8"), ("MOMENTS", "Expanded"), ("RULE", "Sign")],
    &[("G", "bf16"), ("M", "f32"), ("MOMENTS", "Float32"), ("RULE", "Nesterov")],
    &[("G", "bf16"), ("M", "f32"), ("MOMENTS", "Float32"), ("RULE", "Sign")],
    &[("G", "bf16"), ("M", "bf16"), ("MOMENTS", "Bfloat16"), ("RULE", "Nesterov")],
    &[("G", "bf16"), ("M", "bf16"), ("MOMENTS", "Bfloat16"), ("RULE", "Sign")],
    &[("G", "bf16"), ("M", "e4m3"), ("MOMENTS", "ScaledMoments"), ("RULE", "Nesterov")],
    &[("G", "bf16"), ("M", "e4m3"), ("MOMENTS", "ScaledMoments"), ("RULE", "Sign")],
    &[("G", "bf16"), ("M", "u8"), ("MOMENTS", "Expanded"), ("RULE", "Nesterov")],
    &[("G", "bf16"), ("M", "u8"), ("MOMENTS", "Expanded"), ("RULE", "Sign")],
    &[("G", "e4m3"), ("M", "f32"), ("MOMENTS", "Float32"), ("RULE", "Nesterov")],
    &[("G", "e4m3"), ("M", "f32"), ("MOMENTS", "Float32"), ("RULE", "Sign")],
    &[("G", "e4m3"), ("M", "bf16"), ("MOMENTS", "Bfloat16"), ("RULE", "Nesterov")],
    &[("G", "e4m3"), ("M", "bf16"), ("MOMENTS", "Bfloat16"), ("RULE", "Sign")],
    &[("G", "e4m3"), ("M", "e4m3"), ("MOMENTS", "ScaledMoments"), ("RULE", "Nesterov")],
    &[("G", "e4m3"), ("M", "e4m3"), ("MOMENTS", "ScaledMoments"), ("RULE", "Sign")],
    &[("G", "e4m3"), ("M", "u8"), ("MOMENTS", "Expanded"), ("RULE", "Nesterov")],
    &[("G", "e4m3"), ("M", "u8"), ("MOMENTS", "Expanded"), ("RULE", "Sign")],
];

/// Columns of rows that groups end with; all elements are one row if groups end with rows everywhere.
fn columns_of_groups(m: &ExpandedTensor) -> usize {
    let columns = m.codes.shape()[1];
    if columns.is_multiple_of(ExpandedTensor::GROUP) { m.codes.len() } else { columns }
}

pub(super) fn momentum(
    gpu: &CudaDevice,
    parameter: MomentumParameter,
    rule: Direction,
    norm: &Tensor,
    scalars: &Tensor,
    stores: bool,
) -> Result<()> {
    let MomentumParameter { momentum, grad, direction, seed, offset, amaxes } = parameter;
    let n = grad.values().len();
    if n == 0 {
        return Ok(());
    }
    let narrow = |x: &Tensor| usize::from(x.dtype() == DType::BF16);
    let (gradient, grad_scale) = match grad {
        Gradient::Plain(grad) => (narrow(grad), 0),
        Gradient::Scaled(grad) => (2, grad.scale_inv.device_ptr()),
    };
    let is_scaled = matches!(momentum, Momentum::Scaled(_));
    let amax = amaxes.filter(|_| is_scaled).map_or(0, |amaxes| amaxes.device_ptr_mut() + DType::F32.size() as u64);
    let (storage, columns, [values, scale]) = match momentum {
        Momentum::Plain(m) => (narrow(m), n, [m.device_ptr_mut(), 0]),
        Momentum::Scaled(m) => (2, n, [m.values.device_ptr_mut(), m.scale_inv.device_ptr_mut()]),
        Momentum::Expanded(m) => (3, columns_of_groups(m), [m.codes.device_ptr_mut(), m.groups.device_ptr_mut()]),
    };
    let defines = VARIANTS[(gradient * 4 + storage) * 2 + usize::from(rule == Direction::Sign)];
    let blocks = n / columns * columns.div_ceil(CHUNK);
    let args = [
        Arg::Ptr(direction.device_ptr_mut()),
        Arg::Ptr(values),
        Arg::Ptr(scale),
        Arg::Ptr(amax),
        Arg::Ptr(grad.values().device_ptr()),
        Arg::Ptr(grad_scale),
        Arg::Ptr(norm.device_ptr()),
        Arg::Ptr(scalars.device_ptr()),
        Arg::U64(seed),
        Arg::U64(offset as u64),
        Arg::U64(columns as u64),
        Arg::U64((n / columns) as u64),
    ];
    let entry = if stores { "momentum" } else { "momentum_amax" };
    let kernel = Kernel { source: &SOURCE, defines, entry };
    // SAFETY: gradient, momentum and direction have `n` elements, in rows of `columns`, of the types in the defines, checked by the op; the
    // amax is the second of two.
    unsafe { gpu.launch(&kernel, [blocks as u32, 1, 1], BLOCK, 0, &args)? };
    if is_scaled && stores {
        let args = [Arg::Ptr(scale), Arg::Ptr(amax), Arg::Ptr(norm.device_ptr())];
        let kernel = Kernel { source: &SOURCE, defines, entry: "momentum_scale" };
        // SAFETY: each has one element.
        unsafe { gpu.launch(&kernel, [1, 1, 1], 32, 0, &args)? };
    }
    Ok(())
}
