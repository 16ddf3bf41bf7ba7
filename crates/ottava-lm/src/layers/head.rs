//! Output head and loss in one: logits exist for a chunk of tokens at a time, and their gradient replaces them in place.

use super::Norm;
use crate::error::Result;
use crate::param::{Builder, Init, Param, Part};
use crate::recipe::LinearSite;
use ottava_tensor::ops::{Accumulation, Operand, cross_entropy, cross_entropy_gradient, gemm_nt};
use ottava_tensor::{Tensor, ops::real_type};

/// The last norm, and the product that makes logits of its output. The head stays in high precision in every recipe.
pub struct Head {
    /// Before the product.
    pub norm: Norm,
    /// `[V, C]`, unless it is the embedding's table.
    pub weight: Option<Param>,
}

/// Tokens whose logits are alive at once.
const CHUNK: usize = 2048;

impl Head {
    /// A head for `vocabulary` tokens behind a norm; where it is `tied`, its weight is the table of the embedding called so.
    pub fn new(
        build: &mut Builder,
        norm: Norm,
        vocabulary: usize,
        channels: usize,
        std: f32,
        tied: Option<&str>,
    ) -> Result<Head> {
        const NAME: &str = "lm_head";
        let part = Part { name: format!("{NAME}.weight"), shape: vec![vocabulary, channels] };
        let weight = match tied {
            Some(_) => None,
            None => Some(Param::new(build, vec![part], Init::Normal(std))?),
        };
        let name = tied.map_or(NAME.to_string(), |table| format!("{table} (as head)"));
        build.description.fixed.push(NAME.to_string());
        build.description.head = Some(LinearSite {
            name,
            parts: Vec::new(),
            outputs: vocabulary,
            inputs: channels,
            block: None,
            after_swiglu: false,
        });
        Ok(Head { norm, weight })
    }

    /// Its parameters.
    pub fn parameters_mut(&mut self) -> Vec<&mut Param> {
        let Head { norm, weight } = self;
        [&mut norm.weight].into_iter().chain(weight).collect()
    }

    /// `x · Wᵀ`, `[T, V]`.
    pub fn logits(x: &Tensor, weight: &Param) -> Result<Tensor> {
        let weight = weight.value()?;
        let (a, b) = (Operand::plain(x), Operand::plain(&weight));
        Ok(gemm_nt(a, b, x.dtype(), Accumulation::Exact)?)
    }

    /// Losses of I32 `targets` `[T]`, `[T]`.
    pub fn losses(x: &Tensor, weight: &Param, targets: &Tensor) -> Result<Tensor> {
        let mut losses = Tensor::empty(x.device(), targets.shape(), real_type(x.dtype()))?;
        for (start, end) in chunks(targets.len()) {
            let logits = Head::logits(&x.rows(start, end)?, weight)?;
            losses.copy_from(start, &cross_entropy(&logits, &targets.rows(start, end)?)?)?;
        }
        Ok(losses)
    }

    /// Losses, and the gradient by `x` of `scale · Σ losses`, with `scale` F32 `[1]` on the device; adds to the gradient of the weight.
    pub fn losses_and_gradient(
        x: &Tensor,
        weight: &mut Param,
        targets: &Tensor,
        scale: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let mut losses = Tensor::empty(x.device(), targets.shape(), real_type(x.dtype()))?;
        let mut dx = x.empty_like()?;
        for (start, end) in chunks(targets.len()) {
            let x = x.rows(start, end)?;
            let mut logits = Head::logits(&x, weight)?;
            losses.copy_from(start, &cross_entropy_gradient(&mut logits, &targets.rows(start, end)?, scale)?)?;
            let (a, b) = (Operand::plain_transposed(&logits), Operand::plain_transposed(&x));
            weight.add_product_to_grad(a, b, Accumulation::Exact)?;
            let weight = weight.value()?;
            let (a, b) = (Operand::plain(&logits), Operand::plain_transposed(&weight));
            dx.copy_from(start, &gemm_nt(a, b, x.dtype(), Accumulation::Exact)?)?;
        }
        Ok((losses, dx))
    }
}

fn chunks(tokens: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..tokens).step_by(CHUNK).map(move |start| (start, (start + CHUNK).min(tokens)))
}
