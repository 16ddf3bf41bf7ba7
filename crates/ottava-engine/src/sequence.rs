//! A request in progress.

use crate::block_pool::{BLOCK_SIZE, BlockKey, key_after, key_of_adapter};
use crate::blocks::{Pools, SequenceBlocks, Shared};
use crate::grammar::{Allowed, Place};
use crate::masks::{Constraint, Mask};
use crate::request::{FinishReason, Request, RequestId, TokenLogprob};
use crate::sampler::{self, Occurrences};
use crate::state_marks::StateMarks;
use ottava_tensor::ops::Draw;

/// A request, its tokens so far, and its place in the KV cache.
pub struct Sequence {
    pub id: RequestId,
    pub request: Request,
    /// The tokens of the prompt and the output.
    pub tokens: Vec<u32>,
    /// The proposed tokens, which the step verifies.
    pub proposed: Vec<u32>,
    /// The number of tokens whose keys and values are in the cache. The recurrent states are the states after these tokens.
    pub computed: usize,
    /// The blocks of the cache that hold the computed tokens.
    pub blocks: SequenceBlocks,
    /// The keys of the full blocks, from the first block on.
    keys: Vec<BlockKey>,
    /// Its saved recurrent states.
    pub states: StateMarks,
    /// The counts of tokens, for requests with penalties.
    pub seen: Occurrences,
    /// The number of tokens at which the sequence ends.
    pub max_len: usize,
    /// The constraint of the completion by its grammar.
    pub constraint: Option<Constraint>,
    /// Whether the next step does not draw a token of this request.
    pub rests: bool,
    /// The reason why the grammar has ended the completion.
    pub end: Option<FinishReason>,
    /// The log-probabilities of the prompt's tokens so far, for requests with `prompt_logprobs`, until they are reported.
    pub prompt_logprobs: Vec<Option<TokenLogprob>>,
    /// Whether the log-probabilities of the prompt were reported.
    pub is_scored: bool,
    /// The number of tokens of the prompt that were in the cache when the request began.
    pub cached_tokens: Option<usize>,
    /// The sum of the activations of the prompt so far, for requests with `pooling`.
    pub pooled: Vec<f64>,
    /// Whether the embedding was reported.
    pub is_pooled: bool,
}

