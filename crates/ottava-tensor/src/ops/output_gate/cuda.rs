use super::GateFunction;
use crate::cuda::{CudaDevice, Entry, Kernel};
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK, Defines};
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "output_gate", headers: ["sigmoid.cuh"], variants: VARIANTS };
    kernel output_gate(y: *mut X, x: *const X, gate: *const X, n: u64);
    kernel output_gate_backward(dx: *mut X, dgate: *mut X, dy: *const X, x: *const X, gate: *const X, n: u64);
}

/// The kernels by storage type and by the function of the gate.
const VARIANTS: &[Defines] = &[
    &[("X", "f32"), ("SILU", "0")],
    &[("X", "f16"), ("SILU", "0")],
    &[("X", "bf16"), ("SILU", "0")],
    &[("X", "f32"), ("SILU", "1")],
    &[("X", "f16"), ("SILU", "1")],
    &[("X", "bf16"), ("SILU", "1")],
];

fn variant(x: &Tensor, how: GateFunction, entry: Entry) -> Result<Kernel> {
    let of_gate = match how {
        GateFunction::Sigmoid => "0",
        GateFunction::Silu => "1",
    };
    Ok(SOURCE.kernel(launch::variant(VARIANTS, x.dtype(), of_gate)?, entry))
}

pub(super) fn output_gate(
    gpu: &CudaDevice,
    how: GateFunction,
    x: &Tensor,
    gate: &Tensor,
    y: &mut Tensor,
) -> Result<()> {
    let kernel = variant(x, how, kernel::output_gate(y, x, gate, x.len()))?;
    // SAFETY: all three tensors have `x.len()` elements of one type.
    unsafe { gpu.launch_early(&kernel, launch::elements_by_eight(gpu, x.len()), BLOCK, 0) }
}

pub(super) fn output_gate_backward(
    gpu: &CudaDevice,
    how: GateFunction,
    [dy, x, gate]: [&Tensor; 3],
    [dx, dgate]: [&mut Tensor; 2],
) -> Result<()> {
    let entry = kernel::output_gate_backward(dx, dgate, dy, x, gate, x.len());
    let kernel = variant(x, how, entry)?;
    // SAFETY: all five tensors have `x.len()` elements of one type.
    unsafe { gpu.launch(&kernel, launch::elements_by_eight(gpu, x.len()), BLOCK, 0) }
}
