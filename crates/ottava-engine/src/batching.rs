//! Continuous batching: selects the tokens of requests that each step computes, and handles the results.

use crate::block_pool::BLOCK_SIZE;
use crate::blocks::Pools;
use crate::decode::{DecodeSteps, fixed_rows};
use crate::flight::{Ahead, Pace};
use crate::masks::Masks;
use crate::proposer::Proposer;
use crate::request::{AdapterId, EngineOptions, EngineStats, Event, FinishReason, RequestId, TokenLogprob};
use crate::sequence::Sequence;
use crate::update::Part;
use ottava_common::error::{Error, Result};
use ottava_models::{Adapters, CacheSizes, Decoder, KvCache, PREFILL_MULTIPLE};
use ottava_tensor::Device;
use std::collections::VecDeque;

/// An engine that computes completions of a model.
pub struct Engine {
    pub(super) model: Decoder,
    /// The adapters of the model; `None` for removed adapters. The linears hold the adapters of number `adapter`.
    pub(super) adapters: Vec<Option<Adapters>>,
    pub(super) adapter: Option<AdapterId>,
    pub(super) options: EngineOptions,
    pub(super) cache: KvCache,
    /// The captured decode steps, on a GPU.
    pub(super) steps: DecodeSteps,
    /// The proposer of tokens of running requests. The next step verifies these tokens.
    pub(super) proposer: Option<Proposer>,
    pub(super) pools: Pools,
    /// The requests without memory. The next request is first.
    pub(super) waiting: VecDeque<Sequence>,
    /// The requests with memory. The oldest request is first.
    pub(super) running: Vec<Sequence>,
    /// The requests that no step computes until they are resumed.
    pub(super) held: Vec<Sequence>,
    pub(super) cancelled: Vec<RequestId>,
    pub(super) next_id: u64,
    pub(super) stats: EngineStats,
    /// The number of steps so far.
    pub(super) step: usize,
    scales_by_token: bool,
    /// Whether several prompts are computed in one pass of the attention of training.
    pub(super) packs_prompts: bool,
    /// Whether such a pass has the bits of attention over the cache while results must not depend on the batch.
    pub(super) packs_in_order: bool,
    pub(super) masks: Masks,
    pub(super) part: Part,
    pub(super) ahead: Ahead,
}

/// The tokens of running requests that a step computes: the number of the request in `running`, and the number of tokens.
pub(super) type Plan = Vec<(usize, usize)>;

/// A drawn token: the number of the request in `running`, the token, and its log-probability if requested.
pub(super) type Drawn = (usize, u32, Option<TokenLogprob>);

/// Allocates the KV cache of `model`, and the pools of its blocks.
///
/// Errors in the same cases as [`Engine::new`].
fn memory(model: &Decoder, options: &EngineOptions) -> Result<(KvCache, Pools)> {
    let EngineOptions {
        max_model_len, max_batch, kv_cache_tokens, prefill_chunk, kv_cache_dtype, saved_states, ..
    } = *options;
    let sizes = [
        ("max_model_len", max_model_len),
        ("max_batch", max_batch),
        ("kv_cache_tokens", kv_cache_tokens),
        ("prefill_chunk", prefill_chunk),
    ];
    if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
        return Err(Error::Config(format!("the engine's {name} is 0; it is a number from 1 up")));
    }
    let dtype = kv_cache_dtype.resolve(model.recipe().compute);
    let groups = model.kv_groups(max_model_len).into_iter();
    let groups: Vec<_> = groups.map(|group| (group.clone(), options.blocks_of(&group))).collect();
    let sizes = CacheSizes { groups: &groups, block_size: BLOCK_SIZE, dtype, slots: max_batch, saved: saved_states };
    let cache = model.kv_cache(sizes)?;
    let pools = Pools::new(groups.iter().map(|(group, blocks)| (group.window, *blocks)), max_batch, prefill_chunk);
    Ok((cache, if model.state_bytes() > 0 { pools.with_states(saved_states) } else { pools }))
}

/// Returns whether attention of whole prompts has the bits of attention over the cache, while results must not depend on the batch.
fn packs_in_order(model: &Decoder, options: &EngineOptions) -> bool {
    let compute = model.recipe().compute;
    let keeps_bits = options.kv_cache_dtype.resolve(compute) == compute;
    keeps_bits && model.part().order_refusal(model.device(), compute).is_none()
}

