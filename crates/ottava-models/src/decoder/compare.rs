//! Passes of a decoder that compare two precisions: the recipe and the compute type, or the same precision twice.

use super::{Decoder, no_head};
use crate::stage::{ComparedSaved, Stage};
use ottava_common::error::Result;
use ottava_recipe::context::{Context, Sequences};
use ottava_recipe::mode::{Mode, Pass, StepPrecision};
use ottava_recipe::param::Units;
use ottava_recipe::scaling::{Compared, Observer};
use ottava_tensor::Tensor;

impl Decoder {
    /// Starts a comparison of these precisions, which lasts until [`Decoder::end_comparison`]. Tensors of the first pass are copied to `observer`.
    pub fn begin_comparison(&mut self, precisions: [StepPrecision; 2], observer: Option<Observer>) {
        self.scaling.begin_comparison(&self.device, precisions, observer);
    }

    /// Returns the comparisons of this process's stages since [`Decoder::begin_comparison`] and the observed tensors. Waits for the device.
    pub fn end_comparison(&mut self) -> Result<Compared> {
        self.scaling.end_comparison()
    }

    /// Runs [`Stage::compare_forward`] of a micro-batch on stage number `stage`.
    pub fn compare_forward(
        &mut self,
        stage: usize,
        x: &[Tensor; 2],
        sequences: &Sequences,
        units: &mut dyn Units,
    ) -> Result<([Tensor; 2], ComparedSaved)> {
        let (stage, mut context) = self.comparing(stage, sequences);
        stage.compare_forward(x, &mut context, units)
    }

    /// Returns the losses of `targets` in both precisions, and their gradients, from the results of [`Decoder::compare_forward`].
    ///
    /// Errors for a stage without the head.
    pub fn compare_losses(
        &mut self,
        normed: &[Tensor; 2],
        targets: &Tensor,
        scale: &Tensor,
        units: &mut dyn Units,
    ) -> Result<([Tensor; 2], [Tensor; 2])> {
        let stage = self.stages.last_mut().expect("a process has a stage");
        let ranks = &*self.ranks;
        let mut each = |normed| stage.losses_and_gradient(normed, targets, scale, ranks, units)?.ok_or_else(no_head);
        let [by_recipe, high] = [each(&normed[0])?, each(&normed[1])?];
        Ok(([by_recipe.0, high.0], [by_recipe.1, high.1]))
    }

    /// Runs [`Stage::compare_backward`] of a micro-batch on stage number `stage`. `layer_loss_scale` is described at
    /// [`BackwardPass`](crate::BackwardPass).
    pub fn compare_backward(
        &mut self,
        stage: usize,
        (dy, saved): ([Tensor; 2], ComparedSaved),
        sequences: &Sequences,
        layer_loss_scale: &Tensor,
        units: &mut dyn Units,
    ) -> Result<[Tensor; 2]> {
        let (stage, context) = self.comparing(stage, sequences);
        let mut context = Context { layer_loss_scale: Some(layer_loss_scale), ..context };
        stage.compare_backward(dy, saved, &mut context, units)
    }

    fn comparing<'a>(&'a mut self, stage: usize, sequences: &'a Sequences) -> (&'a mut Stage, Context<'a>) {
        let casts = self.scaling.casts(Mode { pass: Pass::Comparison, precision: StepPrecision::Recipe });
        let (recompute, saved_activations) = (self.recompute, self.saved_activations);
        let context = Context { recompute, saved_activations, ..Context::new(casts, &*self.ranks, sequences) };
        (&mut self.stages[stage], context)
    }
}
