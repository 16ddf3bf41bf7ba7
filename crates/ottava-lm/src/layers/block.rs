//! The transformer block: attention and MLP, each behind a norm and beside a residual connection.

use super::{Attention, AttentionSaved, KvCache, LinearSaved, Mlp, MlpSaved, Norm, NormSaved};
use crate::error::Result;
use crate::layer::{Context, GemmInput, Layer};
use crate::param::Param;
use crate::recompute::Recompute;
use crate::scaling::{ScalingState, Slot};
use ottava_tensor::Tensor;
use ottava_tensor::ops::Copies;

/// `h = x + attention(norm(x))`;  `y = h + mlp(norm(h))`.
pub struct Block {
    /// Before attention.
    pub attention_norm: Norm,
    /// The tokens' exchange.
    pub attention: Attention,
    /// Before the MLP.
    pub mlp_norm: Norm,
    /// Each token's own computation.
    pub mlp: Mlp,
}

/// Saved by [`Block`].
pub enum BlockSaved {
    /// What the parts saved.
    Parts(Box<Parts>),
    /// The input alone: the block is run again.
    Input(Tensor),
}

/// What the parts of a block saved.
pub struct Parts {
    attention_norm: NormSaved,
    attention: AttentionSaved,
    mlp_norm: NormSaved,
    mlp: MlpSaved,
}

impl Block {
    /// Forward for new tokens of one sequence; see [`Attention::forward_cached`].
    pub fn forward_cached(
        &self,
        x: &Tensor,
        cache: &mut KvCache,
        start: usize,
        context: &mut Context,
    ) -> Result<Tensor> {
        let (normed, _) = self.attention_norm.forward(x, self.attention.input_slot(context.scaling), context)?;
        let h = self.attention.forward_cached(normed, x, cache, start, context)?;
        let (normed, _) = self.mlp_norm.forward(&h, self.mlp.input_slot(context.scaling), context)?;
        Ok(self.mlp.forward_plus(normed, Some(&h), context)?.0)
    }

    /// All of forward but what `mlp` does with its input `[T, C]` and with `h` `[T, C]` beside it.
    fn forward_parts<T>(
        &self,
        x: &Tensor,
        context: &mut Context,
        mlp: impl FnOnce(GemmInput, &Tensor, &mut Context) -> Result<(T, MlpSaved)>,
    ) -> Result<(T, Parts)> {
        let (normed, attention_norm) =
            self.attention_norm.forward(x, self.attention.input_slot(context.scaling), context)?;
        let (h, attention) = self.attention.forward_plus(normed, Some(x), context)?;
        let (normed, mlp_norm) = self.mlp_norm.forward(&h, self.mlp.input_slot(context.scaling), context)?;
        let (y, mlp) = mlp(normed, &h, context)?;
        Ok((y, Parts { attention_norm, attention, mlp_norm, mlp }))
    }

    /// The slot of the cast that the gradient of its output goes to first.
    pub fn gradient_slot(&self, scaling: &ScalingState) -> Option<Slot> {
        self.mlp.gradient_slot(scaling)
    }

    /// [`Layer::backward`], with the result measured for the cast in `next`, which reads it.
    pub fn backward_for(
        &mut self,
        dy: GemmInput,
        saved: BlockSaved,
        next: Option<Slot>,
        context: &mut Context,
    ) -> Result<GemmInput> {
        match saved {
            BlockSaved::Parts(parts) => self.backward_parts(dy, *parts, next, context),
            BlockSaved::Input(x) => {
                let whole = std::mem::replace(&mut context.recompute, Recompute::None);
                // What was measured the first time is not measured again.
                context.scaling.observe(false);
                let again =
                    self.forward_parts(&x, context, |normed, _, context| Ok(((), self.mlp.save(normed, context)?)));
                context.scaling.observe(true);
                let dx = self.backward_parts(dy, again?.1, next, context);
                context.recompute = whole;
                dx
            }
        }
    }

    fn backward_parts(
        &mut self,
        dy: GemmInput,
        saved: Parts,
        next: Option<Slot>,
        context: &mut Context,
    ) -> Result<GemmInput> {
        let Parts { attention_norm, mut attention, mlp_norm, mut mlp } = saved;
        let slot = self.mlp.input_slot(context.scaling);
        mlp.input = LinearSaved::Kept(mlp.input.operand(|frozen| {
            let normed = self.mlp_norm.again(&mlp_norm, slot, &frozen, Copies::Columns, context)?;
            self.mlp.cast_input_again(normed, frozen, context.scaling)
        })?);
        let around = dy.value().clone();
        let dnormed = self.mlp.backward(dy, mlp, context)?;
        let read_by = self.attention.gradient_slot(context.scaling);
        let dh = self.mlp_norm.backward_for(&dnormed, mlp_norm, &around, read_by, context)?;
        drop((around, dnormed));
        let (slot, copies) = (self.attention.input_slot(context.scaling), attention.input_copies());
        attention.input = LinearSaved::Kept(attention.input.operand(|frozen| {
            let normed = self.attention_norm.again(&attention_norm, slot, &frozen, copies, context)?;
            self.attention.cast_input_again(normed, copies, frozen, context.scaling)
        })?);
        let around = dh.value().clone();
        let dnormed = self.attention.backward(dh, attention, context)?;
        self.attention_norm.backward_for(&dnormed, attention_norm, &around, next, context)
    }
}

impl Layer for Block {
    type Input = Tensor;
    type Saved = BlockSaved;

    fn forward(&self, x: Tensor, context: &mut Context) -> Result<(Tensor, BlockSaved)> {
        let (y, parts) =
            self.forward_parts(&x, context, |normed, h, context| self.mlp.forward_plus(normed, Some(h), context))?;
        let saved = if context.recompute.blocks() { BlockSaved::Input(x) } else { BlockSaved::Parts(Box::new(parts)) };
        Ok((y, saved))
    }

    fn backward(&mut self, dy: Tensor, saved: BlockSaved, context: &mut Context) -> Result<Tensor> {
        Ok(self.backward_for(dy.into(), saved, None, context)?.into_value())
    }

    fn parameters<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        visit(&mut self.attention_norm.weight);
        self.attention.parameters(visit);
        visit(&mut self.mlp_norm.weight);
        self.mlp.parameters(visit);
    }
}