impl Engine {
    /// Makes an engine for `model`, whose weights must be cast. If its recipe scales operands by the amax of their tensor, each token gets its own
    /// scale instead.
    ///
    /// Errors with [`Error::Config`] for sizes of zero, and if there is not enough memory for the KV cache.
    pub fn new(mut model: Decoder, options: &EngineOptions) -> Result<Engine> {
        let scales_by_token = model.scale_by_token()?;
        let memory = memory(&model, options)?;
        Ok(Engine { scales_by_token, ..Engine::with_memory(model, options, memory)? })
    }

    /// Makes an engine that borrows its model: [`Engine::lend`] lends it a model for one call. `model` only gives the sizes, which each lent model
    /// must have.
    ///
    /// Errors in the same cases as [`Engine::new`].
    pub fn to_lend(model: &Decoder, options: &EngineOptions) -> Result<Engine> {
        let (mut cache, pools) = memory(model, options)?;
        cache.suspend()?;
        Engine::with_memory(model.without_data()?, options, (cache, pools))
    }

    /// Runs `work` with `model`. The weights of `model` may have changed since the last call, so all keys and values in the cache are discarded. Between
    /// calls, other tensors may use the memory of the cache, and the engine holds only the inputs of its decode steps. The scales of the model stay
    /// unchanged, so its casts equal the casts of training. If forward reads other tensors than in the last call, the caller calls
    /// [`Engine::forget_graphs`] first.
    ///
    /// # Panics
    ///
    /// Panics if requests of an earlier call are left.
    pub fn lend<T>(&mut self, model: &mut Decoder, work: impl FnOnce(&mut Engine) -> Result<T>) -> Result<T> {
        assert!(
            self.is_idle() && self.held.is_empty(),
            "no request outlives the weights that computed its keys and values"
        );
        self.pools.forget();
        if self.cache.resume()? {
            self.steps.forget();
        }
        std::mem::swap(model, &mut self.model);
        let done = work(self);
        std::mem::swap(model, &mut self.model);
        if done.is_err() {
            self.abandon();
        }
        self.steps.suspend();
        self.cache.suspend()?;
        done
    }

    /// Forgets all graphs of decode steps, because forward reads other tensors. The next steps are captured again.
    pub fn forget_graphs(&mut self) {
        self.steps.forget();
    }

    /// Ends all requests without a report.
    fn abandon(&mut self) {
        for sequence in &mut self.running {
            sequence.put_back(&mut self.pools);
        }
        self.running.clear();
        self.ahead.flight = None;
        self.waiting.clear();
        self.held.clear();
        self.cancelled.clear();
    }

    fn with_memory(model: Decoder, options: &EngineOptions, (cache, pools): (KvCache, Pools)) -> Result<Engine> {
        let stats = EngineStats { kv_blocks: pools.all(), ..EngineStats::default() };
        let steps = DecodeSteps::new(model.device(), fixed_rows(&model, options));
        let packs_prompts = model.packs_prompts()?;
        let mut options = *options;
        if model.config().is_encoder() {
            options.prefill_chunk = options.prefill_chunk.max(options.max_model_len);
        }
        Ok(Engine {
            packs_prompts,
            packs_in_order: packs_prompts && packs_in_order(&model, &options),
            model,
            adapters: Vec::new(),
            adapter: None,
            options,
            cache,
            steps,
            proposer: None,
            pools,
            waiting: VecDeque::new(),
            running: Vec::new(),
            held: Vec::new(),
            cancelled: Vec::new(),
            next_id: 0,
            stats,
            step: 0,
            scales_by_token: false,
            masks: Masks::default(),
            part: Part::Alone,
            ahead: Ahead::default(),
        })
    }

    /// Returns the model.
    pub fn model(&self) -> &Decoder {
        &self.model
    }

    /// Returns the sizes of the engine.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Returns the maximum number of requests that are computed at once.
    pub fn max_batch(&self) -> usize {
        self.options.max_batch
    }

    /// Returns whether each token has its own scale although the model's recipe has one scale per tensor.
    pub fn scales_by_token(&self) -> bool {
        self.scales_by_token
    }

