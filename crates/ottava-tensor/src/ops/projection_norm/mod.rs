//! RMSNorm over all queries and over all keys of a token, before rotary positions (QK-norm of OLMo 2, arXiv:2501.00656). Ranks may divide the heads.
//!
//! Sums over a row are separate ops, so that ranks can add their sums before the sums are read.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::{HeadNormWeights, NormKind, expect_compute, expect_gradient};
use crate::ops::dispatch::dispatch;
use crate::{DType, Error, Result, Tensor};

/// A fused projection `[T, queries + 2 · keys]`. Each row has queries, then keys, then as many values as keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProjectionNormLayout {
    /// The number of query elements of a token.
    pub queries: usize,
    /// The number of key elements of a token.
    pub keys: usize,
    /// [`NormKind::Rms`] or [`NormKind::RmsPlusOne`]. The weight has a value for each element.
    pub kind: NormKind,
    /// The term added to the mean square.
    pub eps: f64,
    /// The number of ranks that divide queries and keys into equal parts.
    pub ranks: usize,
}

/// Sums over the rows of a projection, added over ranks: F32 `[T, 2]` (F64 for F64), for queries and for keys.
#[derive(Clone, Copy, Debug)]
pub struct ProjectionSums<'a> {
    /// The sums of [`projection_squares`].
    pub squares: &'a Tensor,
    /// The sums of [`projection_dots`].
    pub dots: &'a Tensor,
}

/// Returns for each token `Σ x²` over this rank's queries, and over this rank's keys.
///
/// `x` is `[T, queries + 2 · keys]`. Like all ops of this file, errors with [`Error::Shape`] if layout and tensors do not fit.
pub fn projection_squares(x: &Tensor, layout: ProjectionNormLayout) -> Result<Tensor> {
    check_width(x, layout)?;
    let mut squares = empty_sums(x)?;
    dispatch! { x.device(),
        cpu => cpu::projection_squares(x, layout, &mut squares),
        gpu => cuda::projection_squares(gpu, x, layout, &mut squares)?,
    }
    Ok(squares)
}

/// Computes `y = x · rstd · weight` for queries and keys, with `rstd = 1 / sqrt(mean(x²) + eps)`. The mean is over the queries or over the keys of
/// all ranks. Values are copied. With [`NormKind::RmsPlusOne`], `1 + weight` replaces the weight. `squares` are the sums of [`projection_squares`],
/// added over ranks.
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

/// Returns for each token `Σ g · n` over this rank's queries, and over this rank's keys, with `g = dy · weight` and `n = x · rstd`.
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

/// Computes the gradient of [`projection_norm`] by `x`, from `dy` and the same `x`: `dx = rstd · (g - n · mean(g · n))`. Adds `Σ dy · n` over rows to
/// `dq` and `dk`, which have the shapes of the weights and are F32 (F64 for F64).
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
