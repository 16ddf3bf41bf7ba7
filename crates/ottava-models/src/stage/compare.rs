//! Forward and backward of a stage in two precisions, block by block. The gradients of a block are compared and dropped before the next
//! block runs, so no second set of gradients is kept.

use super::{Stage, parameters_of};
use crate::layers::{BlockSaved, Head, NormSaved, OperandCast, Pooler, PoolerSaved};
use crate::prefetch::{backward_blocks, forward_blocks};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::mode::{Mode, StepPrecision};
use ottava_recipe::operand::ResidualGradient;
use ottava_recipe::param::{Grad, Units};
use ottava_recipe::recompute::{Recompute, SavedActivations};
use ottava_recipe::scaling::Quantity;
use ottava_recipe::shared_values::SharedValues;
use ottava_tensor::Tensor;

/// The values that forward of a comparison saves for backward.
pub struct ComparedSaved {
    blocks: Vec<[BlockSaved; 2]>,
    /// The values that the last norm and the pooler save.
    heads: Vec<(Option<NormSaved>, Option<PoolerSaved>)>,
    /// The values that layers share in each pass.
    shared: [SharedValues; 2],
}

/// Returns the context of one of the two passes. A pass in the recipe's precision saves the values that a step saves. A pass in the compute type, or
/// a repeated pass, saves only the inputs of blocks, which takes less memory. Backward recomputes the other values.
fn of_pass<'a>(context: &'a mut Context, pass: usize, shared: &'a mut [SharedValues; 2]) -> Context<'a> {
    let probe = context.casts.probe();
    let precision = probe.precisions()[pass];
    let (recompute, saved_activations) = match precision == StepPrecision::Recipe && !probe.repeats() {
        true => (context.recompute, context.saved_activations),
        false => (Recompute::Full, SavedActivations::Exact),
    };
    let mode = Mode { precision, ..context.mode() };
    let casts = context.casts.in_mode(mode);
    let shared = Some(&mut shared[pass]);
    Context { casts, recompute, saved_activations, paged: None, deferred: None, shared, ..*context }
}

impl Stage {
    /// Runs [`Stage::forward`] of `x` in both precisions, and compares the outputs of each block.
    pub fn compare_forward(
        &mut self,
        x: &[Tensor; 2],
        context: &mut Context,
        units: &mut dyn Units,
    ) -> Result<([Tensor; 2], ComparedSaved)> {
        let mut shared = <[SharedValues; 2]>::default();
        let mut embedded = Vec::with_capacity(2);
        for (x, shared) in x.iter().zip(&mut shared) {
            embedded.push(self.embed(x, &mut context.sharing(shared), units)?.0);
        }
        let mut x = <[Tensor; 2]>::try_from(embedded).expect("two passes");
        let mut blocks = Vec::with_capacity(self.blocks.len());
        forward_blocks(&self.blocks, context, units, |_, block, context| {
            let (first, by_recipe) = block.forward(&x[0], &mut of_pass(context, 0, &mut shared))?;
            let (second, high) = block.forward(&x[1], &mut of_pass(context, 1, &mut shared))?;
            x = [first, second];
            blocks.push([by_recipe, high]);
            context.casts.probe().forget_rows();
            context.casts.probe().compare(block.name(), Quantity::Output, &x[0], &x[1])
        })?;
        let mut heads = Vec::new();
        if let Some(head) = &self.head {
            for x in &mut x {
                let (normed, norm) = head.normalise(x, context)?;
                let (pooled, pooler) = self.pool(normed, context, units)?;
                *x = pooled;
                heads.push((norm, pooler));
            }
        }
        Ok((x, ComparedSaved { blocks, heads, shared }))
    }

    /// Runs [`Stage::backward`] in both precisions, and compares the gradients of each block. All gradients are dropped. The gradient of the
    /// embedding is not computed.
    pub fn compare_backward(
        &mut self,
        dy: [Tensor; 2],
        saved: ComparedSaved,
        context: &mut Context,
        units: &mut dyn Units,
    ) -> Result<[Tensor; 2]> {
        let ComparedSaved { mut blocks, heads, mut shared } = saved;
        let mut dx = dy;
        for (dx, (norm, pooler)) in dx.iter_mut().zip(heads) {
            let dy = self.pool_backward(dx.clone(), pooler, context, units)?;
            *dx = match &mut self.head {
                Some(head) => head.normalise_backward(&dy, norm)?,
                None => dy,
            };
        }
        let of_head = self.head.iter_mut().flat_map(Head::parameters_mut);
        let of_pooler = self.pooler.iter_mut().flat_map(Pooler::parameters_mut);
        of_head.chain(of_pooler).for_each(|param| param.gradient.clear());
        if let Some(weight) = self.head_weight_mut() {
            weight.gradient.clear();
        }
        backward_blocks(&mut self.blocks, &[], context, units, |_, block, _, context, _| {
            let saved = blocks.pop().expect("forward has saved what each block needs");
            let mut gradients: Vec<Vec<Option<Grad>>> = Vec::new();
            for (pass, (dx, saved)) in dx.iter_mut().zip(saved).enumerate() {
                let dy = ResidualGradient::from(dx.clone());
                *dx = block.backward(dy, saved, &OperandCast::NONE, &mut of_pass(context, pass, &mut shared))?.value;
                gradients.push(parameters_of(block).into_iter().map(|param| param.gradient.take()).collect());
            }
            let (second, first) = (gradients.pop().expect("two passes"), gradients.pop().expect("two passes"));
            // Compares parameters in the order of backward.
            for ((param, first), second) in parameters_of(block).into_iter().zip(first).zip(second).rev() {
                if let (Some(first), Some(second)) = (first, second) {
                    context.casts.probe().compare(
                        param.identity.name(),
                        Quantity::Gradient,
                        &first.values()?,
                        &second.values()?,
                    )?;
                }
            }
            context.casts.probe().forget_rows();
            context.casts.probe().compare(block.name(), Quantity::GradInput, &dx[0], &dx[1])
        })?;
        Ok(dx)
    }
}
