//! Runs steps before the first request, so that no request waits for the first step of a size.

use crate::batching::Engine;
use crate::passes::MOST_ROWS;
use crate::proposer::Proposer;
use crate::request::{AdapterId, EngineOptions, Request};
use crate::sampling::Sampling;
use ottava_common::error::Result;
use ottava_models::PREFILL_MULTIPLE;
use ottava_tensor::Device;

/// The number of tokens drawn in each size. The first step compiles kernels and measures the speed of products, the second is captured, and the third
/// is replayed.
const DRAWN: usize = 3;

impl Engine {
    /// Computes prompts and decode steps of all padded sizes on a GPU, for each adapter and without adapters. This compiles kernels, measures the
    /// speed of products and captures graphs. The decode steps use one block of the KV cache per sequence. Steps with more blocks are captured when
    /// they occur. Does nothing on a CPU, or for an encoder, which decodes no tokens.
    ///
    /// Errors in the same cases as [`Engine::step`].
    pub fn warm_up(&mut self) -> Result<()> {
        if !matches!(self.model().device(), Device::Cuda(_)) || self.model().config().is_encoder() {
            return Ok(());
        }
        let before = self.stats;
        let EngineOptions { prefix_caching, max_batch, .. } = self.options;
        // All prompts begin with the same tokens, so with prefix caching only parts of them would be computed.
        self.options.prefix_caching = false;
        // Rows of proposed tokens count as further requests. With recurrent states, there are no slots for further requests, so steps with rows of proposed
        // tokens are captured when they occur.
        let proposer = self.proposer.take();
        let proposed = proposer.as_ref().filter(|_| !self.pools.has_states()).map_or(0, Proposer::tokens);
        let rows = max_batch * (1 + proposed);
        self.options.max_batch = rows.min(max_batch.max(MOST_ROWS));
        let adapters = (0..self.adapters.len()).map(|number| Some(AdapterId(number)));
        for adapter in std::iter::once(None).chain(adapters) {
            self.run_sizes(adapter)?;
        }
        self.stats = before;
        self.proposer = proposer;
        (self.options.prefix_caching, self.options.max_batch) = (prefix_caching, max_batch);
        Ok(())
    }

    fn run_sizes(&mut self, adapter: Option<AdapterId>) -> Result<()> {
        let EngineOptions { max_batch, prefill_chunk, .. } = self.options;
        let last_prompt = self.max_model_len().saturating_sub(1);
        if last_prompt == 0 {
            return Ok(());
        }
        if self.fixed_rows().is_some() {
            return self.run_alike(adapter, 1, 1);
        }
        if self.reads_tokens_as_rows() {
            // Tokens of prompts are rows of the same passes as drawn tokens.
            self.run_alike(adapter, 1, MOST_ROWS.min(last_prompt))?;
        } else if self.keeps_invariant() {
            // No product is tuned, so the largest pass suffices.
            let count = prefill_chunk.div_ceil(last_prompt).min(max_batch);
            self.run_alike(adapter, count, prefill_chunk.min(last_prompt))?;
        } else {
            // Whole prompts are run, and one prompt with a chunk that reads the cache. The largest prompt runs first, and smaller prompts reuse its
            // memory.
            let whole = (1..=prefill_chunk / PREFILL_MULTIPLE).map(|count| count * PREFILL_MULTIPLE);
            let prompts = whole.chain([prefill_chunk.saturating_add(PREFILL_MULTIPLE / 2).min(last_prompt)]);
            for tokens in prompts.rev().filter(|&tokens| tokens >= 1) {
                // A packed pass can have more tokens than the longest prompt, so it takes several prompts.
                let count = tokens.div_ceil(last_prompt);
                if count == 1 || self.packs_prompts && count <= max_batch {
                    self.run_alike(adapter, count, tokens / count)?;
                }
            }
        }
        let sizes =
            std::iter::successors(Some(1usize), |size| size.checked_mul(2)).take_while(|&size| size < max_batch);
        for size in sizes.chain([max_batch]) {
            self.run_alike(adapter, size, 1)?;
        }
        Ok(())
    }

    /// Runs `count` requests with prompts of `tokens` tokens to their end. They draw tokens, so the kernels of draws are launched too.
    fn run_alike(&mut self, adapter: Option<AdapterId>, count: usize, tokens: usize) -> Result<()> {
        for _ in 0..count {
            let sampling = Sampling { temperature: 1.0, ..Sampling::default() };
            let prompt = vec![0; tokens];
            self.add(Request { adapter, prompt, sampling, max_new_tokens: DRAWN, ..Request::default() })?;
        }
        while !self.is_idle() {
            self.step()?;
        }
        Ok(())
    }
}
