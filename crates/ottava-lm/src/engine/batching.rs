//! Continuous batching: selects the tokens of requests that each step computes, and handles the results.

use super::block_pool::BLOCK_SIZE;
use super::blocks::Pools;
use super::decode::{DecodeSteps, Scored, in_f32};
use super::request::{AdapterId, EngineOptions, EngineStats, Event, FinishReason, RequestId, TokenLogprob};
use super::sampler;
use super::sequence::Sequence;
use super::update::Part;
use crate::error::{Error, Result};
use crate::models::{Adapters, Decoder, InferenceBatch, KvCache, PREFILL_MULTIPLE, SequenceTokens, padded_rows};
use ottava_tensor::ops::{Draw, Draws, sample};
use ottava_tensor::{Device, Tensor};
use std::collections::{BTreeMap, VecDeque};

/// Rows of logits that exist at once.
const LOGIT_ROWS: usize = 256;

/// Computes completions of a model.
pub struct Engine {
    model: Decoder,
    /// Adapters of the model, of which those of `adapter` are in its linears.
    pub(super) adapters: Vec<Adapters>,
    adapter: Option<AdapterId>,
    pub(super) options: EngineOptions,
    cache: KvCache,
    /// On a GPU.
    steps: DecodeSteps,
    pub(super) pools: Pools,
    /// Requests without memory, the next one first.
    pub(super) waiting: VecDeque<Sequence>,
    /// Requests with memory, the oldest first.
    pub(super) running: Vec<Sequence>,
    /// Requests that no step computes until they are resumed.
    pub(super) held: Vec<Sequence>,
    pub(super) cancelled: Vec<RequestId>,
    pub(super) next_id: u64,
    pub(super) stats: EngineStats,
    scales_by_token: bool,
    pub(super) part: Part,
}

/// Tokens of running requests that a step computes: number in `running`, and how many.
pub(super) type Plan = Vec<(usize, usize)>;

/// The kind of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BatchKind {
    /// One token of each sequence, on a GPU.
    Single,
    /// Any numbers.
    Mixed,
}

/// A token that was drawn: number in `running`, token, and its log-probability if requested.
pub(super) type Drawn = (usize, u32, Option<TokenLogprob>);

impl Engine {
    /// An engine for `model`, whose weights are cast. Where its recipe scales operands by the amax of their tensor, each token gets a scale
    /// of its own.
    ///
    /// Errors with [`Error::Config`] for sizes of zero, and if memory does not suffice for the KV cache.
    pub fn new(mut model: Decoder, options: &EngineOptions) -> Result<Engine> {
        let EngineOptions { max_model_len, max_batch, kv_cache_tokens, prefill_chunk, kv_cache_dtype, .. } = *options;
        let sizes = [
            ("max_model_len", max_model_len),
            ("max_batch", max_batch),
            ("kv_cache_tokens", kv_cache_tokens),
            ("prefill_chunk", prefill_chunk),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(Error::Config(format!("the engine's {name} is 0; it is a number from 1 up")));
        }
        let scales_by_token = model.scale_by_token()?;
        let dtype = kv_cache_dtype.resolve(model.recipe().compute);
        let groups = model.kv_groups(max_model_len).into_iter();
        let groups: Vec<_> = groups.map(|group| (group.clone(), options.blocks_of(&group))).collect();
        let cache = model.kv_cache(&groups, BLOCK_SIZE, dtype)?;
        let pools = Pools::new(groups.iter().map(|(group, blocks)| (group.window, *blocks)), prefill_chunk);
        let stats = EngineStats { kv_blocks: pools.all(), ..EngineStats::default() };
        Ok(Engine {
            model,
            adapters: Vec::new(),
            adapter: None,
            options: *options,
            cache,
            steps: DecodeSteps::default(),
            pools,
            waiting: VecDeque::new(),
            running: Vec::new(),
            held: Vec::new(),
            cancelled: Vec::new(),
            next_id: 0,
            stats,
            scales_by_token,
            part: Part::Alone,
        })
    }

    /// The model.
    pub fn model(&self) -> &Decoder {
        &self.model
    }

    /// Lets requests ask for `adapters`, which are of [`Decoder::load_adapters`] of this model.
    pub fn add_adapters(&mut self, adapters: Adapters) -> AdapterId {
        self.adapters.push(adapters);
        AdapterId(self.adapters.len() - 1)
    }

    /// Its sizes.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Requests computed at once, at most.
    pub fn max_batch(&self) -> usize {
        self.options.max_batch
    }

    /// Whether each token has its own scale, although the model's recipe has one scale per tensor.
    pub fn scales_by_token(&self) -> bool {
        self.scales_by_token
    }

