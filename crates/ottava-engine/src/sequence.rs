//! A request in progress.

use crate::block_pool::{BLOCK_SIZE, BlockKey, key_after, key_of_adapter};
use crate::blocks::{Pools, SequenceBlocks};
use crate::grammar::{Allowed, Place};
use crate::masks::{Constraint, Mask};
use crate::request::{FinishReason, Request, RequestId, TokenLogprob};
use crate::sampler::{self, Occurrences};
use ottava_tensor::ops::Draw;

/// A request, its tokens so far, and its place in the KV cache.
pub struct Sequence {
    pub id: RequestId,
    pub request: Request,
    /// Prompt and output.
    pub tokens: Vec<u32>,
    /// Tokens that may follow, which the step verifies.
    pub proposed: Vec<u32>,
    /// Tokens whose keys and values are in the cache.
    pub computed: usize,
    /// The blocks of the cache that hold them.
    pub blocks: SequenceBlocks,
    /// The keys of full blocks of its tokens, from the first on.
    keys: Vec<BlockKey>,
    /// Counts of tokens, for requests with penalties.
    pub seen: Occurrences,
    /// Tokens at which it ends.
    pub max_len: usize,
    /// The grammar of its completion.
    pub constraint: Option<Constraint>,
    /// Whether the next step draws no token of it.
    pub rests: bool,
    /// How it has ended in its grammar.
    pub end: Option<FinishReason>,
    /// Log-probabilities of the tokens of the prompt so far, for requests with `prompt_logprobs`, until they are reported.
    pub prompt_logprobs: Vec<Option<TokenLogprob>>,
    /// Whether they were reported.
    pub is_scored: bool,
    /// The sum of the activations of its prompt so far, for requests with `pooling`.
    pub pooled: Vec<f64>,
    /// Whether its embedding was reported.
    pub is_pooled: bool,
}

impl Sequence {
    /// A request that is not begun, which ends at `max_len` tokens.
    pub fn new(id: RequestId, mut request: Request, max_len: usize) -> Sequence {
        let (tokens, seen) = (request.prompt.clone(), Occurrences::of_prompt(&request.prompt));
        let constraint = request.grammar.take().map(Constraint::new);
        let (computed, blocks, keys, prompt_logprobs) = (0, SequenceBlocks::default(), Vec::new(), Vec::new());
        let (proposed, end, pooled, is_pooled, is_scored) = (Vec::new(), None, Vec::new(), false, false);
        Sequence {
            id,
            tokens,
            proposed,
            computed,
            blocks,
            keys,
            seen,
            max_len,
            constraint,
            rests: false,
            end,
            prompt_logprobs,
            is_scored,
            pooled,
            is_pooled,
            request,
        }
    }

    /// Computes the keys of its first `count` blocks, which have all their tokens.
    fn extend_keys(&mut self, count: usize) {
        for block in self.tokens.chunks_exact(BLOCK_SIZE).take(count).skip(self.keys.len()) {
            let before = self.keys.last().copied().or(self.request.adapter.map(key_of_adapter));
            self.keys.push(key_after(before.as_ref(), block));
        }
    }

    /// Takes the blocks of the cache that hold its first tokens. The last token is computed in any case: the next one is drawn from it.
    pub fn share(&mut self, pools: &mut Pools) {
        let most = (self.tokens.len() - 1) / BLOCK_SIZE;
        self.extend_keys(most);
        self.computed = BLOCK_SIZE * pools.share(&mut self.blocks, &self.keys[..most]);
    }

    /// Lets others share its blocks from number `first` on that are full.
    pub fn publish(&mut self, pools: &mut Pools, first: usize) {
        let full = self.computed / BLOCK_SIZE;
        if full > first {
            self.extend_keys(full);
            pools.publish(&self.blocks, &self.keys[..full], first);
        }
    }

    /// Gives its blocks back.
    pub fn put_back(&mut self, pools: &mut Pools) {
        pools.put_back(&mut self.blocks);
        self.computed = 0;
        self.proposed.clear();
        self.pooled.clear();
    }

    /// Tokens to compute before the next one can be drawn.
    pub fn pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Tokens that the next step can compute: all before the last one if no token is drawn after it.
    pub fn due(&self) -> usize {
        self.pending() - usize::from(self.rests)
    }