    /// Returns whether nothing is left to compute or report. Held requests do not count.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.cancelled.is_empty()
    }

    /// Returns the current state.
    pub fn stats(&self) -> EngineStats {
        let (running, waiting, held) = (self.running.len(), self.waiting.len(), self.held.len());
        EngineStats { running, waiting, held, used_kv_blocks: self.pools.used(), ..self.stats }
    }

    /// Computes the next tokens of all running requests, and reads the next chunks of prompts.
    ///
    /// Errors with [`Error::NonFinite`] for logits that are infinite or NaN.
    pub fn step(&mut self) -> Result<Vec<Event>> {
        let cancelled = |id| Event::Finished { id, reason: FinishReason::Cancelled, cached_tokens: 0 };
        self.await_masks();
        let pace = self.pace();
        self.announce(pace)?;
        // A step that ended with an error may have left states after proposed tokens.
        self.settle_states()?;
        let mut events: Vec<Event> = std::mem::take(&mut self.cancelled).into_iter().map(cancelled).collect();
        let drawn = self.run(pace, &mut events)?;
        self.conclude(drawn, &mut events)?;
        Ok(events)
    }

    /// Launches and reads what a step of this `pace` does. Returns the tokens that were read.
    pub(super) fn run(&mut self, pace: Pace, events: &mut Vec<Event>) -> Result<Vec<Drawn>> {
        match (pace, self.ahead.flight.take()) {
            (Pace::Continue, Some(flight)) => {
                self.ahead.flight = self.launch_after(&flight)?;
                self.land(&flight)
            }
            (_, Some(flight)) => self.land(&flight),
            (_, None) => self.run_passes(pace, events),
        }
    }

    /// Adds the tokens that a step has drawn, and ends requests that have all their tokens.
    ///
    /// Errors if recurrent states cannot be copied.
    pub(super) fn conclude(&mut self, drawn: Vec<Drawn>, events: &mut Vec<Event>) -> Result<()> {
        let tokens: Vec<_> = drawn.iter().map(|&(at, token, _)| (at, token)).collect();
        self.add_tokens(drawn, events);
        self.tell_drawn(tokens);
        self.retire(events);
        self.count_flight();
        self.settle_states()
    }

    /// Selects the tokens that a step computes. First come requests that draw a token: their last token and the tokens proposed after it. Then come
    /// prompts, the oldest first, up to the step's budget.
    pub(super) fn schedule(&mut self) -> Result<Plan> {
        self.grow();
        let single: usize = self.running.iter().filter(|of| of.draws_next()).map(Sequence::pending).sum();
        let budget = self.options.prefill_chunk.saturating_sub(single);
        // At most half of the budget is for proposed tokens, so prompts get at least the other half.
        let proposed = self.propose(budget / 2)?;
        let mut budget = self.prompt_budget(budget - proposed);
        let (mut plan, of_prompts) = (Vec::new(), budget.tokens);
        for (at, sequence) in self.running.iter().enumerate().filter(|(_, sequence)| sequence.draws_next()) {
            plan.push((at, sequence.pending() + sequence.proposed.len()));
        }
        let reads = |sequence: &Sequence| sequence.pending() > 1 && !sequence.draws_next();
        for (at, sequence) in self.running.iter().enumerate().filter(|(_, sequence)| reads(sequence)) {
            let new = budget.most(sequence);
            plan.extend((new > 0).then_some((at, new)));
            budget.take(sequence, new);
        }
        while budget.tokens > 0 && self.running.len() < self.options.max_batch {
            // A prompt that this step cannot score lets later prompts pass.
            let Some(next) = self.waiting.iter().position(|sequence| budget.most(sequence) > 0) else {
                break;
            };
            let mut sequence = self.waiting.remove(next).expect("it is there");
            // If a prompt is scored or pooled, all its tokens must be computed, so it does not share blocks.
            let shares = self.shares_prefixes() && !sequence.reads_activations();
            let shared = shares.then(|| sequence.share(&mut self.pools));
            // The rest of a prompt would be a pass of its own, so a prompt that does not fit beside other prompts waits for the next step.
            let is_divided = budget.tokens < of_prompts && budget.tokens < sequence.due();
            let fits_alone = sequence.due() <= self.options.prefill_chunk && !sequence.reads_activations();
            // The texts of encoders are not divided: `prefill_chunk` has room for the longest text.
            let waits = is_divided && (self.model.config().is_encoder() || self.packs_prompts && fits_alone);
            // The request gets memory for all its tokens, so a prompt that is begun can be read to its end.
            if waits || !self.pools.extend(&mut sequence.blocks, sequence.computed, sequence.tokens.len()) {
                sequence.put_back(&mut self.pools);
                self.waiting.insert(next, sequence);
                break;
            }
            if let Some(place) = shared.as_ref().and_then(|shared| shared.state) {
                self.cache.restore_states(place, sequence.blocks.slot())?;
            }
            if self.shares_prefixes() && self.pools.has_states() {
                let cached = shared.map_or(0, |shared| shared.cached * BLOCK_SIZE);
                sequence.states.begin(sequence.tokens.len(), sequence.computed, cached);
            }
            if shares {
                self.stats.prefix_queries += sequence.tokens.len() as u64;
                self.stats.prefix_hits += sequence.computed as u64;
            }
            let cached_tokens = if shares { sequence.computed } else { 0 };
            sequence.cached_tokens.get_or_insert(cached_tokens);
            let mut new = budget.most(&sequence);
            let has_multiples = matches!(self.model.device(), Device::Cuda(_)) && !self.packs_prompts;
            if has_multiples && new > PREFILL_MULTIPLE {
                new -= new % PREFILL_MULTIPLE;
            }
            plan.extend((new > 0).then_some((self.running.len(), new)));
            budget.take(&sequence, new);
            self.running.push(sequence);
        }
        // If the budget is small and each request takes a token, no token is left for prompts. Then the oldest prompt gets one token.
        if let (0, Some(at)) = (budget.tokens, self.running.iter().position(|sequence| sequence.pending() > 1))
            && !plan.iter().any(|&(planned, _)| planned == at)
        {
            plan.push((at, 1));
        }
        self.running.iter_mut().chain(&mut self.waiting).for_each(|sequence| sequence.rests = false);
        Ok(plan)
    }

    /// Gives each running request memory for its tokens. If no memory is left, the youngest request is preempted, and waits to be recomputed. So the
    /// oldest request always continues.
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

    /// Returns whether requests that begin with the same tokens share blocks.
    pub(super) fn shares_prefixes(&self) -> bool {
        self.options.prefix_caching && self.pools.can_share()
    }

    /// Counts the computed tokens, and saves recurrent states. Proposed tokens count when they are drawn.
    ///
    /// Errors if recurrent states cannot be copied.
    pub(super) fn advance(&mut self, plan: &Plan) -> Result<()> {
        for &(at, new) in plan {
            let sequence = &self.running[at];
            let certain = new - sequence.proposed.len();
            let of_prompt = certain.min(sequence.request.prompt.len().saturating_sub(sequence.computed));
            self.stats.prompt_tokens += of_prompt as u64;
            self.extend_computed(at, certain);
            if self.running[at].proposed.is_empty() {
                self.save_states(at)?;
            }
        }
        Ok(())
    }

    /// Records that the keys and values of further tokens of a request are in the cache.
    pub(super) fn extend_computed(&mut self, at: usize, tokens: usize) {
        let shares = self.shares_prefixes();
        let sequence = &mut self.running[at];
        let full = sequence.computed / BLOCK_SIZE;
        sequence.computed += tokens;
        sequence.states.repeated = 0;
        if shares {
            sequence.publish(&mut self.pools, full);
        }
    }

    /// Adds the drawn tokens to their requests.
    fn add_tokens(&mut self, drawn: Vec<Drawn>, events: &mut Vec<Event>) {
        for (at, token, logprob) in drawn {
            // A request that already got a token in this step has accepted it: the token was proposed, so its keys and values are in the cache.
            if self.running[at].pending() == 1 {
                self.extend_computed(at, 1);
                self.stats.accepted_tokens += 1;
            }
            let sequence = &mut self.running[at];
            sequence.push(token);
            self.stats.generated_tokens += 1;
            let cached_tokens = sequence.cached_tokens.unwrap_or(0);
            events.push(Event::Token { id: sequence.id, token, logprob, cached_tokens });
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
            let cached_tokens = sequence.cached_tokens.unwrap_or(0);
            events.push(Event::Finished { id: sequence.id, reason, cached_tokens });
            false
        });
    }
}
