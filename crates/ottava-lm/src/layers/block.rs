//! The transformer block: a list of residual branches.

use super::branch::{Branch, BranchSaved, Sublayer};
use super::cast::OperandCast;
use super::{Attention, KvCache, Mlp};
use crate::context::Context;
use crate::error::Result;
use crate::operand::ResidualGradient;
use crate::param::Param;
use ottava_tensor::Tensor;

/// `h = x + attention(norm(x))`;  `y = h + mlp(norm(h))`.
pub struct Block {
    /// Mixes tokens.
    pub attention: Branch<Attention>,
    /// Computes on each token by itself.
    pub mlp: Branch<Mlp>,
}

/// Saved by [`Block`].
pub enum BlockSaved {
    /// What the branches saved.
    Branches(Box<BranchesSaved>),
    /// The input alone, `[T, C]`: backward runs the block again.
    Input(Tensor),
}

/// What both branches saved.
pub struct BranchesSaved {
    attention: BranchSaved<Attention>,
    mlp: BranchSaved<Mlp>,
}

impl Block {
    /// `y` `[T, C]`, and what backward needs to know.
    pub fn forward(&self, x: &Tensor, context: &mut Context) -> Result<(Tensor, BlockSaved)> {
        let (h, attention) = self.attention.forward(x, context)?;
        let (y, mlp) = self.mlp.forward(&h, context)?;
        let saved = match context.recompute.blocks() {
            true => BlockSaved::Input(x.clone()),
            false => BlockSaved::Branches(Box::new(BranchesSaved { attention, mlp })),
        };
        Ok((y, saved))
    }

    /// Forward for new tokens of one sequence at positions `start..`, after those in `cache`.
    pub fn forward_cached(
        &self,
        x: &Tensor,
        cache: &mut KvCache,
        start: usize,
        context: &mut Context,
    ) -> Result<Tensor> {
        let Branch { norm, sublayer: attention } = &self.attention;
        let (normed, _) = norm.forward_for(x, &attention.input(), context)?;
        let h = attention.forward_cached(&normed.rows, x, cache, start, context)?;
        Ok(self.mlp.forward(&h, context)?.0)
    }

    /// What [`Block::forward`] saves without recomputation, without computing the output; does not measure again.
    fn recompute(&self, x: &Tensor, context: &mut Context) -> Result<BranchesSaved> {
        let context = &mut context.recomputation();
        let (h, attention) = self.attention.forward(x, context)?;
        Ok(BranchesSaved { attention, mlp: self.mlp.save(&h, context)? })
    }

    /// The cast that reads the gradient by its output first.
    pub fn gradient(&self) -> OperandCast {
        self.mlp.sublayer.gradient()
    }

    /// The gradient by `x` from the gradient by `y`, with its amax where the cast `next`, which reads it next, needs that.
    pub fn backward(
        &mut self,
        dy: ResidualGradient,
        saved: BlockSaved,
        next: &OperandCast,
        context: &mut Context,
    ) -> Result<ResidualGradient> {
        let BranchesSaved { attention, mlp } = match saved {
            BlockSaved::Branches(saved) => *saved,
            BlockSaved::Input(x) => self.recompute(&x, context)?,
        };
        let dh = self.mlp.backward(dy, mlp, &self.attention.sublayer.gradient(), context)?;
        self.attention.backward(dh, attention, next, context)
    }

    /// Calls `visit` for each parameter, always in the same order.
    pub fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        self.attention.parameters(visit);
        self.mlp.parameters(visit);
    }

    /// [`Block::parameters`], to change them.
    pub fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.attention.parameters_mut(visit);
        self.mlp.parameters_mut(visit);
    }
}
