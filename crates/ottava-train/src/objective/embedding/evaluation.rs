//! The embeddings of texts, and what an evaluation makes of them.

use super::batch::{batch_of, weights_of};
use super::loss::{Contrast, ContrastMicroBatch};
use crate::evaluate::round;
use crate::step::host::values;
use crate::step::{Metrics, MicroBatch, token_losses};
use ottava_common::error::{Error, Result};
use ottava_data::{Example, ExampleRows};
use ottava_models::Decoder;
use ottava_parallel::Partition;
use ottava_recipe::mode::{Pass, StepPrecision};
use ottava_tensor::comm::Axis;

/// Held-out texts that belong together.
pub(super) struct Related<'a> {
    pub(super) examples: &'a [Example],
    pub(super) how: &'a Contrast,
    pub(super) rows: &'a ExampleRows,
    /// The number of examples of a batch.
    pub(super) per_batch: usize,
}

/// The evaluation of texts, each compared with the texts of its batch.
pub(super) struct Compared {
    pub(super) loss: f64,
    /// `accuracy`, the share of the anchors whose positive text is nearer than all other texts, and `mrr`, the mean of the reciprocal ranks of positive texts.
    pub(super) metrics: Metrics,
}

impl Related<'_> {
    /// Compares the embeddings of each batch by `model`, on all ranks of `partition`.
    ///
    /// Errors with [`Error::NonFinite`] if the loss is infinite or NaN, and with [`Error::Cancelled`] on all ranks after a request to stop.
    pub(super) fn evaluate(
        &self,
        model: &mut Decoder,
        partition: &Partition,
        precision: StepPrecision,
    ) -> Result<Compared> {
        let Related { examples, how, rows, per_batch } = *self;
        let ranks = partition.ranks();
        let ((_, world), place) = (ranks.rows(), ranks.place(Axis::Context));
        let mut sums = [0.0; 3];
        let all: Vec<&Example> = examples.iter().collect();
        for of_round in all.chunks(per_batch * world) {
            let turns: Vec<&[&Example]> = of_round.chunks(per_batch).collect();
            let of_turns = round(ranks, &turns, 1, "evaluating embeddings", |mine| {
                let batch = batch_of(mine[0], per_batch, how, rows);
                let dtype = model.recipe().compute;
                let mut loss = ContrastMicroBatch::new(*how, batch.rows, model.device(), dtype)?;
                loss.set_weights(&weights_of(&batch, how.pooling, place)?, true)?;
                let micro_batch = MicroBatch::new(&batch, model.device(), place)?.with_loss(loss);
                let all = token_losses(model, &[micro_batch], Pass::Evaluation, precision, partition)?;
                Ok(vec![values(&all[0])?])
            })?;
            for (turn, of_ranks) in turns.iter().zip(&of_turns) {
                // Ranks that divide sequences have the same embeddings.
                let found = compare(&of_ranks[0], per_batch, turn.len(), how);
                sums.iter_mut().zip(found).for_each(|(sum, found)| *sum += found);
            }
        }
        let [loss, accuracy, mrr] = sums.map(|sum| sum / examples.len() as f64);
        if !loss.is_finite() {
            return Err(Error::NonFinite(format!(
                "the loss of the embeddings is {loss}: the model's weights or activations are not finite"
            )));
        }
        let metrics =
            Metrics::new([("accuracy", accuracy), ("mrr", mrr)], format!("accuracy {accuracy:.4}  MRR {mrr:.4}"));
        Ok(Compared { loss, metrics })
    }
}

/// Returns the sums of losses, of nearest positive texts and of reciprocal ranks over the first `count` of `per_batch` examples with these `embeddings`
/// `[R, C]`, among the texts of these examples.
fn compare(embeddings: &[f64], per_batch: usize, count: usize, how: &Contrast) -> [f64; 3] {
    let channels = embeddings.len() / (per_batch * how.texts);
    let unit: Vec<Vec<f64>> = embeddings
        .chunks_exact(channels)
        .map(|row| {
            let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt().max(1e-12);
            row.iter().map(|x| x / norm).collect()
        })
        .collect();
    let others = |text: usize| (0..count).map(move |example| text * per_batch + example);
    let candidates: Vec<usize> = (1..how.texts).flat_map(others).collect();
    let mut sums = [0.0; 3];
    for anchor in 0..count {
        let cosine = |row: &usize| unit[anchor].iter().zip(&unit[*row]).map(|(a, b)| a * b).sum::<f64>();
        let scores: Vec<f64> = candidates.iter().map(|row| cosine(row) / how.temperature).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = largest + scores.iter().map(|score| (score - largest).exp()).sum::<f64>().ln();
        // Texts with the score of the positive text count as nearer, so equal embeddings of all texts do not look like success. The comparison itself
        // counts the positive text, whose rank is at least 1.
        let rank = scores.iter().filter(|score| **score >= scores[anchor]).count();
        for (sum, found) in
            sums.iter_mut().zip([lse - scores[anchor], f64::from(u8::from(rank == 1)), 1.0 / rank as f64])
        {
            *sum += found;
        }
    }
    sums
}
