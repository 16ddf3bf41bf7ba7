use super::{Direction, Momentum, MomentumParameter};
use crate::cuda::CudaDevice;
use crate::ops::declaration::{Address, AddressMut, kernels};
use crate::ops::launch::{BLOCK, Defines};
use crate::ops::parameter::Gradient;
use crate::{DType, ExpandedTensor, Result, Tensor};

kernels! {
    static SOURCE = {
        file: "momentum", headers: ["stored.cuh", "expanded.cuh", "parameter.cuh"], constants: [CHUNK], variants: VARIANTS
    };
    kernel momentum, momentum_amax(
        direction: *mut bf16, momentum: *mut M, scale: *mut f32, amax: *mut f32, grad: *const G, grad_scale: *const f32, norm: *const f32,
        scalars: *const Scalars, seed: u64, offset: u64, columns: u64, rows: u64
    );
    kernel momentum_scale(scale: *mut f32, amax: *const f32, norm: *const f32);
}

/// The number of elements per block.
const CHUNK: usize = 1 << 14;

/// The variants: type of the gradient, type and storage format of the momentum, and rule.
const VARIANTS: &[Defines] = &[
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

/// Returns the number of columns of rows that consist of whole groups. If all rows of the matrix do, all elements form one row.
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
    let entry = if stores { kernel::momentum } else { kernel::momentum_amax };
    let entry = entry(
        direction,
        AddressMut(values),
        AddressMut(scale),
        AddressMut(amax),
        grad.values(),
        Address(grad_scale),
        norm,
        scalars,
        seed,
        offset,
        columns,
        n / columns,
    );
    let kernel = SOURCE.kernel(defines, entry);
    // SAFETY: the op has checked that gradient, momentum and direction have `n` elements, in rows of `columns`, of the types in the defines. `amax`
    // is the second of two elements.
    unsafe { gpu.launch(&kernel, [blocks as u32, 1, 1], BLOCK, 0)? };
    if is_scaled && stores {
        let kernel = SOURCE.kernel(defines, kernel::momentum_scale(AddressMut(scale), Address(amax), norm));
        // SAFETY: each pointer has one element.
        unsafe { gpu.launch(&kernel, [1, 1, 1], 32, 0)? };
    }
    Ok(())
}
