//! RMSNorm of each head, then a gate: the norm after the gated delta rule. Yang et al. 2024, arXiv:2412.06464.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::dispatch::dispatch;
use super::head_norm::cuda::LARGEST_HEAD;
use super::{expect_compute, expect_gradient};
use crate::{Device, Error, Result, Tensor};

fn check(what: &str, x: &Tensor, z: &Tensor, weight: &Tensor) -> Result<()> {
    let ([tokens, width], [dim]) = (x.dims(&format!("{what}: x"))?, weight.dims(&format!("{what}: weight"))?);
    expect_compute(&format!("{what}: x"), x)?;
    z.expect(&format!("{what}: z"), &[tokens, width])?;
    for tensor in [z, weight] {
        tensor.expect_dtype(what, &[x.dtype()])?;
        tensor.expect_device(what, x.device())?;
    }
    if dim == 0 || !width.is_multiple_of(dim) {
        return Err(Error::Value(format!("{what}: rows of {width} elements do not divide into heads of {dim}")));
    }
    if matches!(x.device(), Device::Cuda(_)) && dim > LARGEST_HEAD {
        return Err(Error::Value(format!("{what}: heads of {dim} elements, {LARGEST_HEAD} are the most on a GPU")));
    }
    Ok(())
}

/// Returns `y = x · rstd · weight · silu(z)`, with `rstd = 1 / sqrt(mean(x²) + eps)` over the `D` elements of each head: the norm comes before the
/// gate. Computed in F32 (F64 for F64), and rounded once.
///
/// `x` and `z` are `[T, H·D]`, and `weight` is `[D]` for all heads. Errors with [`Error::Shape`] or [`Error::Value`] if they do not fit, or if `D` is
/// above 256 on a GPU.
pub fn gated_norm(x: &Tensor, z: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    check("gated_norm", x, z, weight)?;
    let mut y = x.empty_like()?;
    dispatch! { x.device(),
        cpu => cpu::gated_norm(x, z, weight, eps, &mut y),
        gpu => cuda::gated_norm(gpu, [x, z], weight, eps, &mut y)?,
    }
    Ok(y)
}

/// Returns the gradients of [`gated_norm`] by `x` and `z`, from the gradient `dy` and the same inputs. Adds to `dweight` `[D]`, F32 (F64 for F64).
///
/// With `n = x · rstd` and `u = dy · weight · silu(z)`: `dx = rstd · (u − n · mean(u · n))`; `dz = dy · n · weight · silu′(z)`;
/// `dweight += Σ dy · n · silu(z)` over tokens and heads, in partial sums that are added in order, on the CPU of 64 rows. Has the errors of
/// [`gated_norm`].
pub fn gated_norm_backward(
    dy: &Tensor,
    x: &Tensor,
    z: &Tensor,
    weight: &Tensor,
    eps: f64,
    dweight: &mut Tensor,
) -> Result<[Tensor; 2]> {
    check("gated_norm_backward", x, z, weight)?;
    dy.expect("gated_norm_backward: dy", x.shape())?;
    dy.expect_dtype("gated_norm_backward: dy", &[x.dtype()])?;
    dy.expect_device("gated_norm_backward: dy", x.device())?;
    dweight.expect("gated_norm_backward: dweight", weight.shape())?;
    expect_gradient("gated_norm_backward: dweight", dweight, x)?;
    let (mut dx, mut dz) = (x.empty_like()?, x.empty_like()?);
    dispatch! { x.device(),
        cpu => cpu::gated_norm_backward([dy, x, z], weight, eps, [&mut dx, &mut dz], dweight),
        gpu => cuda::gated_norm_backward(gpu, [dy, x, z], weight, eps, [&mut dx, &mut dz], dweight)?,
    }
    Ok([dx, dz])
}
