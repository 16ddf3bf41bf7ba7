//! xIELU, an activation without a gate whose two factors are learned. Huang and Schlag 2024, arXiv:2411.13010.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::{expect_compute, expect_gradient};
use crate::ops::dispatch::dispatch;
use crate::{Result, Tensor};

/// The slope `β` at zero.
pub const XIELU_BETA: f64 = 0.5;
/// The bound `ε` of inputs of the exponential function.
pub const XIELU_EPS: f64 = -1e-6;

/// The learned numbers of xIELU. Each is `[1]` in the type of `x`.
#[derive(Clone, Copy, Debug)]
pub struct XieluAlphas<'a> {
    /// The number `α_p`, from which the factor of positive inputs is computed.
    pub positive: &'a Tensor,
    /// The number `α_n`, from which the factor of the other inputs is computed.
    pub negative: &'a Tensor,
}

/// Returns `y = P · x² + β · x` for each `x > 0`, else `y = N · (e^min(x, ε) - 1 - x) + β · x`, in the type of `x`. The factors are `P = softplus(α_p)`
/// and `N = β + softplus(α_n)`.
///
/// Errors with [`Error::Shape`](crate::Error::Shape) or [`Error::DType`](crate::Error::DType) if the alphas do not fit.
pub fn xielu(x: &Tensor, alphas: XieluAlphas) -> Result<Tensor> {
    check(x, alphas)?;
    let mut y = x.empty_like()?;
    dispatch! { x.device(),
        cpu => cpu::xielu(x, alphas, &mut y),
        gpu => cuda::xielu(gpu, x, alphas, &mut y)?,
    }
    Ok(y)
}

/// Returns the gradient of [`xielu`] by `x`: `dx = dy · (2 · P · x + β)` for each `x > 0`, else `dx = dy · (N · (e^x - 1) + β)`, without `e^x` for `x`
/// from `ε` on. Adds `sigmoid(α) · Σ dy · t` to the gradients `[1]` of both alphas, F32 (F64 for F64), where `t` is the term of their factor.
///
/// Has the errors of [`xielu`].
pub fn xielu_backward(
    dy: &Tensor,
    x: &Tensor,
    alphas: XieluAlphas,
    [dpositive, dnegative]: [&mut Tensor; 2],
) -> Result<Tensor> {
    check(x, alphas)?;
    dy.expect("xielu_backward: dy", x.shape())?;
    dy.expect_dtype("xielu_backward: dy", &[x.dtype()])?;
    dy.expect_device("xielu_backward: dy", x.device())?;
    for (what, gradient) in [("xielu_backward: dpositive", &*dpositive), ("xielu_backward: dnegative", &*dnegative)] {
        gradient.expect(what, &[1])?;
        expect_gradient(what, gradient, x)?;
    }
    let mut dx = x.empty_like()?;
    dispatch! { x.device(),
        cpu => cpu::xielu_backward(dy, x, alphas, &mut dx, [dpositive, dnegative]),
        gpu => cuda::xielu_backward(gpu, [dy, x], alphas, &mut dx, [dpositive, dnegative])?,
    }
    Ok(dx)
}

fn check(x: &Tensor, XieluAlphas { positive, negative }: XieluAlphas) -> Result<()> {
    expect_compute("xielu: x", x)?;
    for (what, alpha) in [("xielu: the alpha of positive inputs", positive), ("xielu: the other alpha", negative)] {
        alpha.expect(what, &[1])?;
        alpha.expect_dtype(what, &[x.dtype()])?;
        alpha.expect_device(what, x.device())?;
    }
    Ok(())
}
