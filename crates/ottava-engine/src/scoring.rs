//! Log-probabilities of prompts, and of the likeliest tokens next to drawn tokens.
//!
//! A prompt is scored in chunks. A step scores at most [`HOST_LOGITS`] logits on the host. If the step has requests without a prompt to score, it
//! scores one row for each [`SCORED_SHARE`] of them, so these requests keep most of their speed. Prompts share the rows of a step evenly, so a short
//! prompt does not wait until a long prompt is scored. On a GPU, `sample` computes the log-probabilities of the prompt's token and of up to one
//! likeliest token. In this case logits stay on the device, and the number of rows has no limit.

use crate::batching::{Drawn, Engine, Plan};
use crate::block_pool::BLOCK_SIZE;
use crate::decode::in_f32;
use crate::request::{Event, LogprobsMode, TokenLogprob};
use crate::sampler;
use crate::sequence::Sequence;
use ottava_common::error::Result;
use ottava_tensor::ops::{Adjustment, Distribution, Draw, Draws, sample};
use ottava_tensor::{Device, Tensor};
use rayon::prelude::*;

/// The maximum number of prompt logits that a step scores on the host, and that are on the host at once: 16 MiB, about 20 ms on one core.
const HOST_LOGITS: usize = 4 << 20;

/// The number of other requests per row of a prompt that a step scores.
const SCORED_SHARE: usize = 8;

/// The number that is added to a logit so that its token is the likeliest.
const FORCED: f32 = 1e30;

/// The part of a step's work that is left for prompts.
pub(super) struct PromptBudget {
    /// The number of tokens that can be computed.
    pub tokens: usize,
    /// The number of rows of logits that can be scored on the host.
    rows: usize,
    /// The number of prompts that have not received their share of the rows.
    prompts: usize,
    /// The number of the step. If rows cannot be divided evenly, each step gives the extra rows to other prompts.
    step: usize,
    is_gpu: bool,
}

impl PromptBudget {
    /// Returns the number of tokens of `sequence` that the step can compute.
    pub fn most(&self, sequence: &Sequence) -> usize {
        let new = sequence.due().min(self.tokens);
        if is_scored_on_host(sequence, self.is_gpu) { new.min(sequence.scored_ahead() + self.share()) } else { new }
    }

    /// Returns the number of rows of the next prompt.
    fn share(&self) -> usize {
        let (prompts, left) = (self.prompts.max(1), self.rows % self.prompts.max(1));
        self.rows / prompts + usize::from(self.step % prompts < left)
    }

    /// Takes `new` tokens of `sequence` from the budget.
    pub fn take(&mut self, sequence: &Sequence, new: usize) {
        self.tokens -= new;
        if is_scored_on_host(sequence, self.is_gpu) {
            self.rows -= new.saturating_sub(sequence.scored_ahead());
            self.prompts = self.prompts.saturating_sub(1);
        }
    }
}

/// Returns whether the prompt of `sequence` must still be scored with logits on the host.
fn is_scored_on_host(sequence: &Sequence, is_gpu: bool) -> bool {
    sequence.scores_prompt() && sequence.request.prompt_logprobs.is_some_and(|top| is_on_host(is_gpu, top))
}

/// Returns whether rows of logits must be on the host to find their `top` likeliest tokens.
fn is_on_host(is_gpu: bool, top: usize) -> bool {
    !is_gpu || top > 1
}

fn is_gpu(device: &Device) -> bool {
    matches!(device, Device::Cuda(_))
}

impl Sequence {
    /// Returns the number of tokens after `computed` that are already scored. A preempted request can have such tokens.
    fn scored_ahead(&self) -> usize {
        self.prompt_logprobs.len().saturating_sub(1).saturating_sub(self.computed)
    }
}

impl Engine {
    /// Returns the budget of a step that prefills up to `tokens` tokens.
    pub(super) fn prompt_budget(&mut self, tokens: usize) -> PromptBudget {
        self.step = self.step.wrapping_add(1);
        let is_gpu = is_gpu(self.model.device());
        // A request that waits for memory does not count, since scoring does not delay it.
        let free = self.pools.all() - self.pools.used();
        let places = self.options.max_batch.saturating_sub(self.running.len());
        let fits = |sequence: &&Sequence| sequence.tokens.len().div_ceil(BLOCK_SIZE) <= free;
        let entering = self.waiting.iter().filter(fits);
        let others = self.running.iter().chain(entering.clone()).filter(|sequence| !sequence.scores_prompt()).count();
        let prompts = |sequence: &&Sequence| is_scored_on_host(sequence, is_gpu);
        let prompts = self.running.iter().filter(prompts).count() + entering.filter(prompts).take(places).count();
        let rows = if others > 0 { self.host_rows().min(others.div_ceil(SCORED_SHARE)) } else { self.host_rows() };
        PromptBudget { tokens, rows, prompts, step: self.step, is_gpu }
    }

    /// Returns the maximum number of rows of logits on the host at once.
    fn host_rows(&self) -> usize {
        (HOST_LOGITS / self.model.config().vocabulary).max(1)
    }

