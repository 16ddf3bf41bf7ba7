//! Normalisation of each query and key head before rotary positions (QK-norm; Henry et al. 2020, arXiv:2010.04245): with RMSNorm as in Qwen3,
//! arXiv:2505.09388, or with LayerNorm as in Command-R+. `projection_norm` normalises all heads of a token together.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::{NormKind, expect_compute, expect_gradient};
use crate::ops::dispatch::dispatch;
use crate::{Device, Error, Result, Tensor};

/// The heads of a fused projection `[T, (H + 2·H_kv)·D]`. Each row has `H` query heads, then `H_kv` key heads, then `H_kv` value heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadNormLayout {
    /// The number `H` of query heads.
    pub heads: usize,
    /// The number `H_kv` of key heads and of value heads.
    pub kv_heads: usize,
    /// The size `D` of a head; at most 256 on a GPU.
    pub head_dim: usize,
    /// RMSNorm with one weight for all heads, or LayerNorm with a weight for each head.
    pub kind: NormKind,
}

impl HeadNormLayout {
    /// Returns the number of elements of the query weight and of the key weight: `D`, or `H · D` and `H_kv · D`.
    pub fn weights(&self) -> [usize; 2] {
        match self.kind {
            NormKind::Rms | NormKind::RmsPlusOne => [self.head_dim; 2],
            NormKind::Layer => self.projections(),
        }
    }

    /// Returns the number of query elements and the number of key elements of a token.
    fn projections(&self) -> [usize; 2] {
        [self.heads, self.kv_heads].map(|heads| heads * self.head_dim)
    }

    /// Returns the number of all heads of a row.
    fn all(&self) -> usize {
        self.heads + 2 * self.kv_heads
    }
}

/// The weights of queries and of keys. They have [`HeadNormLayout::weights`] elements.
#[derive(Clone, Copy, Debug)]
pub struct HeadNormWeights<'a> {
    /// The weight of query heads.
    pub q: &'a Tensor,
    /// The weight of key heads.
    pub k: &'a Tensor,
}

/// Computes `y = x · rstd · weight` for each query and key head, with `rstd = 1 / sqrt(mean(x²) + eps)` over its `D` elements. Value heads are
/// copied. With LayerNorm, `y = (x - mean) · rstd · weight`, and `rstd` is computed from the variance. With [`NormKind::RmsPlusOne`], `1 + weight`
/// replaces the weight.
///
/// `x` is `[T, (H + 2·H_kv)·D]`. Errors with [`Error::Shape`] if layout and tensors do not fit.
pub fn head_norm(x: &Tensor, weights: HeadNormWeights, layout: HeadNormLayout, eps: f64) -> Result<Tensor> {
    check(x, weights, layout)?;
    let mut y = x.empty_like()?;
    dispatch! { x.device(),
        cpu => cpu::head_norm(x, weights, layout, eps, &mut y),
        gpu => cuda::head_norm(gpu, x, weights, layout, eps, &mut y)?,
    }
    Ok(y)
}

/// Computes the gradient of [`head_norm`] by `x`, from `dy` and the same `x`: with `g = dy · weight` and `n = x · rstd`, `dx = rstd · (g - n · mean(g
/// · n))`. Adds `Σ dy · n`, over rows and heads or (with LayerNorm) over rows, to `dq` and `dk`, which have the shapes of the weights and are F32
/// (F64 for F64). With LayerNorm, `n = (x - mean) · rstd` and `dx = rstd · (g - n · mean(g · n) - mean(g))`.
pub fn head_norm_backward(
    dy: &Tensor,
    x: &Tensor,
    weights: HeadNormWeights,
    layout: HeadNormLayout,
    eps: f64,
    dq: &mut Tensor,
    dk: &mut Tensor,
) -> Result<Tensor> {
    check(x, weights, layout)?;
    dy.expect("head_norm_backward: dy", x.shape())?;
    dy.expect_dtype("head_norm_backward: dy", &[x.dtype()])?;
    dy.expect_device("head_norm_backward: dy", x.device())?;
    let [of_q, of_k] = layout.weights();
    for (what, gradient, len) in [("head_norm_backward: dq", &*dq, of_q), ("head_norm_backward: dk", &*dk, of_k)] {
        gradient.expect(what, &[len])?;
        expect_gradient(what, gradient, dy)?;
    }
    let mut dx = x.empty_like()?;
    dispatch! { x.device(),
        cpu => cpu::head_norm_backward(dy, x, weights, layout, eps, &mut dx, [dq, dk]),
        gpu => cuda::head_norm_backward(gpu, [dy, x], weights, layout, eps, &mut dx, [dq, dk])?,
    }
    Ok(dx)
}

fn check(x: &Tensor, weights: HeadNormWeights, layout: HeadNormLayout) -> Result<()> {
    let [tokens, _] = x.dims("head_norm: x")?;
    expect_compute("head_norm: x", x)?;
    x.expect("head_norm: x", &[tokens, layout.all() * layout.head_dim])?;
    let [of_q, of_k] = layout.weights();
    for (what, weight, len) in
        [("head_norm: weight of queries", weights.q, of_q), ("head_norm: weight of keys", weights.k, of_k)]
    {
        weight.expect(what, &[len])?;
        weight.expect_dtype(what, &[x.dtype()])?;
        weight.expect_device(what, x.device())?;
    }
    if matches!(x.device(), Device::Cuda(_)) && layout.head_dim > cuda::LARGEST_HEAD {
        return Err(Error::Value(format!(
            "head_norm: heads of {} elements, {} are the most on a GPU",
            layout.head_dim,
            cuda::LARGEST_HEAD
        )));
    }
    Ok(())
}
