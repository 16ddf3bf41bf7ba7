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
    /// [`Stage::forward`] from `x` in both precisions, comparing the outputs of each block.
    pub fn compare_forward(
        &mut self,
        x: &[Tensor; 2],
        context: &mut Context,
        units: &mut dyn Units,
    ) -> Result<([Tensor; 2], ComparedSaved)> {
        let precisions = context.casts.probe().precisions();
        let mut x = [self.embed(&x[0], context, units)?, self.embed(&x[1], context, units)?];
        let mut inputs = Vec::with_capacity(self.blocks.len());
        forward_blocks(&self.blocks, context, units, |_, block, context| {
            inputs.push(x.clone());
            for (x, precision) in x.iter_mut().zip(precisions) {
                *x = block.forward(x, &mut context.in_precision(precision))?.0;
            }
            context.casts.probe().compare(block.name(), Quantity::Output, &x[0], &x[1])
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

    /// [`Stage::backward`] in both precisions, comparing the gradients of each block. All gradients are dropped; that of
    /// the embedding is not computed.
    pub fn compare_backward(
        &mut self,
        dy: [Tensor; 2],
        saved: ComparedSaved,
        context: &mut Context,
        units: &mut dyn Units,
    ) -> Result<[Tensor; 2]> {
        let ComparedSaved { mut inputs, norms } = saved;
        let precisions = context.casts.probe().precisions();
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
            let mut gradients: Vec<Vec<Option<Grad>>> = Vec::new();
            for ((dx, input), precision) in dx.iter_mut().zip(inputs).zip(precisions) {
                let (dy, saved) = (ResidualGradient::from(dx.clone()), BlockSaved::Input(input));
                let mut context = context.in_precision(precision);
                *dx = block.backward(dy, saved, &OperandCast::NONE, &mut context)?.value;
                gradients.push(parameters_of(block).into_iter().map(|param| param.gradient.take()).collect());
            }
            let (second, first) = (gradients.pop().expect("two passes"), gradients.pop().expect("two passes"));
            for ((param, first), second) in parameters_of(block).into_iter().zip(first).zip(second) {
                if let (Some(first), Some(second)) = (first, second) {
                    let [first, second] = [cast(&first.values()?, DType::F32)?, cast(&second.values()?, DType::F32)?];
                    context.casts.probe().compare(param.name(), Quantity::Gradient, &first, &second)?;
                }
            }
            context.casts.probe().compare(block.name(), Quantity::GradInput, &dx[0], &dx[1])
        })?;
        Ok(dx)
    }
}