    /// Whether there is nothing to compute or report; held requests do not count.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.cancelled.is_empty()
    }

    /// The present state.
    pub fn stats(&self) -> EngineStats {
        let (running, waiting, held) = (self.running.len(), self.waiting.len(), self.held.len());
        EngineStats { running, waiting, held, used_kv_blocks: self.pools.used(), ..self.stats }
    }

    /// Computes the next tokens of all running requests, and reads the next chunks of prompts.
    ///
    /// Errors with [`Error::NonFinite`] for logits that are infinite or NaN.
    pub fn step(&mut self) -> Result<Vec<Event>> {
        let cancelled = |id| Event::Finished { id, reason: FinishReason::Cancelled };
        self.announce()?;
        let mut events: Vec<Event> = std::mem::take(&mut self.cancelled).into_iter().map(cancelled).collect();
        let drawn = self.run_passes(&mut events)?;
        self.conclude(drawn, &mut events);
        Ok(events)
    }

    /// Decides what a step computes, computes it, and returns the tokens that are drawn.
    pub(super) fn run_passes(&mut self, events: &mut Vec<Event>) -> Result<Vec<Drawn>> {
        let plan = self.schedule();
        let passes = self.passes(plan);
        let mut drawn = Vec::new();
        for (pass, plan) in &passes {
            drawn.extend(self.compute(*pass, plan, events)?);
        }
        for (_, plan) in &passes {
            self.advance(plan);
        }
        Ok(drawn)
    }

    /// Adds the tokens that a step has drawn, and ends requests that have all of theirs.
    pub(super) fn conclude(&mut self, drawn: Vec<Drawn>, events: &mut Vec<Event>) {
        let tokens: Vec<_> = drawn.iter().map(|&(at, token, _)| (at, token)).collect();
        self.add_tokens(drawn, events);
        self.tell_drawn(tokens);
        self.retire(events);
    }

    /// Divides a plan by adapters, those that are in the linears first, and on a GPU by kernels. So each step computes all adapters.
    fn passes(&self, plan: Plan) -> Vec<(BatchKind, Plan)> {
        let mut by_adapter: BTreeMap<_, Plan> = BTreeMap::new();
        for (at, new) in plan {
            let adapter = self.running[at].request.adapter;
            by_adapter.entry((adapter != self.adapter, adapter)).or_default().push((at, new));
        }
        let plans = by_adapter.into_values();
        match self.model.device() {
            Device::Cuda(_) => plans.flat_map(|plan| self.passes_by_kernel(plan)).collect(),
            _ => plans.map(|plan| (BatchKind::Mixed, plan)).collect(),
        }
    }

    /// Divides a plan of one adapter: single tokens, whole prompts one by one, and the rest.
    fn passes_by_kernel(&self, plan: Plan) -> Vec<(BatchKind, Plan)> {
        let (single, rest): (Plan, Plan) =
            plan.into_iter().partition(|&(at, new)| new == 1 && !self.running[at].reads_activations());
        let (whole, rest): (Plan, Plan) = rest
            .into_iter()
            .partition(|&(at, new)| self.running[at].computed == 0 && new.is_multiple_of(PREFILL_MULTIPLE));
        let mut passes = vec![(BatchKind::Single, single)];
        passes.extend(whole.into_iter().map(|one| (BatchKind::Mixed, vec![one])));
        passes.push((BatchKind::Mixed, rest));
        passes.retain(|(_, plan)| !plan.is_empty());
        passes
    }

    /// Gives the linears of the model their adapters of `adapter`.
    fn set_adapter(&mut self, adapter: Option<AdapterId>) {
        if adapter != self.adapter {
            // What linears have goes back to where it was, and what is there comes.
            for AdapterId(at) in [self.adapter, adapter].into_iter().flatten() {
                self.model.exchange_adapters(&mut self.adapters[at]);
            }
            self.adapter = adapter;
        }
    }

    /// Computes what `plan` says, of requests of one adapter, in one pass, and draws the tokens that follow.
    fn compute(&mut self, pass: BatchKind, plan: &Plan, events: &mut Vec<Event>) -> Result<Vec<Drawn>> {
        self.set_adapter(plan.first().and_then(|&(at, _)| self.running[at].request.adapter));
        let tokens: Vec<SequenceTokens> = plan.iter().map(|&(at, new)| self.running[at].next(new)).collect();
        if pass == BatchKind::Single {
            let scored = self.steps.run(&self.model, self.adapter, &mut self.cache, &tokens)?;
            return self.draw(&scored, plan.iter().zip(0..).map(|(&(at, _), row)| (at, row)));
        }
        let batch = InferenceBatch::padded(self.model.device(), &tokens)?;
        let hidden = self.model.hidden(&batch, &mut self.cache)?;
        self.score_prompts(plan, &hidden, events)?;
        self.pool_prompts(plan, &hidden, events)?;
        let mut drawn = Vec::new();
        for drawing in self.drawing(plan).chunks(LOGIT_ROWS) {
            let rows: Vec<i32> = drawing.iter().map(|&(_, row)| row as i32).collect();
            let rows = self.on_device(&rows)?;
            let scored = Scored::score(&self.model, &hidden, &rows)?;
            drawn.extend(self.draw(&scored, drawing.iter().zip(0..).map(|(&(at, _), row)| (at, row)))?);
        }
        Ok(drawn)
    }

    /// Decides what a step computes: a token of each request that has drawn one, then prompts, oldest first, up to the step's budget.
    fn schedule(&mut self) -> Plan {
        self.grow();
        let mut budget = self.options.prefill_chunk;
        let mut plan = Vec::new();
        for (at, sequence) in self.running.iter().enumerate().filter(|(_, sequence)| sequence.pending() == 1) {
            plan.push((at, sequence.pending()));
            budget = budget.saturating_sub(1);
        }
        for (at, sequence) in self.running.iter().enumerate().filter(|(_, sequence)| sequence.pending() > 1) {
            let new = sequence.pending().min(budget);
            plan.extend((new > 0).then_some((at, new)));
            budget -= new;
        }
        while budget > 0 && self.running.len() < self.options.max_batch {
            let Some(mut sequence) = self.waiting.pop_front() else {
                break;
            };
            // All tokens of a prompt that is scored or pooled are computed.
            let shares = self.shares_prefixes() && !sequence.reads_activations();
            if shares {
                sequence.share(&mut self.pools);
            }
            // Memory for all that it has, so that a prompt once begun is read to its end.
            if !self.pools.extend(&mut sequence.blocks, sequence.computed, sequence.tokens.len()) {
                sequence.put_back(&mut self.pools);
                self.waiting.push_front(sequence);
                break;
            }
            if shares {
                self.stats.prefix_queries += sequence.tokens.len() as u64;
                self.stats.prefix_hits += sequence.computed as u64;
            }
            let mut new = sequence.pending().min(budget);
            if matches!(self.model.device(), Device::Cuda(_)) && new > PREFILL_MULTIPLE {
                new -= new % PREFILL_MULTIPLE;
            }
            plan.push((self.running.len(), new));
            budget -= new;
            self.running.push(sequence);
        }
        // A step with a token of each request has no token left for prompts where the budget is small; the oldest prompt gets one.
        if let (0, Some(at)) = (budget, self.running.iter().position(|sequence| sequence.pending() > 1))
            && !plan.iter().any(|&(planned, _)| planned == at)
        {
            plan.push((at, 1));
        }
        plan
    }

    /// Gives each running request memory for its tokens. If no memory is left, the youngest request is preempted, and waits to be computed
    /// again: so the oldest always goes on.
    fn grow(&mut self) {
        let mut at = 0;
        while at < self.running.len() {
            let sequence = &mut self.running[at];
            if self.pools.extend(&mut sequence.blocks, sequence.computed, sequence.tokens.len()) {
                at += 1;
                continue;
            }
            let mut youngest = self.running.pop().expect("one of them needs memory");
            youngest.put_back(&mut self.pools);
            self.waiting.push_front(youngest);
            self.stats.preemptions += 1;
        }
    }

    /// Numbers of rows, padded by row 0.
    fn on_device(&self, rows: &[i32]) -> Result<Tensor> {
        let mut padded = rows.to_vec();
        padded.resize(padded_rows(self.model.device(), rows.len()), 0);
        Ok(Tensor::from_slice(self.model.device(), &[padded.len()], &padded)?)
    }

    /// Scores tokens of prompts that follow the computed ones, and reports prompts that are scored.
    fn score_prompts(&mut self, plan: &Plan, hidden: &Tensor, events: &mut Vec<Event>) -> Result<()> {
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
            // The token at position `p` is scored by the row before it. A preempted request has scored some before.
            let known = sequence.prompt_logprobs.len().max(1);
            let positions: Vec<usize> =
                (start + 1..=start + new).filter(|p| (known..prompt.len()).contains(p)).collect();
            let rows: Vec<i32> = positions.iter().map(|p| row + (p - start - 1) as i32).collect();
            for (rows, positions) in rows.chunks(LOGIT_ROWS).zip(positions.chunks(LOGIT_ROWS)) {
                let rows = self.on_device(rows)?;
                let logits = in_f32(&self.model.logits(hidden, &rows)?)?.to_vec()?;
                let rows = logits.chunks_exact(self.model.config().vocabulary);
                found.extend(positions.iter().zip(rows).map(|(&p, row)| Some(sampler::logprob(row, prompt[p], top))));
            }
            let sequence = &mut self.running[at];
            sequence.prompt_logprobs.extend(found);
            if !sequence.scores_prompt() {
                let (id, logprobs) = (sequence.id, sequence.prompt_logprobs.clone());
                events.push(Event::Prompt { id, logprobs });
            }
        }
        Ok(())
    }

    /// The requests that have no more tokens to compute after `plan`, each with the row of its last one.
    fn drawing(&self, plan: &Plan) -> Vec<(usize, usize)> {
        let (mut end, mut drawing) = (0, Vec::new());
        for &(at, new) in plan {
            end += new;
            let sequence = &self.running[at];
            if sequence.pending() == new && sequence.tokens.len() < sequence.max_len {
                drawing.push((at, end - 1));
            }
        }
        drawing
    }

    /// Draws a token of each of these requests from its row of logits, on the model's device. Logits reach the host only for the likeliest
    /// tokens beside a drawn one. An engine that follows draws none: rank 0 tells it.
    fn draw(&mut self, scored: &Scored, drawing: impl Iterator<Item = (usize, usize)>) -> Result<Vec<Drawn>> {
        if matches!(self.part, Part::Follows) {
            return Ok(Vec::new());
        }
        let mut drawing: Vec<_> =
            drawing.filter(|&(at, _)| self.running[at].tokens.len() < self.running[at].max_len).collect();
        let likeliest = scored.likeliest.to_vec::<i32>()?;
        let bad = |&&(_, row): &&(usize, usize)| likeliest[row] < 0;
        if let Some(&(at, _)) = drawing.iter().find(bad) {
            return Err(Error::NonFinite(format!(
                "a logit of token {} is not finite: the model's weights or activations are not",
                self.running[at].tokens.len() + 1
            )));
        }
        if drawing.iter().all(|&(at, _)| self.running[at].is_plain()) {
            return Ok(drawing.into_iter().map(|(at, row)| (at, likeliest[row] as u32, None)).collect());
        }
        let logits = in_f32(&scored.logits)?;
        let [rows, columns] = logits.dims("logits")?;
        let mut draws = vec![Draw::GREEDY; rows];
        drawing.retain(|&(at, row)| self.running[at].draw().map(|draw| draws[row] = draw).is_some());
        let adjustments = draws.iter().map(|draw| draw.adjustments.len()).sum();
        let mut on_device = Draws::new(logits.device(), [rows, columns], adjustments)?;
        on_device.set(&draws)?;
        let (tokens, logprobs) = sample(&logits, &mut on_device)?;
        let (tokens, logprobs) = (tokens.to_vec::<i32>()?, logprobs.to_vec::<f32>()?);
        let drawn = |(at, row): (usize, usize)| {
            let (token, logprob) = (tokens[row] as u32, logprobs[row]);
            let found = match self.running[at].request.logprobs {
                None => None,
                Some(0) => Some(TokenLogprob { token, logprob, top: Vec::new() }),
                Some(top) => Some(sampler::logprob(&logits.rows(row, row + 1)?.to_vec()?, token, top)),
            };
            Ok((at, token, found))
        };
        drawing.into_iter().map(drawn).collect()
    }

    /// Whether requests share the blocks of equal beginnings.
    fn shares_prefixes(&self) -> bool {
        self.options.prefix_caching && self.pools.can_share()
    }

    /// Counts what was computed.
    fn advance(&mut self, plan: &Plan) {
        let shares = self.shares_prefixes();
        for &(at, new) in plan {
            let sequence = &mut self.running[at];
            let of_prompt = new.min(sequence.request.prompt.len().saturating_sub(sequence.computed));
            self.stats.prompt_tokens += of_prompt as u64;
            let full = sequence.computed / BLOCK_SIZE;
            sequence.computed += new;
            if shares {
                sequence.publish(&mut self.pools, full);
            }
        }
    }

    /// Adds the tokens that were drawn.
    fn add_tokens(&mut self, drawn: Vec<Drawn>, events: &mut Vec<Event>) {
        for (at, token, logprob) in drawn {
            let sequence = &mut self.running[at];
            sequence.push(token);
            self.stats.generated_tokens += 1;
            events.push(Event::Token { id: sequence.id, token, logprob });
        }
    }

    /// Ends requests that drew a stop token or have all their tokens, and frees their memory.
    fn retire(&mut self, events: &mut Vec<Event>) {
        let pools = &mut self.pools;
        self.running.retain_mut(|sequence| {
            let last = sequence.tokens.last().expect("a prompt has a token");
            let reason = if let Some(reason) = sequence.end {
                reason
            } else if sequence.drawn() > 0 && sequence.request.stop_ids.contains(last) {
                FinishReason::Stop
            } else if sequence.tokens.len() >= sequence.max_len && sequence.computed >= sequence.request.prompt.len() {
                FinishReason::Length
            } else {
                return true;
            };
            sequence.put_back(pools);
            events.push(Event::Finished { id: sequence.id, reason });
            false
        });
    }
}
