//! The loss of distillation in a step.

use crate::objective::FrozenModel;
use crate::step::{Loss, Metrics, NextTokenLoss};
use ottava_common::error::Result;
use ottava_models::Decoder;
use ottava_recipe::context::Sequences;
use ottava_recipe::param::Units;
use ottava_tensor::Tensor;
use ottava_tensor::ops::{Divergence, divergence_gradient};
use std::rc::Rc;

/// The divergence from a teacher at each token of a micro-batch that has a target.
pub struct DistillationLoss {
    teacher: Rc<FrozenModel>,
    how: Divergence,
    /// The teacher's activations `[T, C]` of the tokens.
    activations: Tensor,
}

impl DistillationLoss {
    /// The loss of micro-batches of `tokens` tokens.
    pub fn new(teacher: Rc<FrozenModel>, how: Divergence, tokens: usize) -> Result<DistillationLoss> {
        let activations = teacher.room(tokens)?;
        Ok(DistillationLoss { teacher, how, activations })
    }

    /// Runs the teacher on the tokens `inputs` `[T]` of the micro-batch.
    pub fn observe(&mut self, inputs: &Tensor, sequences: &Sequences) -> Result<()> {
        Ok(self.activations.copy_from(0, &self.teacher.activations(inputs, sequences)?)?)
    }
}

impl Loss for DistillationLoss {
    fn units(&self, tokens: usize) -> usize {
        NextTokenLoss.units(tokens)
    }

    fn counted(&self, targets: &[i32]) -> usize {
        NextTokenLoss.counted(targets)
    }

    fn values(&self, tokens: usize) -> usize {
        NextTokenLoss.values(tokens)
    }

    fn losses_and_gradient(
        &self,
        model: &mut Decoder,
        normed: &Tensor,
        targets: &Tensor,
        scale: &Tensor,
        units: &mut dyn Units,
    ) -> Result<(Tensor, Tensor)> {
        let vocabulary = model.config().vocabulary;
        model.chunked_gradient(normed, targets.len(), units, &mut |logits, start, end| {
            let teacher = self.teacher.logits(&self.activations.rows(start, end)?)?;
            Ok(divergence_gradient(logits, &teacher, vocabulary, &targets.rows(start, end)?, scale, self.how)?)
        })
    }

    fn add(&self, sums: Vec<f64>, values: &[f64]) -> Result<Vec<f64>> {
        NextTokenLoss.add(sums, values)
    }

    fn metrics(&self, _: &[f64]) -> Metrics {
        Metrics::default()
    }
}
