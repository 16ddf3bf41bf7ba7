use super::GateFunction;
use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::dispatch::no_kernel;
use crate::ops::launch::{self, BLOCK};
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "output_gate", headers: ["sigmoid.cuh"], variants: launch::STORAGE };
    kernel output_gate(y: *mut X, x: *const X, gate: *const X, n: u64);
    kernel output_gate_backward(dx: *mut X, dgate: *mut X, dy: *const X, x: *const X, gate: *const X, n: u64);
}

/// Errors unless the gate has a sigmoid.
fn expect_sigmoid(how: GateFunction) -> Result<()> {
    match how {
        GateFunction::Sigmoid => Ok(()),
        GateFunction::Silu => Err(no_kernel("output_gate with SiLU")),
    }
}

pub(super) fn output_gate(
    gpu: &CudaDevice,
    how: GateFunction,
    x: &Tensor,
    gate: &Tensor,
    y: &mut Tensor,
) -> Result<()> {
    expect_sigmoid(how)?;
    let kernel = SOURCE.kernel(launch::storage(x.dtype())?, kernel::output_gate(y, x, gate, x.len()));
    // SAFETY: all three tensors have `x.len()` elements of one type.
    unsafe { gpu.launch_early(&kernel, launch::elements_by_eight(gpu, x.len()), BLOCK, 0) }
}

pub(super) fn output_gate_backward(
    gpu: &CudaDevice,
    how: GateFunction,
    [dy, x, gate]: [&Tensor; 3],
    [dx, dgate]: [&mut Tensor; 2],
) -> Result<()> {
    expect_sigmoid(how)?;
    let entry = kernel::output_gate_backward(dx, dgate, dy, x, gate, x.len());
    let kernel = SOURCE.kernel(launch::storage(x.dtype())?, entry);
    // SAFETY: all five tensors have `x.len()` elements of one type.
    unsafe { gpu.launch(&kernel, launch::elements_by_eight(gpu, x.len()), BLOCK, 0) }
}
