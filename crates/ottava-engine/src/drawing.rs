//! Draws tokens from logits, and verifies proposed tokens: a proposed token is accepted if it equals the drawn token.

use crate::batching::{Drawn, Engine, Plan};
use crate::decode::{Scored, in_f32, not_finite};
use crate::draft::Wanted;
use crate::proposer::{MOST_TOKENS, Proposer};
use crate::request::LogprobsMode;
use crate::update::Part;
use ottava_common::error::{Error, Result};
use ottava_tensor::ops::{CrossEntropy, Distribution, Draw, Draws, IGNORE_INDEX, cross_entropy, sample};
use ottava_tensor::{Device, Tensor};

/// The rows of logits of a request: the row after its last token, and the rows after each proposed token.
pub(super) struct Drawing {
    /// The number of the request in `running`.
    pub at: usize,
    /// The first row.
    pub row: usize,
    /// The number of rows.
    pub count: usize,
}

/// Divides `drawing` into groups of at most `most` rows. A request with more rows is a group of its own.
pub(super) fn by_rows(drawing: Vec<Drawing>, most: usize) -> Vec<Vec<Drawing>> {
    let (mut groups, mut rows): (Vec<Vec<Drawing>>, usize) = (Vec::new(), most);
    for of in drawing {
        if groups.is_empty() || rows + of.count > most {
            groups.push(Vec::new());
            rows = 0;
        }
        rows += of.count;
        groups.last_mut().expect("there is one").push(of);
    }
    groups
}

/// Returns the log-probabilities F32 `[R]` of I32 `tokens` `[R]` in rows of `logits` `[R, V]`, as their negated losses. A row that is not finite has
/// no token.
fn of_loss(logits: &Tensor, tokens: &Tensor) -> Result<Tensor> {
    let [rows, columns] = logits.dims("logits")?;
    let targets: Vec<i32> =
        tokens.to_vec::<i32>()?.into_iter().map(|token| if token < 0 { IGNORE_INDEX } else { token }).collect();
    let targets = Tensor::from_slice(logits.device(), &[rows], &targets)?;
    let losses = in_f32(&cross_entropy(logits, columns, &targets, CrossEntropy::default())?)?;
    let logprobs: Vec<f32> = losses.to_vec::<f32>()?.into_iter().map(|loss| -loss).collect();
    Ok(Tensor::from_slice(&Device::Cpu, &[rows], &logprobs)?)
}

impl Engine {
    /// Lets `proposer` propose tokens of requests, which steps verify. The completions do not change, since a proposed token is accepted only if it
    /// is also drawn.
    ///
    /// Errors with [`Error::Config`] for sizes that cannot be used, and for a model with recurrent states if the engine has no saved states.
    pub fn speculate(&mut self, proposer: Proposer) -> Result<()> {
        proposer.check()?;
        if self.pools.has_states() && self.pools.saved.all() == 0 {
            return Err(Error::Config(
                "the model has recurrent layers, and the engine has no place to save their states before proposed tokens: give the caches more memory, \
                 compute fewer requests at once, or start without speculation"
                    .into(),
            ));
        }
        self.proposer = Some(proposer);
        Ok(())
    }

    /// Proposes tokens for requests that draw a token in this step, up to `most` tokens for all requests together. Tokens are dropped without blocks for
    /// their keys and values, or without a place for the recurrent states before them. Returns the number of proposed tokens.
    pub(super) fn propose(&mut self, most: usize) -> Result<usize> {
        let Some(proposer) = &mut self.proposer else { return Ok(0) };
        let (mut room, mut wanted) = (most, Vec::new());
        for sequence in &mut self.running {
            sequence.proposed.clear();
        }
        let running: Vec<_> = self.running.iter().map(|sequence| sequence.id).collect();
        let mut places = Vec::new();
        for (at, sequence) in self.running.iter().enumerate() {
            // A request draws one more token than it accepts. Recurrent states are saved where the pass would end with all tokens accepted.
            let fits = (sequence.max_len - 1).min(sequence.next_stop()).saturating_sub(sequence.tokens.len());
            // All tokens of a request are in one pass, including tokens that are computed again.
            let in_one_pass = 2 * MOST_TOKENS - sequence.pending().min(2 * MOST_TOKENS);
            let most = fits.min(in_one_pass).min(proposer.tokens()).min(room);
            if sequence.draws_next() && sequence.has_quick_masks() && !sequence.reads_activations() && most > 0 {
                places.push(at);
                wanted.push(Wanted { id: sequence.id, tokens: &sequence.tokens, most });
                room -= most;
            }
        }
        let proposals = proposer.propose(&running, &wanted)?;
        let mut count = 0;
        for (at, proposed) in places.into_iter().zip(proposals).filter(|(_, proposed)| !proposed.is_empty()) {
            let sequence = &mut self.running[at];
            let (computed, tokens) = (sequence.computed, sequence.tokens.len() + proposed.len());
            if self.pools.extend(&mut sequence.blocks, computed, tokens) && self.back_up_states(at, proposed.len())? {
                let sequence = &mut self.running[at];
                self.stats.proposals += 1;
                self.stats.proposed_tokens += proposed.len() as u64;
                count += proposed.len();
                sequence.proposed = proposed;
            }
        }
        Ok(count)
    }

