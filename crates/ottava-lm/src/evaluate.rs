//! Loss on held-out text.

use crate::data::Batch;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::mode::StepPrecision;
use crate::models::Decoder;
use crate::parallel::{Partition, Shared};
use crate::step::{MicroBatch, Program, ProgramInputs, total};
use ottava_tensor::ops::IGNORE_INDEX;
use serde::Serialize;
use std::sync::atomic::Ordering;

/// The loss of a model on a text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// Mean negative log-likelihood per token, in nats.
    pub loss: f64,
    /// `e^loss`.
    pub perplexity: f64,
    /// Bits per byte of UTF-8 text: comparable between tokenizers.
    pub bits_per_byte: f64,
    /// Tokens predicted.
    pub tokens: u64,
}

/// Evaluates in `precision` on all `batches`, which together are `bytes` of text, and calls `progress` after each round with the number of
/// tokens predicted so far. All ranks of `partition` call it with the same batches: each evaluates every one of its turns, the sums are added in the
/// order of the batches, and all get the same result, which does not depend on the number of ranks.
///
/// Errors with [`Error::NonFinite`] when the loss is infinite or NaN, and with [`Error::Cancelled`] on all ranks after a request to any of
/// them to stop.
pub fn evaluate(
    model: &mut Decoder,
    batches: impl IntoIterator<Item = Result<Batch>>,
    bytes: u64,
    precision: StepPrecision,
    partition: &Partition,
    progress: &mut dyn FnMut(u64),
) -> Result<Evaluation> {
    let (program, ranks) = (Program::evaluation(), partition.ranks());
    let rounds = ranks.sharing(Shared::Tokens);
    let (mut sum, mut tokens) = (0.0, 0.0);
    let mut batches = batches.into_iter();
    loop {
        let turns = batches.by_ref().take(rounds.size()).collect::<Result<Vec<_>>>()?;
        // Ranks gather weights together, so one without a turn repeats that of the first, and counts nothing.
        let Some(batch) = turns.get(rounds.rank()).or(turns.first()) else { break };
        let micro_batches = &[MicroBatch::new(batch, model.device())?];
        let inputs = ProgramInputs { micro_batches, loss_scale: None, precision, partition };
        let losses = program.run(model, &inputs, None)?;
        ranks.compare_gpu_calls("an evaluation")?;
        let loss = losses.iter().map(total).sum::<Result<f64>>()?;
        let targets = batch.targets.iter().filter(|&&target| target != IGNORE_INDEX).count();
        let stop = interrupt::flag().load(Ordering::Relaxed);
        let all = ranks.gather("losses of the evaluation", [f64::from(stop), loss, targets as f64])?;
        if all.iter().any(|[stop, ..]| *stop != 0.0) {
            return Err(interrupt::cancelled("evaluating"));
        }
        for [_, loss, targets] in ranks.among(Shared::Tokens, &all).take(turns.len()) {
            (sum, tokens) = (sum + loss, tokens + targets);
        }
        progress(tokens as u64);
    }
    let loss = sum / f64::max(tokens, 1.0);
    if !loss.is_finite() {
        return Err(Error::NonFinite(format!(
            "the loss of the text is {loss}: the model's weights or activations are not finite"
        )));
    }
    let bits_per_byte = sum / std::f64::consts::LN_2 / bytes.max(1) as f64;
    Ok(Evaluation { loss, perplexity: loss.exp(), bits_per_byte, tokens: tokens as u64 })
}
