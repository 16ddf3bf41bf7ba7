//! Loss on held-out text.

use crate::data::Batch;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::mode::StepPrecision;
use crate::models::Decoder;
use crate::parallel::{Partition, Schedule, ScheduleKind};
use crate::step::{MicroBatch, PreferenceSums, Program, ProgramInputs, total};
use ottava_tensor::QuantizedTensor;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::IGNORE_INDEX;
use serde::Serialize;
use std::sync::atomic::Ordering;

/// The loss of a model on a text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// Mean negative log-likelihood per token, in nats; of a model that is trained with label smoothing, the loss with it.
    pub loss: f64,
    /// `e^loss`; NaN with label smoothing.
    pub perplexity: f64,
    /// Bits per byte of UTF-8 text: comparable between tokenizers. NaN with label smoothing.
    pub bits_per_byte: f64,
    /// Tokens predicted.
    pub tokens: u64,
    /// The sums over sequences, if the loss is that of preferences; perplexity and bits per byte are NaN then.
    #[serde(skip)]
    pub preference: Option<PreferenceSums>,
}

impl Evaluation {
    /// The evaluation of several texts together, each with its bytes.
    pub fn of_all(texts: &[(Evaluation, u64)]) -> Evaluation {
        let tokens: u64 = texts.iter().map(|(text, _)| text.tokens).sum();
        let bytes: u64 = texts.iter().map(|(_, bytes)| bytes).sum();
        let sum = texts.iter().map(|(text, _)| text.loss * text.tokens as f64).sum();
        let is_likelihood = texts.iter().all(|(text, _)| !text.perplexity.is_nan());
        Evaluation::of_sum(sum, tokens, bytes).only_loss_unless(is_likelihood)
    }

    /// Without perplexity and bits per byte, unless the loss is the likelihood of the text.
    fn only_loss_unless(self, is_likelihood: bool) -> Evaluation {
        match is_likelihood {
            true => self,
            false => Evaluation { perplexity: f64::NAN, bits_per_byte: f64::NAN, ..self },
        }
    }

    /// The evaluation of a text of `bytes` with this `sum` of the losses of its tokens.
    fn of_sum(sum: f64, tokens: u64, bytes: u64) -> Evaluation {
        let loss = sum / f64::max(tokens as f64, 1.0);
        let bits_per_byte = sum / std::f64::consts::LN_2 / bytes.max(1) as f64;
        Evaluation { loss, perplexity: loss.exp(), bits_per_byte, tokens, preference: None }
    }
}

/// Evaluates in `precision` on all `batches`, which together are `bytes` of text, and calls `progress` after each round with the number of
/// tokens predicted so far. All ranks of `partition` call it with the same batches: each evaluates every one of its turns, as many batches
/// in flight as its pipeline has ranks, the sums are added in the order of the batches, and all get the same result, which does not depend
/// on the number of ranks.
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
    let ranks = partition.ranks();
    let ((rank, rounds), pipeline) = (ranks.rows(), ranks.pipeline());
    let (kind, in_flight) = (ScheduleKind::default(), pipeline.size());
    let schedule = Schedule { kind, ranks: in_flight, stages: model.stages(), micro_batches: in_flight };
    let program = Program::evaluation_of(&schedule, pipeline.rank());
    // Ranks that divide tokens gather codes of as many as products need.
    let (tensor, sequence) = (ranks.place(Axis::Tensor), ranks.place(Axis::Context));
    let multiple = if tensor.is_divided() { tensor.ranks * sequence.ranks * QuantizedTensor::PAD } else { 1 };
    let (mut sum, mut tokens) = (0.0, 0.0);
    let mut batches = batches.into_iter().peekable();
    loop {
        let mut turns: Vec<Batch> = Vec::new();
        // Ranks that divide experts exchange equal numbers of tokens, so the batches of a round have one shape.
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
        let Some(first) = turns.first() else { break };
        // Ranks gather weights and send activations together, so one without a turn repeats the first one, and counts nothing.
        let mine = turns.iter().skip(rank).step_by(rounds).chain(std::iter::repeat(first));
        let mine: Vec<_> = mine.take(in_flight).map(|batch| batch.padded_to(multiple)).collect();
        let micro_batches =
            &mine.iter().map(|batch| MicroBatch::new(batch, model.device(), sequence)).collect::<Result<Vec<_>>>()?;
        let inputs = ProgramInputs { micro_batches, loss_scale: None, precision, partition };
        let losses = program.run(model, &inputs, None)?;
        ranks.compare_gpu_calls("an evaluation")?;
        let targets = |number: usize, batch: &Batch| {
            let own = micro_batches[number].sequences.own(&batch.targets);
            own.iter().filter(|&&target| target != IGNORE_INDEX).count() as f64
        };
        let stop = interrupt::flag().load(Ordering::Relaxed);
        // By micro-batch; ranks without the last stage compute no losses.
        let mut told = vec![f64::from(stop)];
        for (number, batch) in mine.iter().enumerate() {
            told.extend([losses.get(number).map(total).transpose()?.unwrap_or(0.0), targets(number, batch)]);
        }
        let all = ranks.gather_lists("losses of the evaluation", &told)?;
        if all.iter().any(|told| told[0] != 0.0) {
            return Err(interrupt::cancelled("evaluating"));
        }
        let of_turn = |turn: usize| {
            // Ranks that divide the tokens of one batch are neighbours.
            let of_turn = ranks.of_losses(&all).skip(turn % rounds * sequence.ranks).take(sequence.ranks);
            let at = 1 + 2 * (turn / rounds);
            of_turn.fold((0.0, 0.0), |(loss, targets), told| (loss + told[at], targets + told[at + 1]))
        };
        for (loss, targets) in (0..turns.len()).map(of_turn) {
            (sum, tokens) = (sum + loss, tokens + targets);
        }
        progress(tokens as u64);
    }
    let is_likelihood = model.config().label_smoothing == 0.0;
    let evaluation = Evaluation::of_sum(sum, tokens as u64, bytes).only_loss_unless(is_likelihood);
    match evaluation.loss.is_finite() {
        true => Ok(evaluation),
        false => Err(Error::NonFinite(format!(
            "the loss of the text is {}: the model's weights or activations are not finite",
            evaluation.loss
        ))),
    }
}
