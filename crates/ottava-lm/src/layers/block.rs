//! The transformer block: its residual branches.

use super::branch::{Branch, BranchSaved, Sublayer};
use super::cast::OperandCast;
use super::{Attention, Mlp};
use crate::context::Context;
use crate::error::Result;
use crate::operand::ResidualGradient;
use crate::param::Param;
use ottava_tensor::Tensor;
use ottava_tensor::ops::{KvBlocks, PagedBatch};

/// Attention and MLP, one after the other or beside each other.
pub enum Block {
    /// `h = x + attention(norm(x))`;  `y = h + mlp(norm(h))`.
    Sequential(Box<Sequential>),
    /// `y = x + attention(norm(x)) + mlp(norm(x))`, with one norm.
    Parallel(Box<Branch<(Attention, Mlp)>>),
}

/// Two branches in a row.
pub struct Sequential {
    /// Mixes tokens.
    pub attention: Branch<Attention>,
    /// Computes on each token by itself.
    pub mlp: Branch<Mlp>,
}

/// Saved by [`Block`].
pub enum BlockSaved {
    /// What two branches in a row saved.
    Sequential(Box<(BranchSaved<Attention>, BranchSaved<Mlp>)>),
    /// What one branch saved.
    Parallel(Box<BranchSaved<(Attention, Mlp)>>),
    /// The input alone, `[T, C]`: backward runs the block again.
    Input(Tensor),
}

impl Block {
    /// Mixes tokens.
    pub fn attention(&self) -> &Attention {
        match self {
            Block::Sequential(branches) => &branches.attention.sublayer,
            Block::Parallel(branch) => &branch.sublayer.0,
        }
    }

    /// `y` `[T, C]`, and what backward needs to know.
    pub fn forward(&self, x: &Tensor, context: &mut Context) -> Result<(Tensor, BlockSaved)> {
        let (y, saved) = match self {
            Block::Sequential(branches) => {
                let (h, attention) = branches.attention.forward(x, context)?;
                let (y, mlp) = branches.mlp.forward(&h, context)?;
                (y, BlockSaved::Sequential(Box::new((attention, mlp))))
            }
            Block::Parallel(branch) => {
                let (y, saved) = branch.forward(x, context)?;
                (y, BlockSaved::Parallel(Box::new(saved)))
            }
        };
        let saved = match context.recompute.blocks() {
            true => BlockSaved::Input(x.clone()),
            false => saved,
        };
        Ok((y, saved))
    }

    /// Forward for new tokens of many sequences, after those in `cache`; or for all tokens of one sequence, if it `is_whole`.
    pub fn forward_paged(
        &self,
        x: &Tensor,
        cache: &mut KvBlocks,
        batch: &PagedBatch,
        is_whole: bool,
        context: &mut Context,
    ) -> Result<Tensor> {
        let (norm, attention) = match self {
            Block::Sequential(branches) => (&branches.attention.norm, &branches.attention.sublayer),
            Block::Parallel(branch) => (&branch.norm, &branch.sublayer.0),
        };
        let (normed, _) = norm.forward_for(x, &attention.input(), context)?;
        let h = attention.forward_paged(&normed.rows, x, cache, batch, is_whole, context)?;
        match self {
            Block::Sequential(branches) => Ok(branches.mlp.forward(&h, context)?.0),
            Block::Parallel(branch) => Ok(branch.sublayer.1.forward(normed.rows, &h, context)?.0),
        }
    }

    /// What [`Block::forward`] saves without recomputation, without computing the output; does not measure again.
    fn recompute(&self, x: &Tensor, context: &mut Context) -> Result<BlockSaved> {
        let context = &mut context.recomputation();
        Ok(match self {
            Block::Sequential(branches) => {
                let (h, attention) = branches.attention.forward(x, context)?;
                BlockSaved::Sequential(Box::new((attention, branches.mlp.save(&h, context)?)))
            }
            Block::Parallel(branch) => BlockSaved::Parallel(Box::new(branch.save(x, context)?)),
        })
    }

    /// The cast that reads the gradient by its output first.
    pub fn gradient(&self) -> OperandCast {
        match self {
            Block::Sequential(branches) => branches.mlp.sublayer.gradient(),
            Block::Parallel(branch) => branch.sublayer.gradient(),
        }
    }

    /// The gradient by `x` from the gradient by `y`, with its amax where the cast `next`, which reads it next, needs that.
    pub fn backward(
        &mut self,
        dy: ResidualGradient,
        saved: BlockSaved,
        next: &OperandCast,
        context: &mut Context,
    ) -> Result<ResidualGradient> {
        let saved = match saved {
            BlockSaved::Input(x) => self.recompute(&x, context)?,
            saved => saved,
        };
        match (self, saved) {
            (Block::Sequential(branches), BlockSaved::Sequential(saved)) => {
                let (attention, mlp) = *saved;
                let dh = branches.mlp.backward(dy, mlp, &branches.attention.sublayer.gradient(), context)?;
                branches.attention.backward(dh, attention, next, context)
            }
            (Block::Parallel(branch), BlockSaved::Parallel(saved)) => branch.backward(dy, *saved, next, context),
            _ => unreachable!("a block saves what it is made of"),
        }
    }

    /// Calls `visit` for each parameter, always in the same order.
    pub fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        match self {
            Block::Sequential(branches) => {
                branches.attention.parameters(visit);
                branches.mlp.parameters(visit);
            }
            Block::Parallel(branch) => branch.parameters(visit),
        }
    }

    /// [`Block::parameters`], to change them.
    pub fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        match self {
            Block::Sequential(branches) => {
                branches.attention.parameters_mut(visit);
                branches.mlp.parameters_mut(visit);
            }
            Block::Parallel(branch) => branch.parameters_mut(visit),
        }
    }
}
