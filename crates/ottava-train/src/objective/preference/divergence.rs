//! The divergence from the reference model that KTO compares with.

use super::evaluation::row_log_probs;
use super::loss::MicroBatchPreference;
use crate::step::TrainStep;
use ottava_common::error::Result;
use ottava_data::Batch;
use ottava_models::Decoder;
use ottava_recipe::mode::{Pass, StepPrecision};
use ottava_tensor::comm::Axis;

/// Sets the estimated divergence of each loaded micro-batch: the mean of policy minus reference log-probabilities over the mismatched `rows` of all
/// ranks, at least 0. `reference` holds the reference log-probabilities; `None` computes them by the model without its adapters.
pub(super) fn estimate(
    model: &mut Decoder,
    step: &mut TrainStep,
    rows: &[&Batch],
    reference: Option<Vec<Vec<f64>>>,
    precision: StepPrecision,
) -> Result<()> {
    let partition = step.partition();
    let policy = row_log_probs(model, partition, rows, Pass::Evaluation, precision)?;
    let reference = match reference {
        Some(reference) => reference,
        None => row_log_probs(model, partition, rows, Pass::Reference, precision)?,
    };
    let apart = |(policy, reference): (&Vec<f64>, &Vec<f64>)| -> f64 {
        policy.iter().zip(reference).map(|(policy, reference)| policy - reference).sum()
    };
    let mut sums: Vec<f64> = policy.iter().zip(&reference).map(apart).collect();
    // Ranks without the last stage have no losses.
    sums.resize(rows.len(), 0.0);
    let ranks = partition.ranks();
    let all = ranks.gather_lists("the divergence from the reference model", &sums)?;
    let (_, others) = ranks.rows();
    // Ranks that divide sequences have the same numbers, and are neighbours.
    let of_losses: Vec<&Vec<f64>> = ranks.of_losses(&all).step_by(ranks.place(Axis::Context).ranks).collect();
    let kl = |(micro_batch, rows): (usize, &&Batch)| {
        let sum: f64 = of_losses.iter().map(|sums| sums[micro_batch]).sum();
        (sum / (rows.rows * others) as f64).max(0.0)
    };
    let kl: Vec<f64> = rows.iter().enumerate().map(kl).collect();
    let mut kl = kl.into_iter().enumerate();
    kl.try_for_each(|(micro_batch, kl)| step.loss_mut::<MicroBatchPreference>(micro_batch).set_kl(kl))
}
