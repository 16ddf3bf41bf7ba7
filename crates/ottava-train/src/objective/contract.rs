//! What an objective is.

use super::rollout::Clients;
use super::validation::Validation;
use crate::phase::Passes;
use crate::step::{Loss, Metrics, NextTokenLoss, TrainStep};
use ottava_common::error::Result;
use ottava_data::{Batch, DataState, RowShare, TrainingData};
use ottava_models::{ConfigFile, Decoder};
use ottava_parallel::{Partition, Ranks};
use ottava_recipe::mode::StepPrecision;
use ottava_settings::RunConfig;
use ottava_tensor::{DType, Device};
use serde_json::Value;

/// The objective of a run, as its settings say.
pub trait Objective {
    /// The loss of a micro-batch of `rows` rows, with room on `device` for what it reads, in the type of sums `dtype`.
    fn loss(&self, rows: usize, device: &Device, dtype: DType) -> Result<Box<dyn Loss>>;

    /// The loss of a micro-batch of `rows` rows in passes without gradients, whose [`Loss::evaluated`] says what the passes return.
    fn evaluated(&self, _rows: usize, _device: &Device, _dtype: DType) -> Result<Box<dyn Loss>> {
        Ok(Box::new(NextTokenLoss))
    }

    /// The documents of a row, at most, if [`Rows::load`] packs rows itself. `None` if the data have the rows.
    fn max_documents(&self) -> Option<usize> {
        None
    }

    /// The passes without gradients of the run of `config`, besides its steps. A plan rehearses them.
    fn passes(&self, config: &RunConfig) -> Vec<Passes>;

    /// Runs, on the loaded rows of `step`, the passes of other models than the trained one, such as a teacher. [`Rows::load`] runs them, and a plan
    /// rehearses them.
    fn run_other_models(&self, _step: &mut TrainStep) -> Result<()> {
        Ok(())
    }

    /// Draws completions by `model`, which `partition` divides, if [`Rows::load`] does, so that a plan counts their memory.
    fn rehearse_draws(&self, _model: &mut Decoder, _partition: &Partition, _config: &RunConfig) -> Result<()> {
        Ok(())
    }

    /// The rows of the run. Errors with [`Error::Data`](ottava_common::Error::Data) when none is left to train on, and with
    /// [`Error::Checkpoint`](ottava_common::Error::Checkpoint) when the position does not fit the data.
    fn open(&self, opening: &Opening) -> Result<Box<dyn Rows>>;
}

/// What the rows of a run are opened with.
#[derive(Clone, Copy)]
pub struct Opening<'a> {
    /// The settings.
    pub config: &'a RunConfig,
    /// `config.json` of the model that is trained.
    pub model: &'a ConfigFile,
    /// The data.
    pub data: &'a TrainingData,
    /// The position in the data.
    pub state: &'a DataState,
    /// The rows of this rank.
    pub share: RowShare,
    /// The ranks of the run.
    pub ranks: &'a Ranks,
    /// Steps that are done.
    pub step: u64,
    /// What [`Rows::unfinished`] returned when the checkpoint was saved.
    pub unfinished: Option<&'a Value>,
}

/// What [`Rows::load`] has loaded for a step.
#[derive(Clone, Debug, Default)]
pub struct LoadedRows {
    /// The first micro-batch, if passes can be compared on it before the step, as
    /// [`ObjectiveProperties::compares_passes`](ottava_settings::ObjectiveProperties::compares_passes) says.
    pub first: Option<Batch>,
    /// What the rows say of themselves, such as the rewards of a rollout. Observers see these metrics before the step, and the report of the step has
    /// them before the metrics of the loss.
    pub metrics: Metrics,
    /// Examples of the rows for a reader, each a JSON object, such as completions with their rewards.
    pub examples: Vec<Value>,
}

/// The rows of a run: what each step reads, which may be rows that the model itself makes, and what is held out. All ranks call each function in the
/// same order.
pub trait Rows {
    /// Examples of an epoch: rows, or records of preferences. Per step, each data-parallel rank reads
    /// `gradient_accumulation_steps · per_device_train_batch_size` examples.
    fn examples(&self) -> f64;

    /// The position in the data, as checkpoints save it.
    fn state(&self) -> DataState;

    /// What later steps read of rows that were made already, as checkpoints save it.
    fn unfinished(&self) -> Option<Value> {
        None
    }

    /// Forgets rows that the model has made, since the run goes back to an earlier model.
    fn forget_unfinished(&mut self) {}

    /// Lets `clients` make the rows of later steps. Only a run with `reinforcement.endpoint` has clients.
    fn connect(&mut self, _clients: Box<dyn Clients>) {}

    /// SHA-256 of `reference.json` in the run's folder, which checkpoints save.
    fn reference_digest(&self) -> Option<String> {
        None
    }

    /// Decides which reference log-probabilities `max_steps` steps and validation need.
    fn plan_reference(&mut self, _max_steps: u64) {}

    /// Reads the reference log-probabilities that an interrupted run has stored, if their file has this `digest`.
    fn read_reference(&mut self, _digest: Option<&str>) -> Result<()> {
        Ok(())
    }

    /// Whether reference log-probabilities are still missing.
    fn needs_reference(&self) -> bool {
        false
    }

    /// Computes the missing reference log-probabilities by `model`, before any step. The leading rank stores them in the run's folder.
    fn compute_reference(&mut self, _model: &mut Decoder, _step: &TrainStep) -> Result<()> {
        Ok(())
    }

    /// Loads all micro-batches of the next step, whose products have this `precision`, into `step`.
    fn load(&mut self, model: &mut Decoder, step: &mut TrainStep, precision: StepPrecision) -> Result<LoadedRows>;

    /// Loss and metrics of the rows that are held out; `None` without such rows.
    ///
    /// Errors with [`Error::NonFinite`](ottava_common::Error::NonFinite) when the loss is infinite or NaN, and with
    /// [`Error::Cancelled`](ottava_common::Error::Cancelled) on all ranks after a request to any of them to stop.
    fn evaluate(&self, model: &mut Decoder, step: &TrainStep, precision: StepPrecision) -> Result<Option<Validation>>;
}
