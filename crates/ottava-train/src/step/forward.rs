//! Passes without gradients.

use super::{MicroBatch, Program, ProgramInputs, TrainStep};
use ottava_common::error::Result;
use ottava_models::Decoder;
use ottava_parallel::{Exchange, Partition, Schedule, ScheduleKind};
use ottava_recipe::mode::{Mode, Pass, StepPrecision};
use ottava_tensor::Tensor;

/// Computes what the loss of each of `micro_batches` returns without gradients ([`Loss::evaluated`](super::Loss::evaluated)): by default the losses `[T]`
/// of its tokens. Returns nothing on ranks without the last stage of the
/// model. All ranks of `partition` call it with the same number of micro-batches. `pass` is `Pass::Evaluation` or `Pass::Reference`.
pub fn token_losses(
    model: &mut Decoder,
    micro_batches: &[MicroBatch],
    pass: Pass,
    precision: StepPrecision,
    partition: &Partition,
) -> Result<Vec<Tensor>> {
    let pipeline = partition.ranks().pipeline();
    let (kind, ranks) = (ScheduleKind::default(), pipeline.size());
    let schedule = Schedule { kind, ranks, stages: model.stages(), micro_batches: micro_batches.len() };
    let program = Program { pass, ..Program::evaluation_of(&schedule, pipeline.rank()) };
    let losses = program.run(model, &ProgramInputs { micro_batches, loss_scale: None, precision, partition }, None)?;
    partition.ranks().compare_gpu_calls("a pass without gradients")?;
    Ok(losses)
}

/// Returns the values `[T]` that the value head of a whole model estimates for the tokens of a micro-batch, and computes no gradients. All ranks of
/// `partition` call it together.
pub fn token_values(
    model: &mut Decoder,
    micro_batch: &MicroBatch,
    precision: StepPrecision,
    partition: &Partition,
) -> Result<Tensor> {
    let MicroBatch { inputs, sequences, .. } = micro_batch;
    let mode = Mode { pass: Pass::Evaluation, precision };
    let normed = model.forward_only(0, inputs, sequences, mode, &mut Exchange::of_weights(partition))?;
    partition.ranks().compare_gpu_calls("a pass without gradients")?;
    model.values(&normed)
}

impl TrainStep {
    /// Computes the losses of the loaded micro-batches as [`token_losses`] does.
    pub fn loaded_token_losses(
        &self,
        model: &mut Decoder,
        pass: Pass,
        precision: StepPrecision,
    ) -> Result<Vec<Tensor>> {
        token_losses(model, self.used(), pass, precision, &self.partition)
    }
}
