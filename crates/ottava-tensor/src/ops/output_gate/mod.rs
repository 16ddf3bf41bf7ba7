//! The gate of a sublayer's output, for each element: a sigmoid after attention (Qiu et al. 2025, arXiv:2505.06708), or SiLU after a state space without a
//! norm.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::dispatch::dispatch;
use super::expect_compute;
use crate::{Result, Tensor};

/// The function of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateFunction {
    /// `sigmoid(gate)`.
    Sigmoid,
    /// `silu(gate) = gate · sigmoid(gate)`.
    Silu,
}

fn check(what: &str, x: &Tensor, others: &[&Tensor]) -> Result<()> {
    expect_compute(what, x)?;
    for tensor in others {
        tensor.expect(what, x.shape())?;
        tensor.expect_dtype(what, &[x.dtype()])?;
        tensor.expect_device(what, x.device())?;
    }
    Ok(())
}

/// Returns `y = x · f(gate)` with the function `f` of `how`, in the type of `x`. `gate` has the shape and the type of `x`.
///
/// Errors with [`Error::Shape`](crate::Error::Shape) or [`Error::DType`](crate::Error::DType) if it does not.
pub fn output_gate(how: GateFunction, x: &Tensor, gate: &Tensor) -> Result<Tensor> {
    check("output_gate", x, &[gate])?;
    let mut y = x.empty_like()?;
    dispatch! { x.device(),
        cpu => cpu::output_gate(how, x, gate, &mut y),
        gpu => cuda::output_gate(gpu, how, x, gate, &mut y)?,
    }
    Ok(y)
}

/// Returns the gradients of [`output_gate`] by `x` and by `gate`: `dx = dy · f(gate)` and `dgate = dy · x · f′(gate)`.
///
/// Has the errors of [`output_gate`].
pub fn output_gate_backward(how: GateFunction, dy: &Tensor, x: &Tensor, gate: &Tensor) -> Result<[Tensor; 2]> {
    check("output_gate_backward", x, &[dy, gate])?;
    let (mut dx, mut dgate) = (x.empty_like()?, x.empty_like()?);
    dispatch! { x.device(),
        cpu => cpu::output_gate_backward(how, [dy, x, gate], [&mut dx, &mut dgate]),
        gpu => cuda::output_gate_backward(gpu, how, [dy, x, gate], [&mut dx, &mut dgate])?,
    }
    Ok([dx, dgate])
}
