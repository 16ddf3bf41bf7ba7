//! Forward and backward of a stage in two precisions, block by block: the gradients of a block are compared and dropped before the next
//! block runs, so no second set of gradients is kept.

use super::{Stage, parameters_of};
use crate::context::Context;
use crate::error::Result;
use crate::layers::{BlockSaved, NormSaved, OperandCast};
use crate::mode::{Mode, StepPrecision};
use crate::models::prefetch::{backward_blocks, forward_blocks};
use crate::operand::ResidualGradient;
use crate::param::{Grad, Units};
use crate::scaling::Quantity;
use ottava_tensor::ops::cast;
use ottava_tensor::{DType, Tensor};

/// By the recipe, and in the compute type.
const PRECISIONS: [StepPrecision; 2] = [StepPrecision::Recipe, StepPrecision::High];

/// What a stage saves of both precisions from forward to backward: the inputs of blocks, which backward recomputes.
pub struct ComparedSaved {
    inputs: Vec<[Tensor; 2]>,
    norms: Vec<NormSaved>,
}

impl Context<'_> {
    /// The same pass in another precision.
    fn in_precision(&mut self, precision: StepPrecision) -> Context<'_> {
        let mode = Mode { precision, ..self.mode() };
        Context { casts: self.casts.in_mode(mode), paged: None, deferred: None, ..*self }
    }
}

impl Stage {
    /// [`Stage::forward`] from `x` by the recipe and in the compute type, comparing the outputs of each block.
    pub fn compare_forward(
        &mut self,
        x: &[Tensor; 2],
        context: &mut Context,
        units: &mut dyn Units,
    ) -> Result<([Tensor; 2], ComparedSaved)> {
        let [by_recipe, high] = x;
        let mut x = [self.embed(by_recipe, context, units)?, self.embed(high, context, units)?];
        let mut inputs = Vec::with_capacity(self.blocks.len());
        forward_blocks(&self.blocks, context, units, |_, block, context| {
            inputs.push(x.clone());
            for (x, precision) in x.iter_mut().zip(PRECISIONS) {
                *x = block.forward(x, &mut context.in_precision(precision))?.0;
            }
            let [by_recipe, high] = &x;
            context.casts.probe().compare(block.name(), Quantity::Output, by_recipe, high)
        })?;
        let mut norms = Vec::new();
        if let Some(head) = &self.head {
            for x in &mut x {
                let (normed, saved) = head.normalise(x, context)?;
                *x = normed;
                norms.push(saved);
            }
        }
        Ok((x, ComparedSaved { inputs, norms }))
    }

    /// [`Stage::backward`] by the recipe and in the compute type, comparing the gradients of each block. All gradients are dropped; that of
    /// the embedding is not computed.
    pub fn compare_backward(
        &mut self,
        dy: [Tensor; 2],
        saved: ComparedSaved,
        context: &mut Context,
        units: &mut dyn Units,
    ) -> Result<[Tensor; 2]> {
        let ComparedSaved { mut inputs, norms } = saved;
        let mut dx = dy;
        if let Some(head) = &mut self.head {
            for (dx, saved) in dx.iter_mut().zip(norms) {
                *dx = head.normalise_backward(dx, saved)?;
            }
            head.parameters_mut().into_iter().for_each(|param| param.gradient.clear());
        }
        if let Some(weight) = self.head_weight_mut() {
            weight.gradient.clear();
        }
        backward_blocks(&mut self.blocks, &[], context, units, |_, block, _, context, _| {
            let inputs = inputs.pop().expect("forward has saved the inputs of each block");
            let mut gradients: Vec<Option<Grad>> = Vec::new();
            for ((dx, input), precision) in dx.iter_mut().zip(inputs).zip(PRECISIONS) {
                let (dy, saved) = (ResidualGradient::from(dx.clone()), BlockSaved::Input(input));
                let mut context = context.in_precision(precision);
                *dx = block.backward(dy, saved, &OperandCast::NONE, &mut context)?.value;
                let mut params = parameters_of(block);
                if precision == StepPrecision::Recipe {
                    gradients.extend(params.iter_mut().map(|param| param.gradient.take()));
                    continue;
                }
                for (param, by_recipe) in params.into_iter().zip(gradients.drain(..)) {
                    if let (Some(by_recipe), Some(high)) = (by_recipe, param.gradient.take()) {
                        let [by_recipe, high] =
                            [cast(&by_recipe.values()?, DType::F32)?, cast(&high.values()?, DType::F32)?];
                        context.casts.probe().compare(param.name(), Quantity::Gradient, &by_recipe, &high)?;
                    }
                }
            }
            let [by_recipe, high] = &dx;
            context.casts.probe().compare(block.name(), Quantity::GradInput, by_recipe, high)
        })?;
        Ok(dx)
    }
}
