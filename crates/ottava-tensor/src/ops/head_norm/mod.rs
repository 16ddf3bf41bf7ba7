//! Root-mean-square normalisation of each query and key head, before rotary positions (QK-norm). Henry et al. 2020, arXiv:2010.04245;
//! with RMSNorm as in Qwen3, arXiv:2505.09388.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use super::{expect_compute, expect_gradient};
use crate::{Device, Error, Result, Tensor};

pub(crate) use cuda::SOURCE;

/// The heads of a fused projection `[T, (H + 2·H_kv)·D]`: in each row `H` query heads, `H_kv` key heads, `H_kv` value heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadNormLayout {
    /// Query heads `H`.
    pub heads: usize,
    /// Key and value heads `H_kv`.
    pub kv_heads: usize,
    /// Size `D` of a head; at most 256 on a GPU.
    pub head_dim: usize,
}

impl HeadNormLayout {
    /// All heads of a row.
    fn all(&self) -> usize {
        self.heads + 2 * self.kv_heads
    }
}

/// The weights of queries and of keys, each `[D]`.
#[derive(Clone, Copy, Debug)]
pub struct HeadNormWeights<'a> {
    /// Of query heads.
    pub q: &'a Tensor,
    /// Of key heads.
    pub k: &'a Tensor,
}

/// `y = x · rstd · weight` for each query and key head, `rstd = 1 / sqrt(mean(x²) + eps)` over its `D` elements; value heads stay.
///
/// `x` `[T, (H + 2·H_kv)·D]`. Errors with [`Error::Shape`] where layout and tensors do not fit.
pub fn head_norm(x: &Tensor, weights: HeadNormWeights, layout: HeadNormLayout, eps: f64) -> Result<Tensor> {
    check(x, weights, layout)?;
    let mut y = x.empty_like()?;
    match x.device() {
        Device::Cpu => cpu::head_norm(x, weights, layout, eps, &mut y),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::head_norm(gpu, x, weights, layout, eps, &mut y)?,
    }
    Ok(y)
}

/// Gradient of [`head_norm`] by `x`, from `dy` and the same `x`: with `g = dy · weight` and `n = x · rstd`,
/// `dx = rstd · (g - n · mean(g · n))`. Adds `Σ dy · n` over rows and heads to `dq` and `dk`, F32 `[D]` each (F64 for F64).
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
    for (what, gradient) in [("head_norm_backward: dq", &*dq), ("head_norm_backward: dk", &*dk)] {
        gradient.expect(what, &[layout.head_dim])?;
        expect_gradient(what, gradient, dy)?;
    }
    let mut dx = x.empty_like()?;
    match x.device() {
        Device::Cpu => cpu::head_norm_backward(dy, x, weights, layout, eps, &mut dx, [dq, dk]),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::head_norm_backward(gpu, [dy, x], weights, layout, eps, &mut dx, [dq, dk])?,
    }
    Ok(dx)
}

fn check(x: &Tensor, weights: HeadNormWeights, layout: HeadNormLayout) -> Result<()> {
    let [tokens, _] = x.dims("head_norm: x")?;
    expect_compute("head_norm: x", x)?;
    x.expect("head_norm: x", &[tokens, layout.all() * layout.head_dim])?;
    for (what, weight) in [("head_norm: weight of queries", weights.q), ("head_norm: weight of keys", weights.k)] {
        weight.expect(what, &[layout.head_dim])?;
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