    /// Returns the requests that have no tokens left to compute after `plan`, with the rows of their last tokens.
    pub(super) fn drawing(&self, plan: &Plan) -> Vec<Drawing> {
        let (mut end, mut drawing) = (0, Vec::new());
        for &(at, new) in plan {
            end += new;
            let sequence = &self.running[at];
            let count = 1 + sequence.proposed.len();
            if sequence.pending() + sequence.proposed.len() == new && sequence.tokens.len() < sequence.max_len {
                drawing.push(Drawing { at, row: end - count, count });
            }
        }
        drawing
    }

    /// Draws the next tokens of each of these requests from its rows of logits, on the model's device. Logits are copied to the host only to find the
    /// likeliest tokens next to a drawn token. An engine that follows does not draw, since rank 0 announces the drawn tokens.
    pub(super) fn draw(&mut self, scored: &Scored, mut drawing: Vec<Drawing>) -> Result<Vec<Drawn>> {
        if matches!(self.part, Part::Follows) || drawing.is_empty() {
            return Ok(Vec::new());
        }
        let likeliest = scored.likeliest.to_vec::<i32>()?;
        if let Some(Drawing { at, .. }) = drawing.iter().find(|of| likeliest[of.row] < 0) {
            return Err(not_finite(self.running[*at].tokens.len() + 1));
        }
        // If the row of a proposed token is not finite, this is an error only if the token is accepted, and then in the next step.
        for of in &mut drawing {
            of.count = (of.row..of.row + of.count).take_while(|&row| likeliest[row] >= 0).count();
        }
        if drawing.iter().all(|of| self.running[of.at].is_plain(0)) {
            let accepted = self.accept(&drawing, |row| likeliest[row] as u32);
            return Ok(accepted.into_iter().map(|(at, _, token)| (at, token, None)).collect());
        }
        let logits = in_f32(&scored.logits)?;
        let [rows, _] = logits.dims("logits")?;
        let mut draws = vec![Draw::GREEDY; rows];
        for of in &mut drawing {
            let own = self.running[of.at].draws();
            of.count = of.count.min(own.len());
            draws[of.row..].iter_mut().zip(own.into_iter().take(of.count)).for_each(|(draw, own)| *draw = own);
        }
        let (tokens, logprobs) = self.sample(&logits, &draws)?;
        let logprobs =
            if self.options.logprobs_mode == LogprobsMode::Loss { of_loss(&scored.logits, &tokens)? } else { logprobs };
        let (tokens, logprobs) = (tokens.to_vec::<i32>()?, logprobs.to_vec::<f32>()?);
        let accepted = self.accept(&drawing, |row| tokens[row] as u32);
        self.with_logprobs(accepted, &logits, &draws, &logprobs)
    }

    /// Draws a token from each row of F32 `logits` `[R, V]` by the draw of the row. Returns the tokens and their log-probabilities on the device, as
    /// the op does.
    pub(super) fn sample(&mut self, logits: &Tensor, draws: &[Draw]) -> Result<(Tensor, Tensor)> {
        let adjustments = draws.iter().map(|draw| draw.adjustments.len()).sum();
        let mut on_device = Draws::new(logits.device(), logits.dims("logits")?, adjustments)?;
        on_device.set_by(&mut self.steps.staging, draws)?;
        let distribution = match self.options.logprobs_mode {
            LogprobsMode::Processed => Distribution::Draw,
            LogprobsMode::Raw | LogprobsMode::Loss => Distribution::Model,
        };
        Ok(sample(logits, &mut on_device, distribution)?)
    }

    /// Returns the drawn tokens of each request with their rows, up to the first token that was not proposed or that ends the request. `drawn`
    /// returns the token of a row.
    fn accept(&self, drawing: &[Drawing], drawn: impl Fn(usize) -> u32) -> Vec<(usize, usize, u32)> {
        let mut all = Vec::new();
        for &Drawing { at, row, count } in drawing {
            let sequence = &self.running[at];
            for number in 0..count {
                let token = drawn(row + number);
                all.push((at, row + number, token));
                let is_proposed = sequence.proposed.get(number) == Some(&token);
                if !is_proposed || sequence.request.stop_ids.contains(&token) {
                    break;
                }
            }
        }
        all
    }
}
