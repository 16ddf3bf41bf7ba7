//! Rows of documents, which the teacher reads before each step.

use super::loss::DistillationLoss;
use crate::objective::next_token::Documents;
use crate::objective::{LoadedRows, Rows, Validation};
use crate::step::TrainStep;
use ottava_common::error::Result;
use ottava_data::DataState;
use ottava_models::Decoder;
use ottava_recipe::mode::StepPrecision;

/// Rows of documents.
pub(super) struct DistillationRows(pub(super) Documents);

/// Runs the teacher on each loaded micro-batch.
pub(super) fn observe(step: &mut TrainStep) -> Result<()> {
    step.each_loaded(|inputs, sequences, loss: &mut DistillationLoss| loss.observe(inputs, sequences))
}

impl Rows for DistillationRows {
    fn examples(&self) -> f64 {
        self.0.examples()
    }

    fn state(&self) -> DataState {
        self.0.state()
    }

    fn load(&mut self, model: &mut Decoder, step: &mut TrainStep, precision: StepPrecision) -> Result<LoadedRows> {
        let loaded = self.0.load(model, step, precision)?;
        observe(step)?;
        Ok(LoadedRows { first: None, ..loaded })
    }

    /// The loss of the next token, as in a run without a teacher.
    fn evaluate(&self, model: &mut Decoder, step: &TrainStep, precision: StepPrecision) -> Result<Option<Validation>> {
        self.0.evaluate(model, step, precision)
    }
}