    /// Scores the tokens of prompts that follow the computed tokens, and reports prompts that are scored.
    pub(super) fn score_prompts(&mut self, plan: &Plan, hidden: &Tensor, events: &mut Vec<Event>) -> Result<()> {
        let mut first_row = 0;
        for &(at, new) in plan {
            let sequence = &self.running[at];
            let (start, row) = (sequence.computed, first_row);
            first_row += new as i32;
            if !sequence.scores_prompt() {
                continue;
            }
            let prompt = &sequence.request.prompt;
            let top = sequence.request.prompt_logprobs.unwrap_or(0);
            let mut found: Vec<_> = sequence.prompt_logprobs.is_empty().then_some(None).into_iter().collect();
            // The row before position `p` scores the token at `p`. A preempted request has already scored some tokens.
            let known = sequence.prompt_logprobs.len().max(1);
            let positions: Vec<usize> =
                (start + 1..=start + new).filter(|p| (known..prompt.len()).contains(p)).collect();
            let on_host = is_on_host(is_gpu(self.model.device()), top);
            let most = self.logit_rows().min(if on_host { self.host_rows() } else { usize::MAX });
            for positions in positions.chunks(most) {
                let rows: Vec<i32> = positions.iter().map(|p| row + (p - start - 1) as i32).collect();
                let tokens: Vec<u32> = positions.iter().map(|&p| prompt[p]).collect();
                let logits = in_f32(&self.model.logits(hidden, &self.on_device(&rows)?)?)?;
                found.extend(score(&logits, &tokens, top)?.into_iter().map(Some));
            }
            let sequence = &mut self.running[at];
            // Reserves exactly the memory that the prompt needs.
            let left = sequence.request.prompt.len() - sequence.prompt_logprobs.len();
            sequence.prompt_logprobs.reserve_exact(left);
            sequence.prompt_logprobs.extend(found);
            if sequence.prompt_logprobs.len() == sequence.request.prompt.len() {
                sequence.is_scored = true;
                let (id, logprobs) = (sequence.id, std::mem::take(&mut sequence.prompt_logprobs));
                events.push(Event::Prompt { id, logprobs });
            }
        }
        Ok(())
    }

    /// Adds the requested log-probabilities to `accepted` tokens, each with its row of `logits` and of `draws`. `logprobs` has the log-probability of the
    /// token of each row.
    pub(super) fn with_logprobs(
        &self,
        accepted: Vec<(usize, usize, u32)>,
        logits: &Tensor,
        draws: &[Draw],
        logprobs: &[f32],
    ) -> Result<Vec<Drawn>> {
        let mode = self.options.logprobs_mode;
        let mut all = Vec::with_capacity(accepted.len());
        for accepted in accepted.chunks(self.host_rows()) {
            let tops: Vec<Option<usize>> = accepted.iter().map(|&(at, ..)| self.running[at].request.logprobs).collect();
            let on_host = accepted.iter().zip(&tops).map(|(&(_, row, _), top)| match top {
                Some(1..) => Ok(Some(logits.rows(row, row + 1)?.to_vec()?)),
                _ => Ok(None),
            });
            let on_host: Vec<Option<Vec<f32>>> = on_host.collect::<Result<_>>()?;
            let each = accepted.par_iter().zip(tops).zip(on_host);
            let scored = each.map(|((&(_, row, token), top), on_host)| match on_host {
                Some(logits) => {
                    let logits = if mode == LogprobsMode::Processed { draws[row].processed(&logits) } else { logits };
                    let scored = sampler::logprob(&logits, token, top.unwrap_or(0));
                    let logprob = if mode == LogprobsMode::Loss { logprobs[row] } else { scored.logprob };
                    Some(TokenLogprob { logprob, ..scored })
                }
                None => top.map(|_| TokenLogprob { token, logprob: logprobs[row], top: Box::default() }),
            });
            let scored: Vec<Option<TokenLogprob>> = scored.collect();
            all.extend(accepted.iter().zip(scored).map(|(&(at, _, token), logprob)| (at, token, logprob)));
        }
        Ok(all)
    }
}

/// Returns the log-probabilities of `tokens` in the first rows of F32 `logits`, and the log-probabilities of the `top` likeliest tokens of each row.
fn score(logits: &Tensor, tokens: &[u32], top: usize) -> Result<Vec<TokenLogprob>> {
    if !is_on_host(is_gpu(logits.device()), top) {
        return score_on_device(logits, tokens, top);
    }
    let [_, columns] = logits.dims("logits")?;
    let rows = logits.rows(0, tokens.len())?.to_vec::<f32>()?;
    let rows = rows.par_chunks_exact(columns).zip(tokens);
    Ok(rows.map(|(row, &token)| sampler::logprob(row, token, top)).collect())
}

/// Scores on the device with [`sample`], which returns log-probabilities of the tokens that it takes. A bias forces the given tokens. Without a bias,
/// it takes the likeliest tokens.
fn score_on_device(logits: &Tensor, tokens: &[u32], top: usize) -> Result<Vec<TokenLogprob>> {
    let [rows, columns] = logits.dims("logits")?;
    let take = |forced: &[u32]| {
        let mut draws = vec![Draw::GREEDY; rows];
        for (draw, &token) in draws.iter_mut().zip(forced) {
            draw.adjustments.push(Adjustment { token, count: None, bias: FORCED });
        }
        let mut on_device = Draws::new(logits.device(), [rows, columns], forced.len())?;
        on_device.set(&draws)?;
        let (tokens, logprobs) = sample(logits, &mut on_device, Distribution::Model)?;
        Ok::<_, ottava_common::Error>(tokens.to_vec::<i32>()?.into_iter().zip(logprobs.to_vec::<f32>()?))
    };
    let likeliest: Vec<(i32, f32)> = if top > 0 { take(&[])?.collect() } else { Vec::new() };
    let of_row = |(row, (&token, (taken, logprob))): (usize, (&u32, (i32, f32)))| {
        // A row with an element that is not finite has no token.
        let logprob = if taken < 0 { f32::NAN } else { logprob };
        let top = likeliest.get(row).filter(|(token, _)| *token >= 0).map(|&(token, logprob)| (token as u32, logprob));
        TokenLogprob { token, logprob, top: top.into_iter().collect() }
    };
    Ok(tokens.iter().zip(take(tokens)?).enumerate().map(of_row).collect())
}
