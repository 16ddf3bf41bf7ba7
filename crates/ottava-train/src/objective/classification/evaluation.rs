//! The scores of texts, and what an evaluation makes of them.

use super::labels::LabelReader;
use super::loss::LabelMicroBatch;
use super::metrics::LabelMetrics;
use crate::evaluate::round;
use crate::step::host::values;
use crate::step::{MicroBatch, token_losses};
use ottava_common::error::{Error, Result};
use ottava_data::examples::LABEL;
use ottava_data::{Example, ExampleRows};
use ottava_models::Decoder;
use ottava_parallel::Partition;
use ottava_recipe::mode::{Pass, StepPrecision};
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{IGNORE_INDEX, LabelLoss};
use serde_json::Value;

/// Texts with labels, and how a model reads them.
pub struct LabeledTexts<'a> {
    /// The texts.
    pub examples: &'a [Example],
    /// The reader of their labels.
    pub reader: &'a LabelReader,
    /// The rows of a batch.
    pub rows: &'a ExampleRows,
    /// The number of rows of a batch.
    pub per_batch: usize,
}

/// The scores of texts, and their labels.
pub struct Scored {
    /// For each text, the score of each label.
    pub scores: Vec<Vec<f64>>,
    /// For each text, a number for each label, as [`LabelReader::read`] returns them.
    pub labels: Vec<Vec<f64>>,
}

impl LabeledTexts<'_> {
    /// Returns the metrics of [`LabeledTexts::score`]. Panics without texts, which the caller must exclude.
    ///
    /// Has the errors of [`LabeledTexts::score`] and [`LabelMetrics::of`].
    pub fn evaluate(
        &self,
        model: &mut Decoder,
        partition: &Partition,
        precision: StepPrecision,
    ) -> Result<LabelMetrics> {
        let Scored { scores, labels } = self.score(model, partition, precision)?;
        LabelMetrics::of(self.reader.problem, &scores, &labels)
    }

    /// Returns the scores of the texts by `model`, on all ranks of `partition`.
    ///
    /// Errors with [`Error::Data`] if a text has no label that the classifier knows, and with the errors of [`scores_of`].
    pub fn score(&self, model: &mut Decoder, partition: &Partition, precision: StepPrecision) -> Result<Scored> {
        let LabeledTexts { examples, reader, rows, per_batch } = *self;
        let label = |(number, example): (usize, &Example)| {
            let label = example.columns.get(LABEL).unwrap_or(&Value::Null);
            reader.read(label).map_err(|reason| Error::Data(format!("record {}: {reason}", number + 1)))
        };
        let labels = examples.iter().enumerate().map(label).collect::<Result<Vec<_>>>()?;
        let texts: Vec<&Vec<u32>> = examples.iter().map(|example| &example.texts[0]).collect();
        Ok(Scored { scores: scores_of(model, partition, &texts, rows, per_batch, precision)?, labels })
    }
}

/// Returns the scores of the labels of each of `texts` by the classifier `model`, on all ranks of `partition`. Each rank computes every one of its turns
/// of a batch, and all batches have `per_batch` rows.
///
/// Errors with [`Error::Cancelled`] on all ranks after a request to any of them to stop.
pub fn scores_of(
    model: &mut Decoder,
    partition: &Partition,
    texts: &[&Vec<u32>],
    rows: &ExampleRows,
    per_batch: usize,
    precision: StepPrecision,
) -> Result<Vec<Vec<f64>>> {
    let (ranks, labels) = (partition.ranks(), model.config().head.labels.unwrap_or(1));
    let ((_, world), place) = (ranks.rows(), ranks.place(Axis::Context));
    let mut found = Vec::with_capacity(texts.len());
    for of_round in texts.chunks(per_batch * world) {
        let turns: Vec<&[&Vec<u32>]> = of_round.chunks(per_batch).collect();
        let of_turns = round(ranks, &turns, 1, "evaluating labels", |mine| {
            let batch = rows.batch(mine[0].iter().copied(), per_batch);
            let dtype = model.recipe().compute;
            let loss = LabelMicroBatch::new(LabelLoss::SingleLabel, [per_batch, labels], model.device(), dtype)?;
            let micro_batch = MicroBatch::new(&batch, model.device(), place)?.with_loss(loss);
            let targets = micro_batch.sequences.own(&batch.targets);
            let all = token_losses(model, &[micro_batch], Pass::Evaluation, precision, partition)?;
            // Ranks without the last stage have no scores.
            all.first()
                .map_or(Ok(vec![Vec::new()]), |scores| Ok(vec![at_targets(&values(scores)?, &targets, per_batch)]))
        })?;
        for (turn, of_ranks) in turns.iter().zip(&of_turns) {
            // Each row has its target on one of the ranks that divide its tokens.
            let sum = |at: usize| of_ranks.iter().map(|of_rank| of_rank[at]).sum::<f64>();
            let row = |row: usize| (row * labels..(row + 1) * labels).map(sum).collect::<Vec<f64>>();
            found.extend((0..turn.len()).map(row));
        }
    }
    Ok(found)
}

/// Returns the scores of each of `rows` rows, at the token whose target is the number of the row; zeros for rows without a target.
fn at_targets(scores: &[f64], targets: &[i32], rows: usize) -> Vec<f64> {
    let labels = scores.len() / targets.len();
    let mut of_rows = vec![0.0; rows * labels];
    for (token, &target) in targets.iter().enumerate().filter(|(_, target)| **target != IGNORE_INDEX) {
        of_rows[target as usize * labels..][..labels].copy_from_slice(&scores[token * labels..][..labels]);
    }
    of_rows
}
