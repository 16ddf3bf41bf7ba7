//! A teacher that runs beside the model.

use super::loss::{DivergenceLoss, TeacherDistributions};
use crate::objective::FrozenModel;
use ottava_common::error::Result;
use ottava_recipe::context::Sequences;
use ottava_tensor::Tensor;
use ottava_tensor::ops::{Divergence, divergence_gradient};
use std::ops::Range;
use std::rc::Rc;

/// A model and its last activations at the tokens of a micro-batch, from which the loss computes logits.
pub struct RunningTeacher {
    model: Rc<FrozenModel>,
    /// `[T, C]`.
    activations: Tensor,
}

/// The divergence from a teacher that runs beside the model.
pub type DistillationLoss = DivergenceLoss<RunningTeacher>;

impl TeacherDistributions for RunningTeacher {
    fn divergence_gradient(
        &self,
        tokens: Range<usize>,
        logits: &mut Tensor,
        vocabulary: usize,
        targets: &Tensor,
        scale: &Tensor,
        how: Divergence,
    ) -> Result<Tensor> {
        let teacher = self.model.logits(&self.activations.rows(tokens.start, tokens.end)?)?;
        Ok(divergence_gradient(logits, &teacher, vocabulary, targets, scale, how)?)
    }
}

impl DistillationLoss {
    /// The loss of micro-batches of `tokens` tokens.
    pub fn new(teacher: Rc<FrozenModel>, how: Divergence, tokens: usize) -> Result<DistillationLoss> {
        let activations = teacher.room(tokens)?;
        Ok(DivergenceLoss::from(RunningTeacher { model: teacher, activations }, how))
    }

    /// Runs the teacher on the tokens `inputs` `[T]` of the micro-batch.
    pub fn observe(&mut self, inputs: &Tensor, sequences: &Sequences) -> Result<()> {
        let RunningTeacher { model, activations } = &mut self.teacher;
        Ok(activations.copy_from(0, &model.activations(inputs, sequences)?)?)
    }
}
