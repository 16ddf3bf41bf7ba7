//! RMSNorm of all queries and of all keys of a token, before rotary positions (QK-norm of OLMo 2, arXiv:2501.00656), also where ranks divide
//! the heads.
//!
//! Sums over a row are ops of their own, so that ranks can add theirs before they are read.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::{HeadNormWeights, NormKind, expect_compute, expect_gradient};
use crate::ops::dispatch::dispatch;
use crate::{DType, Error, Result, Tensor};

/// A fused projection `[T, queries + 2 · keys]`: in each row queries, keys, and as many values as keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProjectionNormLayout {
    /// Elements of the queries of a token.
    pub queries: usize,
    /// Elements of its keys.
    pub keys: usize,
    /// [`NormKind::Rms`] or [`NormKind::RmsPlusOne`], with a weight for each element.
    pub kind: NormKind,
    /// Added to the mean square.
    pub eps: f64,
    /// Ranks that divide queries and keys; each rank has as many.
    pub ranks: usize,
}

/// The sums over the rows of a projection, added over ranks: F32 `[T, 2]` (F64 for F64), of queries and of keys.
#[derive(Clone, Copy, Debug)]
pub struct ProjectionSums<'a> {
    /// The sums of [`projection_squares`].
    pub squares: &'a Tensor,
    /// The sums of [`projection_dots`].
    pub dots: &'a Tensor,
}

/// `Σ x²` over this rank's queries, and over its keys, of each token.
///
/// `x` `[T, queries + 2 · keys]`. Errors with [`Error::Shape`] if layout and tensors do not fit, like all ops here.
pub fn projection_squares(x: &Tensor, layout: ProjectionNormLayout) -> Result<Tensor> {
    check_width(x, layout)?;
    let mut squares = empty_sums(x)?;
    dispatch! { x.device(),
        cpu => cpu::projection_squares(x, layout, &mut squares),
        gpu => cuda::projection_squares(gpu, x, layout, &mut squares)?,
    }
    Ok(squares)
}

/// `y = x · rstd · weight` of queries and keys, `rstd = 1 / sqrt(mean(x²) + eps)` with the mean over queries or keys of all ranks; values stay.
/// With [`NormKind::RmsPlusOne`], `1 + weight` replaces the weight. `squares` are the sums of [`projection_squares`], added over ranks.
pub fn projection_norm(
    x: &Tensor,
    weights: HeadNormWeights,
    layout: ProjectionNormLayout,
    squares: &Tensor,
) -> Result<Tensor> {
    check(x, weights, layout)?;
    expect_sums("projection_norm: squares", squares, x)?;
    let mut y = x.empty_like()?;
    dispatch! { x.device(),
        cpu => cpu::projection_norm(x, weights, layout, squares, &mut y),
        gpu => cuda::projection_norm(gpu, x, weights, layout, squares, &mut y)?,
    }
    Ok(y)
}

/// `Σ g · n` over this rank's queries, and over its keys, of each token, with `g = dy · weight` and `n = x · rstd`.
pub fn projection_dots(
    dy: &Tensor,
    x: &Tensor,
    weights: HeadNormWeights,
    layout: ProjectionNormLayout,
    squares: &Tensor,
) -> Result<Tensor> {
    check(x, weights, layout)?;
    expect_like("projection_dots: dy", dy, x)?;
    expect_sums("projection_dots: squares", squares, x)?;
    let mut dots = empty_sums(x)?;
    dispatch! { x.device(),
        cpu => cpu::projection_dots([dy, x], weights, layout, squares, &mut dots),
        gpu => cuda::projection_dots(gpu, [dy, x], weights, layout, squares, &mut dots)?,
    }
    Ok(dots)
}

/// Gradient of [`projection_norm`] by `x`, from `dy` and the same `x`: `dx = rstd · (g - n · mean(g · n))`. Adds `Σ dy · n` over rows to `dq`
/// and `dk`, F32 like the weights (F64 for F64).
pub fn projection_norm_backward(
    dy: &Tensor,
    x: &Tensor,
    weights: HeadNormWeights,
    layout: ProjectionNormLayout,
    sums: ProjectionSums,
    dq: &mut Tensor,
    dk: &mut Tensor,
) -> Result<Tensor> {
    check(x, weights, layout)?;
    expect_like("projection_norm_backward: dy", dy, x)?;
    expect_sums("projection_norm_backward: squares", sums.squares, x)?;
    expect_sums("projection_norm_backward: dots", sums.dots, x)?;
    for (what, gradient, len) in
        [("projection_norm_backward: dq", &*dq, layout.queries), ("projection_norm_backward: dk", &*dk, layout.keys)]
    {
        gradient.expect(what, &[len])?;
        expect_gradient(what, gradient, dy)?;
    }
    let mut dx = x.empty_like()?;
    dispatch! { x.device(),
        cpu => cpu::projection_norm_backward([dy, x], weights, layout, sums, &mut dx, [dq, dk]),
        gpu => cuda::projection_norm_backward(gpu, [dy, x], weights, layout, sums, &mut dx, [dq, dk])?,
    }
    Ok(dx)
}

fn sums_dtype(x: &Tensor) -> DType {
    if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 }
}

fn empty_sums(x: &Tensor) -> Result<Tensor> {
    Tensor::empty(x.device(), &[x.shape()[0], 2], sums_dtype(x))
}

fn expect_sums(what: &str, sums: &Tensor, x: &Tensor) -> Result<()> {
    sums.expect(what, &[x.shape()[0], 2])?;
    sums.expect_dtype(what, &[sums_dtype(x)])?;
    sums.expect_device(what, x.device())
}

fn expect_like(what: &str, dy: &Tensor, x: &Tensor) -> Result<()> {
    dy.expect(what, x.shape())?;
    dy.expect_dtype(what, &[x.dtype()])?;
    dy.expect_device(what, x.device())
}

fn check_width(x: &Tensor, layout: ProjectionNormLayout) -> Result<()> {
    let [tokens, _] = x.dims("projection_norm: x")?;
    expect_compute("projection_norm: x", x)?;
    x.expect("projection_norm: x", &[tokens, layout.queries + 2 * layout.keys])
}

fn check(x: &Tensor, weights: HeadNormWeights, layout: ProjectionNormLayout) -> Result<()> {
    check_width(x, layout)?;
    for (what, weight, len) in [
        ("projection_norm: weight of queries", weights.q, layout.queries),
        ("projection_norm: weight of keys", weights.k, layout.keys),
    ] {
        weight.expect(what, &[len])?;
        weight.expect_dtype(what, &[x.dtype()])?;
        weight.expect_device(what, x.device())?;
    }
    if layout.kind == NormKind::Layer {
        return Err(Error::Value("projection_norm: a LayerNorm of all heads together is not implemented".into()));
    }
    Ok(())
}
