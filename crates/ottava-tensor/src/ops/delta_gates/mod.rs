//! The gates of the gated delta rule: how fast a state decays, and how strongly a token writes to it. Yang et al. 2024, arXiv:2412.06464.

pub(super) mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::dispatch::dispatch;
use super::{expect_compute, expect_gradient, real_type};
use crate::{Result, Tensor};

/// The projections and parameters from which gates are computed, for `H` value heads.
#[derive(Clone, Copy, Debug)]
pub struct GateInput<'a> {
    /// The projection for `beta`, `[T, H]`.
    pub b: &'a Tensor,
    /// The projection for `g`, `[T, H]` in the type of `b`.
    pub a: &'a Tensor,
    /// The logarithm of each head's rate of decay, `[H]` in F32 (F64 for F64).
    pub a_log: &'a Tensor,
    /// The bias that is added to `a`, `[H]` in F32 (F64 for F64).
    pub dt_bias: &'a Tensor,
}

/// The gates of each token and value head, in F32 (F64 for F64).
#[derive(Clone, Debug)]
pub struct DeltaGates {
    /// The logarithm of the factor of the state, at most 0, `[T, H]`.
    pub g: Tensor,
    /// The share of the difference that is written to the state, between 0 and 1, `[T, H]`.
    pub beta: Tensor,
}

/// The gradients by the inputs of [`delta_gates`].
pub struct GateGradient {
    /// The gradient by `b`, `[T, H]` in the type of `b`.
    pub b: Tensor,
    /// The gradient by `a`, `[T, H]` in the type of `a`.
    pub a: Tensor,
}

fn check(what: &str, input: &GateInput) -> Result<[usize; 2]> {
    let GateInput { b, a, a_log, dt_bias } = *input;
    let [tokens, heads] = b.dims(&format!("{what}: b"))?;
    expect_compute(&format!("{what}: b"), b)?;
    a.expect(&format!("{what}: a"), &[tokens, heads])?;
    a.expect_dtype(&format!("{what}: a"), &[b.dtype()])?;
    for (of, vector) in [("a_log", a_log), ("dt_bias", dt_bias)] {
        vector.expect(&format!("{what}: {of}"), &[heads])?;
        vector.expect_dtype(&format!("{what}: {of}"), &[real_type(b.dtype())])?;
    }
    [a, a_log, dt_bias].into_iter().try_for_each(|tensor| tensor.expect_device(what, b.device()))?;
    Ok([tokens, heads])
}

/// Returns `g = −exp(a_log) · softplus(a + dt_bias)` and `beta = sigmoid(b)` in F32 (F64 for F64), each `[T, H]`. `softplus(x) = ln(1 + exp(x))`.
///
/// Errors with [`Error::Shape`](crate::Error::Shape) or [`Error::DType`](crate::Error::DType) if a tensor does not fit `b`.
pub fn delta_gates(input: GateInput) -> Result<DeltaGates> {
    let shape = check("delta_gates", &input)?;
    let empty = || Tensor::empty(input.b.device(), &shape, real_type(input.b.dtype()));
    let mut gates = DeltaGates { g: empty()?, beta: empty()? };
    dispatch! { input.b.device(),
        cpu => cpu::delta_gates(input, &mut gates),
        gpu => cuda::delta_gates(gpu, input, &mut gates)?,
    }
    Ok(gates)
}

/// Returns the gradients by `b` and `a` of [`delta_gates`], from its result `gates` and the gradients `d` by the gates. Adds to the gradients of the
/// parameters, `da_log` and `ddt_bias` `[H]` in F32 (F64 for F64).
///
/// `db = dbeta · beta · (1 − beta)`; `da = −dg · exp(a_log) · sigmoid(a + dt_bias)`; `ddt_bias += Σ_t da`; `da_log += Σ_t dg · g`. The sums are of `da`
/// before it is rounded, and add partial sums in order, on the CPU of 64 rows. Has the errors of [`delta_gates`].
pub fn delta_gates_backward(
    d: &DeltaGates,
    input: GateInput,
    gates: &DeltaGates,
    da_log: &mut Tensor,
    ddt_bias: &mut Tensor,
) -> Result<GateGradient> {
    let shape = check("delta_gates_backward", &input)?;
    for gate in [&d.g, &d.beta, &gates.g, &gates.beta] {
        gate.expect("delta_gates_backward: gates", &shape)?;
        gate.expect_dtype("delta_gates_backward: gates", &[real_type(input.b.dtype())])?;
        gate.expect_device("delta_gates_backward: gates", input.b.device())?;
    }
    for (what, gradient) in [("delta_gates_backward: da_log", &*da_log), ("delta_gates_backward: ddt_bias", &*ddt_bias)]
    {
        gradient.expect(what, &shape[1..])?;
        expect_gradient(what, gradient, input.b)?;
    }
    let mut gradient = GateGradient { b: input.b.empty_like()?, a: input.a.empty_like()? };
    dispatch! { input.b.device(),
        cpu => cpu::delta_gates_backward(d, input, gates, &mut gradient, [da_log, ddt_bias]),
        gpu => cuda::delta_gates_backward(gpu, d, input, gates, &mut gradient, [da_log, ddt_bias])?,
    }
    Ok(gradient)
}
