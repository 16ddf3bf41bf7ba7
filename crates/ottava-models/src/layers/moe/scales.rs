//! The learned scales of a router: of its normalised input, and of the weight of each expert's choices.

use crate::layers::{Norm, NormConfig, NormSaved};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::param::{Builder, FolderTensor, Init, Param, Split};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{cast, embedding, embedding_gradient, scale_columns};

/// The names in a mixture of the learned scales of a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterScales {
    /// The scale of the normalised tokens, `[C]`. A router with scales divides its logits by `√C`.
    pub input: &'static str,
    /// The scale of the weights of the choices of each expert, `[E]`.
    pub experts: &'static str,
}

/// The scales of a router over `E` experts. The router reads `norm(x)`, its logits are divided by `√C`, and the weight of a choice of expert `e` is
/// multiplied by `of_experts[e]`.
pub(super) struct Scales {
    /// The norm of tokens, whose weight `[C]` is the scale of the input.
    norm: Norm,
    of_experts: Param, /* [E] */
    /// `1 / √C` for each expert, F32 `[E]`.
    logit_factors: Tensor,
}

/// The values of a pass.
pub(super) struct Scaled {
    /// The normalised tokens, `[T, C]`.
    pub(super) normed: Tensor,
    norm: NormSaved,
    /// The scale of each choice, and the weights of choices, `[T, K]`.
    factors: Tensor,
    /// The weights of choices times the scales of the experts, `[T, K]`.
    pub(super) weights: Tensor,
}

/// Multiplies `a` and `b` `[T, K]`, which have the type of sums, element by element.
fn product(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (row, scales) = (a.reshape(&[1, a.len()])?, b.reshape(&[b.len()])?);
    Ok(scale_columns(&row, &scales)?.reshape(a.shape())?)
}

impl Scales {
    /// Creates the scales of a router of the mixture `name`, for `experts` experts and tokens of `channels`.
    pub(super) fn new(
        build: &mut Builder,
        (name, names, norm): (&str, RouterScales, NormConfig),
        [experts, channels]: [usize; 2],
    ) -> Result<Scales> {
        let norm = Norm::of_weight(build, format!("{name}.{}", names.input), channels, norm)?;
        let shard = build.shard(FolderTensor::new(format!("{name}.{}", names.experts), vec![experts]), Split::None)?;
        let of_experts = Param::new(build, vec![shard], Init::Ones)?;
        let factor = (channels as f64).powf(-0.5) as f32;
        let logit_factors = Tensor::from_slice(build.device, &[experts], &vec![factor; experts])?;
        Ok(Scales { norm, of_experts, logit_factors })
    }

    /// Returns the tokens that the router reads.
    pub(super) fn read(&self, x: &Tensor, context: &Context) -> Result<(Tensor, NormSaved)> {
        self.norm.forward(x, context)
    }

    /// Returns logits, or gradients by logits, times the factor of logits.
    pub(super) fn scale_logits(&self, logits: &Tensor) -> Result<Tensor> {
        Ok(scale_columns(logits, &self.logit_factors)?)
    }

    /// Returns the scaled weights of the choices `ids` `[T, K]`, and the values for backward.
    pub(super) fn scale_weights(
        &self,
        (normed, norm): (Tensor, NormSaved),
        weights: &Tensor,
        ids: &Tensor,
    ) -> Result<Scaled> {
        let scales = cast(&self.of_experts.weights.value()?, weights.dtype())?;
        let factors = embedding(&scales.reshape(&[scales.len(), 1])?, &ids.reshape(&[ids.len()])?)?;
        let factors = factors.reshape(weights.shape())?;
        let weights = product(weights, &factors)?;
        Ok(Scaled { normed, norm, factors, weights })
    }

    /// Returns the gradient by the weights of choices from the gradient by the scaled weights. Adds to the gradient of the scales. `weights` are the
    /// unscaled weights of the choices `ids`.
    pub(super) fn weights_backward(
        &mut self,
        dscaled: &Tensor,
        scaled: &Scaled,
        weights: &Tensor,
        ids: &Tensor,
    ) -> Result<Tensor> {
        let experts = self.of_experts.weights.shape()[0];
        if self.of_experts.is_trained() {
            let of_choices = product(dscaled, weights)?.reshape(&[ids.len(), 1])?;
            let mut sum = Tensor::zeros(dscaled.device(), &[experts, 1], dscaled.dtype())?;
            embedding_gradient(&of_choices, &ids.reshape(&[ids.len()])?, &mut sum)?;
            let gradient = self.of_experts.gradient.sum_mut()?;
            let total = ottava_tensor::ops::add(gradient, &sum.reshape(&[experts])?)?;
            gradient.copy_from(0, &total)?;
        }
        product(dscaled, &scaled.factors)
    }

    /// Returns the gradient by the tokens from the gradient by the normalised tokens, plus `other` if given.
    pub(super) fn read_backward(
        &mut self,
        dnormed: &Tensor,
        scaled: Scaled,
        other: Option<&Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        match other {
            Some(other) => {
                let none = crate::layers::OperandCast::NONE;
                Ok(self.norm.backward_for(dnormed, scaled.norm, other, &none, context)?.value)
            }
            None => self.norm.backward(dnormed, scaled.norm),
        }
    }

    /// Calls `visit` for each parameter, always in the same order.
    pub(super) fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        self.norm.parameters(visit);
        visit(&self.of_experts);
    }

    /// Calls `visit` for each parameter mutably, in the order of [`Scales::parameters`].
    pub(super) fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.norm.parameters_mut(visit);
        visit(&mut self.of_experts);
    }
}
