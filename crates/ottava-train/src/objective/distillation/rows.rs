//! Rows of documents, which the teacher reads before each step.

use super::draws::Draws;
use super::running::DistillationLoss;
use crate::objective::next_token::Documents;
use crate::objective::{LoadedRows, Opening, Rows, Validation};
use crate::step::TrainStep;
use ottava_common::error::Result;
use ottava_data::DataState;
use ottava_models::Decoder;
use ottava_recipe::mode::StepPrecision;

/// Rows of documents, and of their prompts with completions that the model draws.
pub(super) struct DistillationRows {
    documents: Documents,
    draws: Draws,
}

impl DistillationRows {
    pub(super) fn open(opening: &Opening) -> Result<DistillationRows> {
        Ok(DistillationRows { documents: Documents::open(opening)?, draws: Draws::open(opening)? })
    }
}

/// Runs the teacher on each loaded micro-batch.
pub(super) fn observe(step: &mut TrainStep) -> Result<()> {
    step.each_loaded(|loaded, loss: &mut DistillationLoss| loss.observe(loaded.inputs, loaded.sequences))
}

impl Rows for DistillationRows {
    fn examples(&self) -> f64 {
        self.documents.examples()
    }

    fn state(&self) -> DataState {
        self.documents.state()
    }

    fn load(&mut self, model: &mut Decoder, step: &mut TrainStep, _: StepPrecision) -> Result<LoadedRows> {
        let mut batches = self.documents.next_batches(step.schedule().micro_batches)?;
        let metrics = self.draws.replace(model, &mut batches, step.partition())?;
        batches.iter().enumerate().try_for_each(|(number, batch)| step.load(number, batch))?;
        observe(step)?;
        Ok(LoadedRows { metrics, ..LoadedRows::default() })
    }

    /// The loss of the next token, as in a run without a teacher.
    fn evaluate(&self, model: &mut Decoder, step: &TrainStep, precision: StepPrecision) -> Result<Option<Validation>> {
        self.documents.evaluate(model, step, precision)
    }
}
