//! What the routed experts of a mixture read: the tokens, a latent of the tokens, or the tokens behind a norm. The router reads the tokens.

use super::latent::{DownSaved, Latent, UpSaved};
use crate::layers::cast::OperandCast;
use crate::layers::{Linear, Norm, NormSaved, Stream};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::param::{Builder, Param};
use ottava_tensor::Tensor;

/// What the routed experts of a mixture read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertInput {
    /// The tokens.
    #[default]
    Tokens,
    /// A latent of this width.
    Latent(usize),
    /// The tokens behind a norm with this name in the block.
    Normed(&'static str),
}

/// The layers between tokens and routed experts.
pub(super) enum InputLayers {
    None,
    Latent(Box<Latent>),
    Norm(Box<Norm>),
}

/// What the layers before the experts save.
pub(super) enum InputSaved {
    None,
    Latent(DownSaved),
    /// The normalised tokens, `[T, C]`.
    Norm(Tensor, NormSaved),
}

impl ExpertInput {
    /// Returns the width of what experts read, for a residual stream of `channels`.
    pub(super) fn width(self, channels: usize) -> usize {
        match self {
            ExpertInput::Latent(width) => width,
            ExpertInput::Tokens | ExpertInput::Normed(_) => channels,
        }
    }
}

impl InputLayers {
    /// Creates the layers of the mixture called `name` in the block called `block`.
    pub(super) fn new(
        build: &mut Builder,
        [name, block]: [&str; 2],
        input: ExpertInput,
        stream: &Stream,
    ) -> Result<InputLayers> {
        Ok(match input {
            ExpertInput::Tokens => InputLayers::None,
            ExpertInput::Latent(width) => InputLayers::Latent(Box::new(Latent::new(build, name, width, stream)?)),
            ExpertInput::Normed(norm) => {
                InputLayers::Norm(Box::new(Norm::new(build, &format!("{block}.{norm}"), stream.channels, stream.norm)?))
            }
        })
    }

    /// Computes what experts read of the tokens `x` `[T, C]`.
    pub(super) fn forward(&self, x: &Tensor, context: &mut Context) -> Result<InputSaved> {
        Ok(match self {
            InputLayers::None => InputSaved::None,
            InputLayers::Latent(latent) => InputSaved::Latent(latent.down(x, context)?),
            InputLayers::Norm(norm) => {
                let (normed, saved) = norm.forward(x, context)?;
                InputSaved::Norm(normed, saved)
            }
        })
    }

    /// Returns the output of the mixture from the sum of its experts that `combine` computes, plus `residual` if given.
    pub(super) fn output(
        &self,
        residual: Option<&Tensor>,
        context: &mut Context,
        combine: impl FnOnce(Option<&Tensor>, &Context) -> Result<Tensor>,
    ) -> Result<(Tensor, Option<UpSaved>)> {
        match self {
            InputLayers::Latent(latent) => {
                let sum = combine(None, context)?;
                let (y, saved) = latent.up(sum, residual, context)?;
                Ok((y, Some(saved)))
            }
            InputLayers::None | InputLayers::Norm(_) => Ok((combine(residual, context)?, None)),
        }
    }

    /// Returns whether a linear reads the sum of the experts.
    pub(super) fn reads_sum(&self) -> bool {
        matches!(self, InputLayers::Latent(_))
    }

    /// Returns the gradient by the sum of the experts.
    pub(super) fn output_backward(
        &mut self,
        dy: &Tensor,
        saved: Option<UpSaved>,
        context: &mut Context,
    ) -> Result<Tensor> {
        match (self, saved) {
            (InputLayers::Latent(latent), Some(saved)) => latent.up_backward(dy, saved, context),
            _ => Ok(dy.clone()),
        }
    }

    /// Returns the gradient by the tokens `x`: `other` and the gradient through what experts read, which `combine` computes plus its argument.
    pub(super) fn backward(
        &mut self,
        saved: InputSaved,
        x: &Tensor,
        other: &Tensor,
        context: &mut Context,
        combine: impl FnOnce(Option<&Tensor>, &Context) -> Result<Tensor>,
    ) -> Result<Tensor> {
        match (self, saved) {
            (InputLayers::Latent(latent), InputSaved::Latent(saved)) => {
                let dlatent = combine(None, context)?;
                latent.down_backward(dlatent, saved.into_operand(), x, other, context)
            }
            (InputLayers::Norm(norm), InputSaved::Norm(normed, saved)) => {
                drop(normed);
                let dnormed = combine(None, context)?;
                Ok(norm.backward_for(&dnormed, saved, other, &OperandCast::NONE, context)?.value)
            }
            _ => combine(Some(other), context),
        }
    }

    /// Calls `visit` for each parameter, always in the same order.
    pub(super) fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        match self {
            InputLayers::None => {}
            InputLayers::Latent(latent) => latent.linears().into_iter().for_each(|linear| linear.parameters(visit)),
            InputLayers::Norm(norm) => norm.parameters(visit),
        }
    }

    /// Calls `visit` for each parameter mutably, in the order of [`InputLayers::parameters`].
    pub(super) fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        match self {
            InputLayers::None => {}
            InputLayers::Latent(latent) => {
                latent.linears_mut().into_iter().for_each(|linear| linear.parameters_mut(visit));
            }
            InputLayers::Norm(norm) => norm.parameters_mut(visit),
        }
    }

    /// Returns the linears mutably.
    pub(super) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        let latent = if let InputLayers::Latent(latent) = self { Some(latent.linears_mut()) } else { None };
        latent.into_iter().flatten()
    }
}

impl InputSaved {
    /// Returns what experts read of the tokens `x`.
    pub(super) fn read<'a>(&'a self, x: &'a Tensor) -> &'a Tensor {
        match self {
            InputSaved::None => x,
            InputSaved::Latent(saved) => &saved.latent,
            InputSaved::Norm(normed, _) => normed,
        }
    }
}
