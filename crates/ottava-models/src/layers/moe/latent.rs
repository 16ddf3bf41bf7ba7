//! Experts of a latent: a linear projects tokens to a narrower latent, which the experts read, and another linear projects their sum back. The router
//! reads the tokens. NVIDIA 2025, arXiv:2512.20848.

use crate::layers::cast::SavedOperand;
use crate::layers::{Linear, LinearConfig, Stream};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::param::{Builder, FolderLayout, Split};
use ottava_tensor::Tensor;
use ottava_tensor::ops::add;

/// `y = up(experts(down(x)))`.
pub struct Latent {
    down: Linear, /* [L, C] */
    up: Linear,   /* [C, L] */
}

/// The values that [`Latent::down`] saves.
pub struct DownSaved {
    operand: SavedOperand,
    /// The latent, which the experts read, `[T, L]`.
    pub latent: Tensor,
}

/// The values that [`Latent::up`] saves.
pub struct UpSaved {
    operand: SavedOperand,
    /// The sum of the experts, `[T, L]`.
    sum: Tensor,
}

impl Latent {
    /// Creates the linears of the mixture called `name`. Each rank has all rows and columns, for its own tokens.
    pub fn new(build: &mut Builder, name: &str, width: usize, stream: &Stream) -> Result<Latent> {
        let mut linear = |suffix: &str, outputs, inputs| {
            let name = &format!("{name}.{suffix}");
            let config = LinearConfig {
                name,
                parts: &[(name.clone(), outputs)],
                fused: &[],
                replicas: &[],
                inputs,
                bias: false,
                std: stream.std,
                layout: FolderLayout::Same,
                split: Split::None,
                shared_input: None,
                uncast: None,
            };
            Linear::new(build, config)
        };
        let down = linear("fc1_latent_proj", width, stream.channels)?;
        Ok(Latent { down, up: linear("fc2_latent_proj", stream.channels, width)? })
    }

    /// Returns the latent of the tokens `x` `[T, C]`.
    pub fn down(&self, x: &Tensor, context: &mut Context) -> Result<DownSaved> {
        let (latent, operand) = self.down.forward(x.clone(), None, context)?;
        Ok(DownSaved { operand, latent })
    }

    /// Returns the output `[T, C]` of the `sum` of the experts, plus `residual` if given.
    pub fn up(&self, sum: Tensor, residual: Option<&Tensor>, context: &mut Context) -> Result<(Tensor, UpSaved)> {
        let (y, operand) = self.up.forward(sum.clone(), residual, context)?;
        Ok((y, UpSaved { operand, sum }))
    }

    /// Returns the gradient by the sum of the experts.
    pub fn up_backward(&mut self, dy: &Tensor, saved: UpSaved, context: &mut Context) -> Result<Tensor> {
        let UpSaved { operand, sum } = saved;
        self.up.backward_recomputing(dy.clone().into(), operand, |_| Ok(sum), context)
    }

    /// Returns the gradient by the tokens `x` from the gradient by their latent, plus `other`.
    pub fn down_backward(
        &mut self,
        dlatent: Tensor,
        saved: SavedOperand,
        x: &Tensor,
        other: &Tensor,
        context: &mut Context,
    ) -> Result<Tensor> {
        let dx = self.down.backward_recomputing(dlatent.into(), saved, |_| Ok(x.clone()), context)?;
        Ok(add(other, &dx)?)
    }

    /// Returns the linears.
    pub fn linears(&self) -> [&Linear; 2] {
        [&self.down, &self.up]
    }

    /// Returns the linears mutably.
    pub fn linears_mut(&mut self) -> [&mut Linear; 2] {
        [&mut self.down, &mut self.up]
    }
}

impl DownSaved {
    /// Returns the saved operand.
    pub fn into_operand(self) -> SavedOperand {
        self.operand
    }
}
