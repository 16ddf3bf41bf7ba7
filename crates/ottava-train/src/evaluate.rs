//! The loss on held-out text, and the rounds in which ranks evaluate.

use crate::step::{MicroBatch, token_losses, total};
use ottava_common::error::{Error, Result};
use ottava_common::interrupt;
use ottava_data::Batch;
use ottava_models::Decoder;
use ottava_parallel::{Partition, Ranks};
use ottava_recipe::context::Sequences;
use ottava_recipe::mode::{Pass, StepPrecision};
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::IGNORE_INDEX;
use ottava_tensor::{QuantizedTensor, Tensor};
use serde::Serialize;
use std::borrow::Cow;
use std::sync::atomic::Ordering;

/// The loss of a model on a text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TextLoss {
    /// The mean negative log-likelihood per token, in nats. If the model is trained with label smoothing, the loss with label smoothing.
    pub loss: f64,
    /// The measures that follow from the loss if the loss is a likelihood; `None` with label smoothing.
    #[serde(flatten)]
    pub likelihood: Option<Likelihood>,
    /// The number of predicted tokens.
    pub tokens: u64,
}

/// The likelihood of a text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Likelihood {
    /// `e^loss`.
    pub perplexity: f64,
    /// Bits per byte of UTF-8 text, comparable between tokenizers.
    pub bits_per_byte: f64,
}

impl TextLoss {
    /// Returns the loss over several texts, each given with its number of bytes.
    pub fn of_all(texts: &[(TextLoss, u64)]) -> TextLoss {
        let tokens: u64 = texts.iter().map(|(text, _)| text.tokens).sum();
        let bytes: u64 = texts.iter().map(|(_, bytes)| bytes).sum();
        let sum = texts.iter().map(|(text, _)| text.loss * text.tokens as f64).sum();
        let is_likelihood = texts.iter().all(|(text, _)| text.likelihood.is_some());
        TextLoss::of_sum(sum, tokens, bytes, is_likelihood)
    }

    /// Returns the loss of a text of `bytes` bytes. `sum` is the sum of the losses of its tokens.
    fn of_sum(sum: f64, tokens: u64, bytes: u64, is_likelihood: bool) -> TextLoss {
        let loss = sum / f64::max(tokens as f64, 1.0);
        let bits_per_byte = sum / std::f64::consts::LN_2 / bytes.max(1) as f64;
        let likelihood = is_likelihood.then(|| Likelihood { perplexity: loss.exp(), bits_per_byte });
        TextLoss { loss, likelihood, tokens }
    }
}

/// Evaluates all `batches` in `precision`. The batches are `bytes` bytes of text. After each round, calls `progress` with the number of tokens
/// predicted so far.
///
/// All ranks of `partition` call it with the same batches, and get the same result. Since losses are summed in the order of the batches, the result
/// does not depend on the number of ranks.
///
/// Errors with [`Error::NonFinite`] if the loss is infinite or NaN. Errors with [`Error::Cancelled`] on all ranks after a request to any of them to
/// stop.
pub fn evaluate(
    model: &mut Decoder,
    batches: impl IntoIterator<Item = Result<Batch>>,
    bytes: u64,
    precision: StepPrecision,
    partition: &Partition,
    progress: &mut dyn FnMut(u64),
) -> Result<TextLoss> {
    // The sum of the losses and the number of targets of each batch.
    let numbers = |losses: Option<&Tensor>, sequences: &Sequences, batch: &Batch| {
        let own = sequences.own(&batch.targets);
        let targets = own.iter().filter(|&&target| target != IGNORE_INDEX).count() as f64;
        // Ranks without the last stage compute no losses.
        Ok(vec![losses.map(total).transpose()?.unwrap_or(0.0), targets])
    };
    let (mut sum, mut tokens) = (0.0, 0.0);
    for_each_round(model, batches, precision, partition, &numbers, &mut |of_turns| {
        for of_ranks in of_turns {
            let add = |(loss, targets), told: &Vec<f64>| (loss + told[0], targets + told[1]);
            let (loss, targets) = of_ranks.iter().fold((0.0, 0.0), add);
            (sum, tokens) = (sum + loss, tokens + targets);
        }
        progress(tokens as u64);
    })?;
    let is_likelihood = model.config().head.label_smoothing == 0.0;
    let evaluation = TextLoss::of_sum(sum, tokens as u64, bytes, is_likelihood);
    match evaluation.loss.is_finite() {
        true => Ok(evaluation),
        false => Err(Error::NonFinite(format!(
            "the loss of the text is {}: the model's weights or activations are not finite",
            evaluation.loss
        ))),
    }
}

/// Makes the numbers of a batch from the losses of this rank's tokens, which ranks without the last stage of the model do not have.
pub type NumbersOfBatch<'f> = dyn Fn(Option<&Tensor>, &Sequences, &Batch) -> Result<Vec<f64>> + 'f;

