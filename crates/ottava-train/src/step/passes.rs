//! Computes the actions of a program, for one pass or for two passes in different precisions side by side.

use super::micro_batch::{LossScale, MicroBatch};
use ottava_common::error::{Error, Result};
use ottava_models::{BackwardPass, ComparedSaved, Decoder, StageSaved};
use ottava_parallel::Exchange;
use ottava_recipe::context::DeferredWgrads;
use ottava_recipe::mode::{Mode, Pass, StepPrecision};
use ottava_tensor::Tensor;

/// `N` passes that a program runs side by side, each with its own activations and gradients.
pub(super) trait Passes<const N: usize> {
    /// The activations that forward of a stage saves for its backward.
    type Saved;

    /// Runs forward of a stage, from the token ids if `before` is `None`. Saves no activations if no backward follows.
    fn forward(
        &self,
        model: &mut Decoder,
        stage: usize,
        before: Option<[Tensor; N]>,
        micro_batch: &MicroBatch,
        exchange: &mut Exchange,
    ) -> Result<([Tensor; N], Option<Self::Saved>)>;

    /// Computes the losses from the result of the last stage. If backward follows, also computes the gradient from which it starts.
    fn losses(
        &self,
        model: &mut Decoder,
        normed: [Tensor; N],
        micro_batch: &MicroBatch,
        exchange: &mut Exchange,
    ) -> Result<([Tensor; N], Option<[Tensor; N]>)>;

    /// Runs backward of a stage, and returns the gradient by its input if the stage has an input.
    fn backward(
        &self,
        model: &mut Decoder,
        stage: usize,
        before: ([Tensor; N], Self::Saved),
        micro_batch: &MicroBatch,
        exchange: &mut Exchange,
    ) -> Result<Option<[Tensor; N]>>;

    /// Runs backward of a stage, but defers the products of the gradients of weights and returns them.
    fn dgrads(
        &self,
        model: &mut Decoder,
        stage: usize,
        before: ([Tensor; N], Self::Saved),
        micro_batch: &MicroBatch,
        exchange: &mut Exchange,
    ) -> Result<(Option<[Tensor; N]>, DeferredWgrads)>;
}

/// The reason why backward has a loss scale.
const CHECKED: &str = "the program was checked";

/// The single pass of a program.
pub(super) struct Single<'a> {
    pub(super) pass: Pass,
    pub(super) precision: StepPrecision,
    /// The factors of losses, if backward follows.
    pub(super) loss_scale: Option<&'a LossScale>,
}

impl<'a> Single<'a> {
    fn backward_pass<'b>(&'b self, micro_batch: &'b MicroBatch) -> BackwardPass<'b> {
        let layer_loss_scale = &self.loss_scale.expect(CHECKED).per_micro_batch;
        BackwardPass { sequences: &micro_batch.sequences, precision: self.precision, layer_loss_scale }
    }
}

impl Passes<1> for Single<'_> {
    type Saved = StageSaved;

    fn forward(
        &self,
        model: &mut Decoder,
        stage: usize,
        before: Option<[Tensor; 1]>,
        micro_batch: &MicroBatch,
        exchange: &mut Exchange,
    ) -> Result<([Tensor; 1], Option<StageSaved>)> {
        let MicroBatch { inputs, sequences, .. } = micro_batch;
        let x = before.as_ref().map_or(inputs, |[x]| x);
        match self.pass {
            Pass::Training => {
                let (y, saved) = model.forward(stage, x, sequences, self.precision, exchange)?;
                Ok(([y], Some(saved)))
            }
            pass => {
                let mode = Mode { pass, precision: self.precision };
                Ok(([model.forward_only(stage, x, sequences, mode, exchange)?], None))
            }
        }
    }

    fn losses(
        &self,
        model: &mut Decoder,
        [normed]: [Tensor; 1],
        micro_batch: &MicroBatch,
        exchange: &mut Exchange,
    ) -> Result<([Tensor; 1], Option<[Tensor; 1]>)> {
        let MicroBatch { targets, loss, .. } = micro_batch;
        if self.pass != Pass::Training {
            return Ok(([loss.evaluated(model, &normed, targets, exchange)?], None));
        }
        let scale = &self.loss_scale.expect(CHECKED).per_unit;
        let (losses, dnormed) = loss.losses_and_gradient(model, &normed, targets, scale, exchange)?;
        Ok(([losses], Some([dnormed])))
    }

    fn backward(
        &self,
        model: &mut Decoder,
        stage: usize,
        ([dy], saved): ([Tensor; 1], StageSaved),
        micro_batch: &MicroBatch,
        exchange: &mut Exchange,
    ) -> Result<Option<[Tensor; 1]>> {
        Ok(model.backward(stage, dy, saved, self.backward_pass(micro_batch), exchange)?.map(|dx| [dx]))
    }

    fn dgrads(
        &self,
        model: &mut Decoder,
        stage: usize,
        ([dy], saved): ([Tensor; 1], StageSaved),
        micro_batch: &MicroBatch,
        exchange: &mut Exchange,
    ) -> Result<(Option<[Tensor; 1]>, DeferredWgrads)> {
        let (dx, deferred) = model.dgrads(stage, dy, saved, self.backward_pass(micro_batch), exchange)?;
        Ok((dx.map(|dx| [dx]), deferred))
    }
}

/// Two passes, each with forward and backward, in the two precisions of [`Decoder::begin_comparison`].
pub(super) struct SideBySide<'a> {
    pub(super) loss_scale: &'a LossScale,
}

impl Passes<2> for SideBySide<'_> {
    type Saved = ComparedSaved;

    fn forward(
        &self,
        model: &mut Decoder,
        stage: usize,
        before: Option<[Tensor; 2]>,
        micro_batch: &MicroBatch,
        exchange: &mut Exchange,
    ) -> Result<([Tensor; 2], Option<ComparedSaved>)> {
        let MicroBatch { inputs, sequences, .. } = micro_batch;
        let x = before.unwrap_or_else(|| [inputs.clone(), inputs.clone()]);
        let (y, saved) = model.compare_forward(stage, &x, sequences, exchange)?;
        Ok((y, Some(saved)))
    }

    fn losses(
        &self,
        model: &mut Decoder,
        normed: [Tensor; 2],
        micro_batch: &MicroBatch,
        exchange: &mut Exchange,
    ) -> Result<([Tensor; 2], Option<[Tensor; 2]>)> {
        let (losses, dnormed) =
            model.compare_losses(&normed, &micro_batch.targets, &self.loss_scale.per_unit, exchange)?;
        Ok((losses, Some(dnormed)))
    }

    fn backward(
        &self,
        model: &mut Decoder,
        stage: usize,
        (dy, saved): ([Tensor; 2], ComparedSaved),
        micro_batch: &MicroBatch,
        exchange: &mut Exchange,
    ) -> Result<Option<[Tensor; 2]>> {
        let (sequences, scale) = (&micro_batch.sequences, &self.loss_scale.per_micro_batch);
        Ok(Some(model.compare_backward(stage, (dy, saved), sequences, scale, exchange)?))
    }

    /// The gradients of a block are compared and dropped before the next block runs, so no product can be deferred.
    fn dgrads(
        &self,
        _: &mut Decoder,
        _: usize,
        _: ([Tensor; 2], ComparedSaved),
        _: &MicroBatch,
        _: &mut Exchange,
    ) -> Result<(Option<[Tensor; 2]>, DeferredWgrads)> {
        Err(Error::Program("a comparison computes dgrad and wgrad of a stage in one action".into()))
    }
}
