//! Distillation: the model learns the distribution of a teacher at the tokens of documents.
//!
//! The teacher is a frozen model beside the trained one, whole on each rank. `Rows::load` runs forward of the teacher over each loaded micro-batch and
//! keeps its last activations, `[T, C]` (`Teacher::observe`). The loss (`loss.rs`) then computes the logits of both models for a chunk of tokens at a
//! time, so that no logits of whole micro-batches are in memory, and the op `divergence_gradient` replaces the trained model's logits by their
//! gradient.
//!
//! In the share `lmbda` of the steps, the trained model first draws the completions of the loaded rows (`draws.rs`).
//!
//! All losses of a run share one teacher, which the objective makes with its first loss.

mod draws;
mod loss;
mod rows;
mod teacher;

pub use loss::DistillationLoss;
pub use teacher::Teacher;

use super::next_token::NextToken;
use super::{Objective, Opening, Rows};
use crate::phase::Passes;
use crate::step::{Loss, TrainStep};
use ottava_common::error::Result;
use ottava_settings::RunConfig;
use ottava_tensor::{DType, Device};
use rows::DistillationRows;
use std::cell::OnceCell;
use std::rc::Rc;

/// The distribution of a teacher.
pub(super) struct Distillation {
    run: RunConfig,
    /// Made with the first loss.
    teacher: OnceCell<Rc<Teacher>>,
}

impl Distillation {
    pub(super) fn new(run: &RunConfig) -> Distillation {
        Distillation { run: run.clone(), teacher: OnceCell::new() }
    }

    fn teacher(&self, device: &Device) -> Result<Rc<Teacher>> {
        if let Some(teacher) = self.teacher.get() {
            return Ok(teacher.clone());
        }
        let teacher = Rc::new(Teacher::of(&self.run, device)?);
        Ok(self.teacher.get_or_init(|| teacher).clone())
    }
}

impl Objective for Distillation {
    fn loss(&self, rows: usize, device: &Device, _: DType) -> Result<Box<dyn Loss>> {
        let (teacher, tokens) = (self.teacher(device)?, rows * self.run.data.max_length);
        Ok(Box::new(DistillationLoss::new(teacher, self.run.distillation.divergence(), tokens)?))
    }

    fn passes(&self, config: &RunConfig) -> Vec<Passes> {
        NextToken.passes(config)
    }

    fn run_other_models(&self, step: &mut TrainStep) -> Result<()> {
        rows::observe(step)
    }

    fn open(&self, opening: &Opening) -> Result<Box<dyn Rows>> {
        teacher::expect_tokens(&self.run)?;
        Ok(Box::new(DistillationRows::open(opening)?))
    }
}
