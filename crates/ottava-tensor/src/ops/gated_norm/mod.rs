//! RMSNorm of groups of elements with a gate: the norm after the gated delta rule (Yang et al. 2024, arXiv:2412.06464) and after the state space of
//! Mamba-2 (Dao and Gu 2024, arXiv:2405.21060).

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;
pub(super) mod wide_gated_norm;

use super::dispatch::dispatch;
use super::{expect_compute, expect_gradient};
use crate::{Error, Result, Tensor};

/// The place of the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateOrder {
    /// The gate multiplies the result of the norm, as in gated delta nets.
    AfterNorm,
    /// The gate multiplies the input of the norm, as in Mamba-2.
    BeforeNorm,
}

/// A norm with a gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedNorm {
    /// The number `D` of neighbouring elements that are normalised together.
    pub size: usize,
    /// The place of the gate.
    pub order: GateOrder,
    /// The constant that is added to the mean of squares.
    pub eps: f64,
}

fn check(what: &str, x: &Tensor, z: &Tensor, weight: &Tensor, how: &GatedNorm) -> Result<()> {
    let ([tokens, width], [weights]) = (x.dims(&format!("{what}: x"))?, weight.dims(&format!("{what}: weight"))?);
    expect_compute(&format!("{what}: x"), x)?;
    z.expect(&format!("{what}: z"), &[tokens, width])?;
    for tensor in [z, weight] {
        tensor.expect_dtype(what, &[x.dtype()])?;
        tensor.expect_device(what, x.device())?;
    }
    if how.size == 0 || width == 0 || !width.is_multiple_of(how.size) {
        return Err(Error::Value(format!(
            "{what}: rows of {width} elements do not divide into groups of {}",
            how.size
        )));
    }
    match weights == how.size || weights == width {
        true => Ok(()),
        false => Err(Error::Value(format!(
            "{what}: {weights} weights; rows of {width} elements in groups of {} have {} or {width}",
            how.size, how.size
        ))),
    }
}

/// Returns the norm of `x` with the gate `silu(z)`. Computed in F32 (F64 for F64), and rounded once. With `r(v) = 1 / sqrt(mean(v²) + eps)` over the `D`
/// elements of each group:
///
/// - [`GateOrder::AfterNorm`]: `y = x · r(x) · weight · silu(z)`
/// - [`GateOrder::BeforeNorm`]: `y = u · r(u) · weight` with `u = x · silu(z)`
///
/// `x` and `z` are `[T, G·D]`. `weight` is `[D]` for all groups, or `[G·D]`. Errors with [`Error::Shape`] or [`Error::Value`] if they do not fit.
pub fn gated_norm(x: &Tensor, z: &Tensor, weight: &Tensor, how: GatedNorm) -> Result<Tensor> {
    check("gated_norm", x, z, weight, &how)?;
    let mut y = x.empty_like()?;
    dispatch! { x.device(),
        cpu => cpu::gated_norm(x, z, weight, how, &mut y),
        gpu => cuda::gated_norm(gpu, [x, z], weight, how, &mut y)?,
    }
    Ok(y)
}

/// Returns the gradients of [`gated_norm`] by `x` and `z`, from the gradient `dy` and the same inputs. Adds to `dweight`, F32 (F64 for F64) in the shape
/// of `weight`.
///
/// With `v` the input of the norm, `n = v · r(v)`, and `t` the gradient by `n`: the gradient by `v` is `r(v) · (t − n · mean(t · n))`. After the norm,
/// `t = dy · weight · silu(z)`, `dz = dy · n · weight · silu′(z)`, and `dweight += Σ dy · n · silu(z)`. Before the norm, `t = dy · weight`; `dx` and `dz`
/// are the gradient by `v`, times `silu(z)` and times `x · silu′(z)`; and `dweight += Σ dy · n`. The sums are over tokens and over the groups that share a
/// weight, in partial sums that are added in order, on the CPU of 64 rows. Has the errors of [`gated_norm`].
pub fn gated_norm_backward(
    dy: &Tensor,
    x: &Tensor,
    z: &Tensor,
    weight: &Tensor,
    how: GatedNorm,
    dweight: &mut Tensor,
) -> Result<[Tensor; 2]> {
    check("gated_norm_backward", x, z, weight, &how)?;
    dy.expect("gated_norm_backward: dy", x.shape())?;
    dy.expect_dtype("gated_norm_backward: dy", &[x.dtype()])?;
    dy.expect_device("gated_norm_backward: dy", x.device())?;
    dweight.expect("gated_norm_backward: dweight", weight.shape())?;
    expect_gradient("gated_norm_backward: dweight", dweight, x)?;
    let (mut dx, mut dz) = (x.empty_like()?, x.empty_like()?);
    dispatch! { x.device(),
        cpu => cpu::gated_norm_backward([dy, x, z], weight, how, [&mut dx, &mut dz], dweight),
        gpu => cuda::gated_norm_backward(gpu, [dy, x, z], weight, how, [&mut dx, &mut dz], dweight)?,
    }
    Ok([dx, dz])
}