/// The numbers of a batch: one list from each rank that divides the tokens of the batch.
pub type OfTurn = Vec<Vec<f64>>;

/// Computes the losses of all `batches` in `precision`, in rounds. `numbers` makes equally many numbers of each batch. After each round, `add` receives
/// the numbers of its batches, in their order.
///
/// All ranks of `partition` call it with the same batches. In each round, a rank evaluates one batch for each rank of its pipeline.
///
/// Errors with [`Error::Cancelled`] on all ranks after a request to any of them to stop.
pub fn for_each_round(
    model: &mut Decoder,
    batches: impl IntoIterator<Item = Result<Batch>>,
    precision: StepPrecision,
    partition: &Partition,
    numbers: &NumbersOfBatch,
    add: &mut dyn FnMut(&[OfTurn]),
) -> Result<()> {
    let ranks = partition.ranks();
    let ((_, rounds), in_flight) = (ranks.rows(), ranks.pipeline().size());
    // Tensor ranks gather the codes of their tokens, and the products need a multiple of `PAD` tokens per rank.
    let (tensor, sequence) = (ranks.place(Axis::Tensor), ranks.place(Axis::Context));
    let multiple = if tensor.is_divided() { tensor.ranks * sequence.ranks * QuantizedTensor::PAD } else { 1 };
    let mut batches = batches.into_iter().peekable();
    loop {
        let mut turns: Vec<Batch> = Vec::new();
        // Ranks that divide experts exchange equal numbers of tokens, so all batches of a round have the same shape.
        let divides_experts = ranks.place(Axis::Expert).is_divided();
        let belongs = |first: Option<&Batch>, batch: &Batch| {
            !divides_experts || first.is_none_or(|first| [first.rows, first.seq_len] == [batch.rows, batch.seq_len])
        };
        while turns.len() < rounds * in_flight
            && let Some(batch) =
                batches.next_if(|batch| batch.as_ref().map_or(true, |batch| belongs(turns.first(), batch)))
        {
            turns.push(batch?);
        }
        if turns.is_empty() {
            return Ok(());
        }
        let of_turns = round(ranks, &turns, in_flight, "evaluating", |mine| {
            let mine: Vec<_> = mine.iter().map(|batch| batch.padded_to(multiple)).collect();
            let micro_batches = mine.iter().map(|batch| MicroBatch::new(batch, model.device(), sequence));
            let micro_batches = micro_batches.collect::<Result<Vec<_>>>()?;
            let losses = token_losses(model, &micro_batches, Pass::Evaluation, precision, partition)?;
            let of_batch = |(number, batch): (usize, &Cow<Batch>)| {
                numbers(losses.get(number), &micro_batches[number].sequences, batch)
            };
            mine.iter().enumerate().map(of_batch).collect()
        })?;
        add(&of_turns);
    }
}

/// Runs one round of an evaluation, and returns on all ranks the numbers of each turn: one list from each rank that divides the tokens of the turn.
///
/// Each rank computes `in_flight` of the `turns`: the turns `rank`, `rank + world`, and so on. A rank with too few turns repeats the first turn.
/// `compute` must return equally many numbers for each of its turns. Ranks without the last stage of the model may return fewer numbers.
///
/// Errors with [`Error::Cancelled`] on all ranks after a request to any of them to stop. The message says what the ranks were `doing`.
pub fn round<'t, T>(
    ranks: &Ranks,
    turns: &'t [T],
    in_flight: usize,
    doing: &str,
    compute: impl FnOnce(&[&'t T]) -> Result<Vec<Vec<f64>>>,
) -> Result<Vec<Vec<Vec<f64>>>> {
    let ((rank, world), sharing) = (ranks.rows(), ranks.place(Axis::Context).ranks);
    // Ranks gather weights and send activations together, so a rank without a turn repeats the first turn. Its numbers are not counted.
    let mine = turns.iter().skip(rank).step_by(world).chain(std::iter::repeat(&turns[0]));
    let mine: Vec<&T> = mine.take(in_flight).collect();
    let numbers = compute(&mine)?;
    let stop = f64::from(interrupt::flag().load(Ordering::Relaxed));
    let told = [vec![stop], numbers.concat()].concat();
    let all = ranks.gather_lists("losses of the evaluation", &told)?;
    if all.iter().any(|told| told[0] != 0.0) {
        return Err(interrupt::cancelled(doing));
    }
    let of_turn = |turn: usize| {
        // The ranks that divide the tokens of one turn are neighbours.
        let of_turn = ranks.of_losses(&all).skip(turn % world * sharing).take(sharing);
        let part = |told: &Vec<f64>| {
            let each = (told.len() - 1) / in_flight;
            told[1..][turn / world * each..][..each].to_vec()
        };
        of_turn.map(part).collect()
    };
    Ok((0..turns.len()).map(of_turn).collect())
}