    /// Whether the mask of its next token is still to be computed.
    pub fn awaits_mask(&self) -> bool {
        self.constraint.as_ref().is_some_and(Constraint::is_pending)
    }

    /// Whether its masks, if it has any, take little time.
    pub fn has_quick_masks(&self) -> bool {
        self.constraint.as_ref().is_none_or(Constraint::is_quick)
    }

    /// Tokens drawn so far.
    pub fn drawn(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// Tokens that cannot be drawn after `drawn` others.
    fn barred(&self, drawn: usize) -> &[u32] {
        if drawn < self.request.min_new_tokens { &self.request.stop_ids } else { &[] }
    }

    /// Whether its next token is the most likely one by the unmodified logits, without log-probabilities.
    pub fn is_plain(&self) -> bool {
        let Request { sampling, logprobs, .. } = &self.request;
        let is_free = self.constraint.is_none() && self.barred(self.drawn()).is_empty();
        is_free && sampling.is_plain() && logprobs.is_none()
    }

    /// The settings for drawing its next token, and then the token after each proposed token, as if that one was drawn. None if its grammar allows no
    /// token, which ends it.
    pub fn draws(&mut self) -> Vec<Draw> {
        let mut constrained = None;
        match self.constraint.as_ref().map(|constraint| &constraint.mask) {
            None => {}
            Some(Mask::Ready(computed)) => match &computed.allowed {
                Ok(allowed) => constrained = Some((&computed.grammar, allowed)),
                Err(place) => {
                    self.end = end_at(*place);
                    return Vec::new();
                }
            },
            Some(Mask::Due(_) | Mask::Pending) => unreachable!("a request without a mask rests"),
        }
        let mut draws = vec![self.draw(&self.seen, 0, constrained.map(|(_, allowed)| allowed))];
        if self.proposed.is_empty() {
            return draws;
        }
        let mut seen = self.seen.clone();
        let mut ahead = constrained.map(|(grammar, allowed)| (grammar.clone(), allowed.clone()));
        for (number, &token) in (1..).zip(&self.proposed) {
            if let Some((grammar, allowed)) = &mut ahead {
                if !allowed.allows(token) || grammar.push(token) != Place::Open {
                    break;
                }
                let Ok(after) = grammar.allowed() else { break };
                *allowed = after;
            }
            seen.add(token);
            draws.push(self.draw(&seen, number, ahead.as_ref().map(|(_, allowed)| allowed)));
        }
        draws
    }

    /// The settings for drawing the token after `ahead` more of them.
    fn draw(&self, seen: &Occurrences, ahead: usize, allowed: Option<&Allowed>) -> Draw {
        let drawn = self.drawn() + ahead;
        let mut draw = sampler::draw(&self.request.sampling, seen, self.barred(drawn), drawn);
        if let Some(allowed) = allowed {
            sampler::bar(&mut draw, allowed.barred());
        }
        draw
    }

    /// Adds a drawn token.
    pub fn push(&mut self, token: u32) {
        self.tokens.push(token);
        self.seen.add(token);
        if let Some(constraint) = &mut self.constraint {
            self.end = end_at(constraint.push(token));
        }
    }

    /// Its next `new` tokens; proposed tokens are the last.
    pub fn next(&self, new: usize) -> Vec<u32> {
        self.tokens[self.computed..].iter().chain(&self.proposed).take(new).copied().collect()
    }

    /// Whether a pass over positions from `computed` on has to score tokens of the prompt.
    pub fn scores_prompt(&self) -> bool {
        self.request.prompt_logprobs.is_some() && !self.is_scored
    }

    /// Whether a pass over positions from `computed` on has to pool tokens of the prompt.
    pub fn pools(&self) -> bool {
        self.request.pooling.is_some() && !self.is_pooled
    }

    /// Whether a pass reads the activations of more of its tokens than the last.
    pub fn reads_activations(&self) -> bool {
        self.scores_prompt() || self.pools()
    }
}

/// Why a completion ends at a place of its grammar, if it does.
fn end_at(place: Place) -> Option<FinishReason> {
    match place {
        Place::Open => None,
        Place::Complete => Some(FinishReason::Stop),
        Place::Stuck => Some(FinishReason::Stuck),
    }
}
