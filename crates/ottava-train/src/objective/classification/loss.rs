//! The loss of labels in a step.

use crate::step::host::{from_host, write};
use crate::step::{Loss, NextTokenLoss};
use ottava_common::error::Result;
use ottava_models::Decoder;
use ottava_recipe::param::Units;
use ottava_tensor::ops::{LabelLoss, label_loss, real_type};
use ottava_tensor::{DType, Device, Tensor};

/// What the loss of labels reads of a micro-batch: the labels `[R, L]` of its `R` rows.
pub struct LabelMicroBatch {
    how: LabelLoss,
    labels: Tensor,
}

impl LabelMicroBatch {
    /// Room on `device` for `rows` rows of `count` labels, in the type of sums of `compute`.
    pub fn new(how: LabelLoss, [rows, count]: [usize; 2], device: &Device, compute: DType) -> Result<LabelMicroBatch> {
        let labels = from_host(&vec![0.0; rows * count], device, real_type(compute))?.reshape(&[rows, count])?;
        Ok(LabelMicroBatch { how, labels })
    }

    /// Sets the labels of all rows, one row after another.
    pub fn set_labels(&mut self, labels: &[f64]) -> Result<()> {
        write(&mut self.labels, labels)
    }
}

impl Loss for LabelMicroBatch {
    /// Rows: each has one token with scores.
    fn units(&self, _: usize) -> usize {
        self.labels.shape()[0]
    }

    fn losses_and_gradient(
        &self,
        model: &mut Decoder,
        normed: &Tensor,
        targets: &Tensor,
        scale: &Tensor,
        units: &mut dyn Units,
    ) -> Result<(Tensor, Tensor)> {
        model.chunked_gradient(normed, targets.len(), units, &mut |scores, start, end| {
            Ok(label_loss(self.how, scores, &targets.rows(start, end)?, &self.labels, scale)?)
        })
    }

    /// The scores `[T, L]` of all tokens.
    fn evaluated(&self, model: &mut Decoder, normed: &Tensor, _: &Tensor, units: &mut dyn Units) -> Result<Tensor> {
        model.scores(normed, units)
    }

    fn add(&self, sums: Vec<f64>, values: &[f64]) -> Result<Vec<f64>> {
        NextTokenLoss.add(sums, values)
    }
}
