//! The transformer block: a list of residual branches.

use super::branch::{Branch, BranchSaved};
use super::cast::OperandCast;
use super::{Adaptable, BlockScale};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::operand::ResidualGradient;
use ottava_recipe::param::Param;
use ottava_tensor::Tensor;

/// Residual branches, one after the other. Attention and MLP are usually two branches, or run in parallel in one branch.
pub struct Block {
    /// A name such as `model.layers.0`.
    name: String,
    branches: Vec<Branch>,
    /// Whether all branches read the input of the block.
    parallel: bool,
    /// The number that multiplies the output, if there is one.
    scale: Option<BlockScale>,
}

/// The values that forward of [`Block`] saves.
pub enum BlockSaved {
    /// The values that each branch saved.
    Branches(Vec<BranchSaved>),
    /// Only the input, `[T, C]`. Backward recomputes the block.
    Input(Tensor),
}

impl Block {
    /// Creates a block of `branches` called `name`. If `parallel`, all branches read the input of the block. Panics if `branches` is empty.
    pub fn new(name: String, branches: Vec<Branch>, parallel: bool) -> Block {
        assert!(!branches.is_empty(), "a block has a branch");
        Block { name, branches, parallel, scale: None }
    }

    /// Multiplies the output by a number.
    pub fn multiplied(self, scale: Option<BlockScale>) -> Block {
        Block { scale, ..self }
    }

    /// Returns the name, such as `model.layers.0`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns `y` `[T, C]` and the values for backward.
    pub fn forward(&self, x: &Tensor, context: &mut Context) -> Result<(Tensor, BlockSaved)> {
        let (mut y, mut saved) = (x.clone(), Vec::with_capacity(self.branches.len()));
        for branch in &self.branches {
            let of_branch;
            (y, of_branch) = branch.forward(if self.parallel { x } else { &y }, &y, context)?;
            saved.push(of_branch);
        }
        if let Some(scale) = &self.scale {
            y = scale.apply(&y)?;
        }
        let saved = match context.recompute.blocks() {
            true => BlockSaved::Input(x.clone()),
            false => BlockSaved::Branches(saved),
        };
        Ok((y, saved))
    }

    /// Returns the values that each branch saves in a forward without recomputation. The block's output is not computed, and amaxes are not measured
    /// again.
    fn recompute(&self, x: &Tensor, context: &mut Context) -> Result<Vec<BranchSaved>> {
        let context = &mut context.recomputation();
        let (mut h, mut saved) = (x.clone(), Vec::with_capacity(self.branches.len()));
        let (last, before) = self.branches.split_last().expect("a block has a branch");
        for branch in before {
            let of_branch;
            (h, of_branch) = branch.forward(if self.parallel { x } else { &h }, &h, context)?;
            saved.push(of_branch);
        }
        saved.push(last.save(if self.parallel { x } else { &h }, context)?);
        Ok(saved)
    }

    /// Returns the cast that reads the gradient by the block's output first. Returns [`OperandCast::NONE`] if several branches read it, each with its
    /// own scale, or if the gradient is multiplied first.
    pub fn gradient(&self) -> OperandCast {
        match self.parallel || self.scale.is_some() {
            true => OperandCast::NONE,
            false => self.branches.last().expect("a block has a branch").gradient(),
        }
    }

    /// Returns the gradient by `x` from the gradient by `y`. If the cast `next`, which reads the result, needs an amax, the amax is computed too.
    pub fn backward(
        &mut self,
        dy: ResidualGradient,
        saved: BlockSaved,
        next: &OperandCast,
        context: &mut Context,
    ) -> Result<ResidualGradient> {
        let saved = match saved {
            BlockSaved::Input(x) => self.recompute(&x, context)?,
            BlockSaved::Branches(saved) => saved,
        };
        let dy = match &mut self.scale {
            Some(scale) => scale.backward(&dy.value)?.into(),
            None => dy,
        };
        if self.parallel {
            return self.backward_parallel(dy, saved, next, context);
        }
        let readers: Vec<_> = [*next].into_iter().chain(self.branches.iter().map(Branch::gradient)).collect();
        let branches = self.branches.iter_mut().zip(saved).zip(readers).rev();
        let mut dh = dy;
        for ((branch, saved), reader) in branches {
            let dresidual = dh.value.clone();
            dh = branch.backward(dh, &dresidual, saved, &reader, context)?;
        }
        Ok(dh)
    }

    /// Returns the gradient by the input that all branches read. Each branch reads the gradient by the block's output, and adds its part to the sum
    /// of the branches after it.
    fn backward_parallel(
        &mut self,
        dy: ResidualGradient,
        saved: Vec<BranchSaved>,
        next: &OperandCast,
        context: &mut Context,
    ) -> Result<ResidualGradient> {
        let dy = dy.value;
        let mut sum = ResidualGradient::from(dy.clone());
        for (at, (branch, saved)) in self.branches.iter_mut().zip(saved).enumerate().rev() {
            let reader = if at == 0 { *next } else { OperandCast::NONE };
            sum = branch.backward(dy.clone().into(), &sum.value, saved, &reader, context)?;
        }
        Ok(sum)
    }

    /// Calls `visit` for each parameter, always in the same order.
    pub fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        self.branches.iter().for_each(|branch| branch.parameters(visit));
        self.scale.iter().for_each(|scale| visit(scale.parameter()));
    }

    /// Calls `visit` for each parameter mutably, in the order of [`Block::parameters`].
    pub fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.branches.iter_mut().for_each(|branch| branch.parameters_mut(visit));
        self.scale.iter_mut().for_each(|scale| visit(scale.parameter_mut()));
    }

    /// Calls `visit` for each linear that can have an adapter, always in the same order.
    pub fn linears_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut dyn Adaptable)) {
        self.branches.iter_mut().for_each(|branch| branch.linears_mut(visit));
    }
}
