//! The loss of distillation in a step.

use crate::step::{Loss, NextTokenLoss};
use ottava_common::error::Result;
use ottava_models::Decoder;
use ottava_recipe::param::Units;
use ottava_tensor::Tensor;
use ottava_tensor::ops::Divergence;
use std::ops::Range;

/// What is known of a teacher's distributions at the tokens of a micro-batch.
pub trait TeacherDistributions: 'static {
    /// Returns the divergences `[n]` from the teacher of the tokens in the range `tokens`, whose `n` rows of `logits` have `vocabulary` values each;
    /// replaces these logits by the gradient of `scale · Σ divergences`. `targets` `[n]` says which tokens count.
    fn divergence_gradient(
        &self,
        tokens: Range<usize>,
        logits: &mut Tensor,
        vocabulary: usize,
        targets: &Tensor,
        scale: &Tensor,
        how: Divergence,
    ) -> Result<Tensor>;
}

/// The divergence from a teacher at each token of a micro-batch that has a target.
pub struct DivergenceLoss<T> {
    how: Divergence,
    /// The teacher at the tokens of the micro-batch.
    pub(super) teacher: T,
}

impl<T: TeacherDistributions> DivergenceLoss<T> {
    /// The loss of a micro-batch with this `teacher`.
    pub(super) fn from(teacher: T, how: Divergence) -> DivergenceLoss<T> {
        DivergenceLoss { how, teacher }
    }
}

impl<T: TeacherDistributions> Loss for DivergenceLoss<T> {
    fn units(&self, tokens: usize) -> usize {
        NextTokenLoss.units(tokens)
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
            let targets = targets.rows(start, end)?;
            self.teacher.divergence_gradient(start..end, logits, vocabulary, &targets, scale, self.how)
        })
    }

    fn add(&self, sums: Vec<f64>, values: &[f64]) -> Result<Vec<f64>> {
        NextTokenLoss.add(sums, values)
    }
}