impl Sequence {
    /// Makes a request that has not begun. It ends at `max_len` tokens.
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
            states: StateMarks::default(),
            seen,
            max_len,
            constraint,
            rests: false,
            end,
            prompt_logprobs,
            cached_tokens: None,
            is_scored,
            pooled,
            is_pooled,
            request,
        }
    }

    /// Computes the keys of the first `count` blocks, which must be full.
    fn extend_keys(&mut self, count: usize) {
        for block in self.tokens.chunks_exact(BLOCK_SIZE).take(count).skip(self.keys.len()) {
            let before = self.keys.last().copied().or(self.request.adapter.map(key_of_adapter));
            self.keys.push(key_after(before.as_ref(), block));
        }
    }

    /// Returns the key of the full block `number`.
    pub fn key_of_block(&mut self, number: usize) -> BlockKey {
        self.extend_keys(number + 1);
        self.keys[number]
    }

    /// Takes the blocks of the cache that hold its first tokens. The last token is always computed, since the next token is drawn from its logits.
    /// Recurrent states at the end of these blocks must be copied from [`Shared::state`].
    pub fn share(&mut self, pools: &mut Pools) -> Shared {
        let most = (self.tokens.len() - 1) / BLOCK_SIZE;
        self.extend_keys(most);
        let shared = pools.share(&mut self.blocks, &self.keys[..most]);
        self.computed = BLOCK_SIZE * shared.blocks;
        shared
    }

    /// Lets other sequences share its full blocks from number `first` on.
    pub fn publish(&mut self, pools: &mut Pools, first: usize) {
        let full = self.computed / BLOCK_SIZE;
        if full > first {
            self.extend_keys(full);
            pools.publish(&self.blocks, &self.keys[..full], first);
        }
    }

    /// Returns its blocks to the pools.
    pub fn put_back(&mut self, pools: &mut Pools) {
        pools.put_back(&mut self.blocks);
        self.states.put_back(&mut pools.saved);
        self.computed = 0;
        self.proposed.clear();
        self.pooled.clear();
    }

    /// Returns the number of tokens to compute before the next token can be drawn.
    pub fn pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Returns the number of tokens at which a pass must end, since recurrent states are saved there.
    pub fn next_stop(&self) -> usize {
        self.states.next_stop(self.computed)
    }

    /// Returns whether the next step draws a token: only its last token is to be computed, after tokens that are computed again.
    pub fn draws_next(&self) -> bool {
        self.pending() <= 1 + self.states.repeated && !self.rests
    }

    /// Returns the number of tokens that the next step can compute. If the step does not draw a token, the last token is left out.
    pub fn due(&self) -> usize {
        (self.pending() - usize::from(self.rests)).min(self.next_stop() - self.computed)
    }

    /// Returns whether the mask of its next token is not computed yet.
    pub fn awaits_mask(&self) -> bool {
        self.constraint.as_ref().is_some_and(Constraint::is_pending)
    }

    /// Returns whether its masks are computed quickly. Returns true without a grammar.
    pub fn has_quick_masks(&self) -> bool {
        self.constraint.as_ref().is_none_or(Constraint::is_quick)
    }

    /// Returns the number of tokens drawn so far.
    pub fn drawn(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// Returns the tokens that cannot be drawn after `drawn` drawn tokens.
    fn barred(&self, drawn: usize) -> &[u32] {
        if drawn < self.request.min_new_tokens { &self.request.stop_ids } else { &[] }
    }

    /// Returns whether the token after `ahead` further tokens is the most likely token by the unmodified logits, without log-probabilities.
    pub fn is_plain(&self, ahead: usize) -> bool {
        let Request { sampling, logprobs, .. } = &self.request;
        let is_free = self.constraint.is_none() && self.barred(self.drawn() + ahead).is_empty();
        is_free && sampling.is_plain() && logprobs.is_none()
    }

    /// Returns the settings for drawing its next token, and the settings for drawing the token after each proposed token if all earlier proposed
    /// tokens are accepted. If the grammar allows no token, ends the request and returns no settings.
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

    /// Returns whether a step can draw its next token before the host knows its last token.
    pub fn can_draw_ahead(&self) -> bool {
        let depends = self.constraint.is_some() || self.request.sampling.counts_tokens();
        !depends && !self.rests && self.pending() <= 1 && !self.reads_activations()
    }

    /// Returns the settings for drawing the token after `ahead` further tokens, which must not depend on these tokens.
    pub fn draw_after(&self, ahead: usize) -> Draw {
        self.draw(&self.seen, ahead, None)
    }

    /// Returns the settings for drawing the token after `ahead` further tokens.
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

    /// Returns its next `new` tokens. Proposed tokens are the last of them.
    pub fn next(&self, new: usize) -> Vec<u32> {
        self.tokens[self.computed..].iter().chain(&self.proposed).take(new).copied().collect()
    }

    /// Returns whether a pass over positions from `computed` on must score tokens of the prompt.
    pub fn scores_prompt(&self) -> bool {
        self.request.prompt_logprobs.is_some() && !self.is_scored
    }

    /// Returns whether a pass over positions from `computed` on must pool tokens of the prompt.
    pub fn pools(&self) -> bool {
        self.request.pooling.is_some() && !self.is_pooled
    }

    /// Returns whether a pass reads the activations of more tokens than the last one.
    pub fn reads_activations(&self) -> bool {
        self.scores_prompt() || self.pools()
    }
}

/// Returns the reason why a completion ends in this state of its grammar, if it ends.
fn end_at(place: Place) -> Option<FinishReason> {
    match place {
        Place::Open => None,
        Place::Complete => Some(FinishReason::Stop),
        Place::Stuck => Some(FinishReason::Stuck),
    }
}
