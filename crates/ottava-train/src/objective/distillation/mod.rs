//! Distillation: the model learns the distribution of a teacher at the tokens of documents.
//!
//! The teacher is a `FrozenModel` (`running.rs`). `Rows::load` runs forward of the teacher over each loaded micro-batch and
//! keeps its last activations, `[T, C]` (`DistillationLoss::observe`). The loss (`loss.rs`) then computes the logits of both models for a chunk of tokens at a
//! time, so that no logits of whole micro-batches are in memory, and the op `divergence_gradient` replaces the trained model's logits by their
//! gradient.
//!
//! In the share `lmbda` of the steps, the trained model first draws the completions of the loaded rows (`draws.rs`).
//!
//! All losses of a run share one teacher, which the objective makes with its first loss.
//!
//! With `distillation.logits`, the teacher's distributions come from a folder instead (`stored/`).

mod draws;
mod loss;
mod rows;
mod running;
mod stored;

pub use loss::{DivergenceLoss, TeacherDistributions};
pub use running::{DistillationLoss, RunningTeacher};
pub use stored::{StoredLogits, store_logits};

use super::frozen::{FrozenModel, expect_tokens};
use super::next_token::NextToken;
use super::rollout::Drawer;
use super::{Objective, Opening, Rows};
use crate::phase::Passes;
use crate::step::{Loss, TrainStep};
use ottava_common::error::Result;
use ottava_models::Decoder;
use ottava_parallel::Partition;
use ottava_settings::RunConfig;
use ottava_tensor::{DType, Device};
use rows::DistillationRows;
use std::cell::{OnceCell, RefCell};
use std::rc::Rc;
use stored::StoredDistillation;

/// The objective of a run with a teacher, or with its stored distributions.
pub(super) fn of(run: &RunConfig) -> Box<dyn Objective> {
    match run.distillation.is_stored() {
        true => Box::new(StoredDistillation::new(run)),
        false => Box::new(Distillation::new(run)),
    }
}

/// The distributions of a teacher that runs beside the model.
struct Distillation {
    run: RunConfig,
    /// Made with the first loss.
    teacher: OnceCell<Rc<FrozenModel>>,
    /// Draws of a plan.
    rehearsed: RefCell<Option<Drawer>>,
}

impl Distillation {
    fn new(run: &RunConfig) -> Distillation {
        Distillation { run: run.clone(), teacher: OnceCell::new(), rehearsed: RefCell::default() }
    }

    fn teacher(&self, device: &Device) -> Result<Rc<FrozenModel>> {
        if let Some(teacher) = self.teacher.get() {
            return Ok(teacher.clone());
        }
        let run = &self.run;
        let (folder, sizes, recipe) = (&run.distillation.teacher, run.teacher_sizes()?, run.teacher_recipe(device));
        let teacher = FrozenModel::of_folder("teacher", folder, &sizes, &recipe, device, run.data.max_length)?;
        let teacher = Rc::new(teacher);
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

    fn rehearse_draws(&self, model: &mut Decoder, partition: &Partition, config: &RunConfig) -> Result<()> {
        if config.distillation.lmbda == 0.0 {
            return Ok(());
        }
        self.rehearsed.borrow_mut().get_or_insert_with(|| draws::drawer(config)).rehearse(model, partition)
    }

    fn open(&self, opening: &Opening) -> Result<Box<dyn Rows>> {
        let (what, teacher) = ("`distillation.teacher`", &self.run.distillation.teacher);
        expect_tokens(what, teacher, &self.run, "their distributions cannot be compared")?;
        Ok(Box::new(DistillationRows::open(opening)?))
    }
}
