//! RMSNorm or LayerNorm, fused with the cast of its output for the linears that read the output.

use super::cast::{CastInput, OperandCast, SavedOperand};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::operand::{ResidualGradient, View, Views};
use ottava_recipe::param::{Builder, FolderTensor, Init, Param, Split};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{
    NormBackward, NormKind, NormWeights, Output, Produced, SavedActivation, norm_backward, norm_to,
};

/// The norm that a model has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormConfig {
    /// The kind of norm.
    pub kind: NormKind,
    /// Whether the norm has a bias. Only LayerNorm can have one.
    pub bias: bool,
    /// The constant that is added to the mean square or the variance.
    pub eps: f64,
}

impl NormConfig {
    /// Returns the settings of RMSNorm.
    pub fn rms(eps: f64) -> NormConfig {
        NormConfig { kind: NormKind::Rms, bias: false, eps }
    }
}

/// Returns the initial weight of a norm.
pub(super) fn initial_weight(kind: NormKind) -> Init {
    match kind {
        NormKind::Rms | NormKind::Layer => Init::Ones,
        NormKind::RmsPlusOne => Init::Zeros,
    }
}

/// `y = x / sqrt(mean(x²) + eps) · weight`, or `y = (x - mean(x)) / sqrt(variance(x) + eps) · weight + bias`.
pub struct Norm {
    /// The weight, `[C]`.
    weight: Param,
    bias: Option<Param>, /* [C] */
    config: NormConfig,
}

/// The values that forward of [`Norm`] saves.
pub struct NormSaved {
    x: SavedActivation, /* [T, C] */
    statistics: Tensor, /* of `NormKind` */
}

/// The values of a norm's parameters, and the settings of the norm.
struct Values {
    weight: Tensor,
    bias: Option<Tensor>,
    config: NormConfig,
}

impl Values {
    fn weights(&self) -> NormWeights<'_> {
        NormWeights { kind: self.config.kind, weight: &self.weight, bias: self.bias.as_ref() }
    }

    fn normalise(&self, x: &Tensor, output: Output) -> ottava_tensor::Result<(Produced, Tensor)> {
        norm_to(x, self.weights(), self.config.eps, output)
    }
}

impl Norm {
    /// Creates a norm over `channels`. Its tensors are called `name` + `.weight` and `name` + `.bias`.
    pub fn new(build: &mut Builder, name: &str, channels: usize, config: NormConfig) -> Result<Norm> {
        let norm = Norm::of_weight(build, format!("{name}.weight"), channels, config)?;
        let mut bias = || {
            let shard = build.shard(FolderTensor::new(format!("{name}.bias"), vec![channels]), Split::None)?;
            Param::new(build, vec![shard], Init::Zeros)
        };
        Ok(Norm { bias: config.bias.then(&mut bias).transpose()?, ..norm })
    }

    /// Creates a norm over `channels` without a bias, whose weight is the tensor `name`.
    pub fn of_weight(build: &mut Builder, name: String, channels: usize, config: NormConfig) -> Result<Norm> {
        let shard = build.shard(FolderTensor::new(name, vec![channels]), Split::None)?;
        let weight = Param::new(build, vec![shard], initial_weight(config.kind))?;
        Ok(Norm { weight, bias: None, config: NormConfig { bias: false, ..config } })
    }

    fn values(&self) -> Result<Values> {
        let bias = self.bias.as_ref().map(|bias| bias.weights.value()).transpose()?;
        Ok(Values { weight: self.weight.weights.value()?, bias, config: self.config })
    }

    /// Normalises `x`.
    pub fn forward(&self, x: &Tensor, context: &Context) -> Result<(Tensor, NormSaved)> {
        let (y, statistics) = self.values()?.normalise(x, Output::Plain)?;
        let y = y.plain().expect("a plain output gives a value");
        Ok((y, NormSaved { x: context.save(x.clone())?, statistics }))
    }

    /// Normalises `x` for linears that read it through the cast `reader`.
    pub fn forward_for(
        &self,
        x: &Tensor,
        reader: &OperandCast,
        context: &mut Context,
    ) -> Result<(CastInput, NormSaved)> {
        let (values, copies) = (self.values()?, context.operand_copies());
        let op = |output: Output| values.normalise(x, output);
        let (y, statistics) = reader.produce_input(copies, context, op)?;
        Ok((y, NormSaved { x: context.save(x.clone())?, statistics }))
    }

    /// Returns the view of the operand of [`Norm::forward_for`] that wgrad reads. The operand was saved or is recomputed.
    pub fn operand_columns(
        &self,
        saved: &NormSaved,
        operand: SavedOperand,
        reader: &OperandCast,
        context: &mut Context,
    ) -> Result<View> {
        operand
            .into_columns()
            .or_else(|frozen| reader.reproduce_columns(&frozen, context, |output| self.recompute(saved, output)))
    }

    /// Recomputes the operand of [`Norm::forward_for`], and returns the views that fprop and wgrad read.
    pub fn operand_views(
        &self,
        saved: &NormSaved,
        operand: SavedOperand,
        reader: &OperandCast,
        context: &mut Context,
    ) -> Result<Views> {
        let frozen = operand.into_frozen();
        reader.reproduce_both(&frozen, context, |output| self.recompute(saved, output))
    }

    fn recompute(&self, saved: &NormSaved, output: Output) -> Result<Produced> {
        Ok(self.values()?.normalise(&saved.x.value()?, output)?.0)
    }

    /// Returns the gradient by `x`.
    pub fn backward(&mut self, dy: &Tensor, saved: NormSaved) -> Result<Tensor> {
        self.backward_plus(dy, saved, NormBackward::default())
    }

    /// Returns the gradient by `x`, plus `dresidual`, the gradient of the residual connection. If the cast `reader`, which reads the result, needs an
    /// amax, the amax is computed too.
    pub fn backward_for(
        &mut self,
        dy: &Tensor,
        saved: NormSaved,
        dresidual: &Tensor,
        reader: &OperandCast,
        context: &mut Context,
    ) -> Result<ResidualGradient> {
        let mut amax = reader.amax_for(&mut context.casts)?;
        let plus = NormBackward { dresidual: Some(dresidual), amax: amax.as_mut(), dbias: None };
        let value = self.backward_plus(dy, saved, plus)?;
        Ok(ResidualGradient { value, amax })
    }

    fn backward_plus(&mut self, dy: &Tensor, saved: NormSaved, plus: NormBackward) -> Result<Tensor> {
        let values = self.values()?;
        let (mut unread, mut unread_bias) = (None, None);
        let dbias = self.bias.as_mut().map(|bias| bias.grad_or_unread(&mut unread_bias)).transpose()?;
        let (grad, NormSaved { x, statistics }) = (self.weight.grad_or_unread(&mut unread)?, &saved);
        Ok(norm_backward(dy, x, values.weights(), statistics, grad, NormBackward { dbias, ..plus })?)
    }

    /// Calls `visit` for each parameter, always in the same order.
    pub fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        visit(&self.weight);
        self.bias.iter().for_each(visit);
    }

    /// Calls `visit` for each parameter mutably, in the order of [`Norm::parameters`].
    pub fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        visit(&mut self.weight);
        self.bias.iter_mut().for_each(visit);
    }
}
