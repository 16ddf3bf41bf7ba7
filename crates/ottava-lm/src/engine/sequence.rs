//! A request in progress.

use super::blocks::SequenceBlocks;
use super::request::{Request, RequestId, TokenLogprob};
use super::sampler::{self, Occurrences};
use crate::models::SequenceTokens;
use ottava_tensor::ops::Draw;

/// A request, its tokens so far, and its place in the KV cache.
pub struct Sequence {
    pub id: RequestId,
    pub request: Request,
    /// Prompt and output.
    pub tokens: Vec<u32>,
    /// Tokens whose keys and values are in the cache.
    pub computed: usize,
    /// The blocks of the cache that hold them.
    pub blocks: SequenceBlocks,
    /// Counts of tokens, for requests with penalties.
    pub seen: Occurrences,
    /// Tokens at which it ends.
    pub max_len: usize,
    /// Log-probabilities of the tokens of the prompt so far, for requests with `prompt_logprobs`.
    pub prompt_logprobs: Vec<Option<TokenLogprob>>,
}

impl Sequence {
    /// A request that is not begun, which ends at `max_len` tokens.
    pub fn new(id: RequestId, request: Request, max_len: usize) -> Sequence {
        let (tokens, seen) = (request.prompt.clone(), Occurrences::of_prompt(&request.prompt));
        let (computed, blocks, prompt_logprobs) = (0, SequenceBlocks::default(), Vec::new());
        Sequence { id, tokens, computed, blocks, seen, max_len, prompt_logprobs, request }
    }

    /// Tokens to compute before the next one can be drawn.
    pub fn pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Tokens drawn so far.
    pub fn drawn(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// Tokens that cannot be drawn yet.
    fn barred(&self) -> &[u32] {
        if self.drawn() < self.request.min_new_tokens { &self.request.stop_ids } else { &[] }
    }

    /// Whether its next token is the most likely one by the unmodified logits, without log-probabilities.
    pub fn is_plain(&self) -> bool {
        self.barred().is_empty() && self.request.sampling.is_plain() && self.request.logprobs.is_none()
    }

    /// The settings for drawing its next token.
    pub fn draw(&self) -> Draw {
        sampler::draw(&self.request.sampling, &self.seen, self.barred(), self.drawn())
    }

    /// Its next `new` tokens.
    pub fn next(&self, new: usize) -> SequenceTokens<'_> {
        SequenceTokens { tokens: &self.tokens[..self.computed + new], new, blocks: &self.blocks.tables }
    }

    /// Whether a pass over positions from `computed` on has to score tokens of the prompt.
    pub fn scores_prompt(&self) -> bool {
        self.request.prompt_logprobs.is_some() && self.prompt_logprobs.len() < self.request.prompt.len()
    }
}
