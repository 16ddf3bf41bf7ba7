//! Proposals by a draft model, which has its own KV cache.

use crate::block_pool::BLOCK_SIZE;
use crate::blocks::{Pools, SequenceBlocks};
use crate::decode::{DecodeSteps, Scored};
use crate::request::{EngineOptions, RequestId};
use ottava_common::error::Result;
use ottava_models::{CacheSizes, Decoder, InferenceBatch, KvCache, SequenceTokens};
use ottava_tensor::{Device, Tensor};
use std::collections::HashMap;

/// The maximum number of tokens of a pass.
const ROWS: usize = 256;

/// A request for which tokens are proposed.
pub struct Wanted<'a> {
    /// The id of the request.
    pub id: RequestId,
    /// The tokens of the request so far.
    pub tokens: &'a [u32],
    /// The maximum number of proposed tokens.
    pub most: usize,
}

/// A draft model, which proposes its most likely tokens.
pub struct Draft {
    model: Decoder,
    tokens: usize,
    /// The maximum number of tokens of a sequence.
    positions: usize,
    /// The size of the smaller vocabulary of both models. Token ids from this number on are not proposed.
    vocabulary: usize,
    cache: KvCache,
    pools: Pools,
    /// The captured decode steps, on a GPU.
    steps: DecodeSteps,
    requests: HashMap<RequestId, Progress>,
}

/// The tokens of a request that the draft model has computed.
#[derive(Default)]
struct Progress {
    blocks: SequenceBlocks,
    /// The number of the request's tokens whose keys and values are in the cache.
    computed: usize,
    /// The proposed tokens that follow them in the cache.
    proposed: Vec<u32>,
    /// The number of tokens before the saved recurrent states, which have the number of the slot. 0 if no states are saved.
    saved: usize,
}

/// A proposal that is being computed.
struct Proposal {
    id: RequestId,
    /// The place of the proposal in the result.
    number: usize,
    /// The number of tokens whose keys and values are in the cache.
    computed: usize,
    /// The number of tokens of the request.
    certain: usize,
    /// The tokens to compute before the next token is proposed.
    pending: Vec<u32>,
    most: usize,
}

impl Draft {
    /// Makes a draft from `model`, whose weights must be cast. It proposes up to `tokens` tokens to an engine with these `options`, whose model has
    /// `vocabulary` tokens.
    ///
    /// Errors if there is not enough memory for its KV cache and its recurrent states.
    pub fn new(mut model: Decoder, tokens: usize, options: &EngineOptions, vocabulary: usize) -> Result<Draft> {
        model.scale_by_token()?;
        let positions = options.max_model_len.min(model.config().context());
        let vocabulary = vocabulary.min(model.config().vocabulary);
        let dtype = options.kv_cache_dtype.resolve(model.recipe().compute);
        let groups = model.kv_groups(positions).into_iter();
        let groups: Vec<_> = groups.map(|group| (group.clone(), options.blocks_of(&group))).collect();
        let slots = options.max_batch;
        // The states before the proposed tokens of each request are saved.
        let cache =
            model.kv_cache(CacheSizes { groups: &groups, block_size: BLOCK_SIZE, dtype, slots, saved: slots })?;
        let mut pools = Pools::new(groups.iter().map(|(group, blocks)| (group.window, *blocks)), slots, ROWS);
        if model.state_bytes() > 0 {
            pools = pools.with_states(0);
        }
        let (steps, requests) = (DecodeSteps::new(model.device(), None), HashMap::new());
        Ok(Draft { model, tokens, positions, vocabulary, cache, pools, steps, requests })
    }

    /// Returns the maximum number of tokens of a proposal.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns a proposal for each of `wanted`. A proposal is empty if memory or positions of the draft model do not suffice. The cache entries of
    /// requests that are not in `running` are dropped.
    ///
    /// Errors in the same cases as a forward pass.
    pub fn propose(&mut self, running: &[RequestId], wanted: &[Wanted]) -> Result<Vec<Vec<u32>>> {
        let Draft { requests, pools, .. } = self;
        requests.retain(|id, progress| {
            let stays = running.contains(id);
            if !stays {
                pools.put_back(&mut progress.blocks);
            }
            stays
        });
        let numbered = wanted.iter().enumerate();
        let begun = numbered.filter_map(|(number, one)| self.begin(number, one).transpose());
        let mut open: Vec<Proposal> = begun.collect::<Result<_>>()?;
        let mut proposed = vec![Vec::new(); wanted.len()];
        while !open.is_empty() {
            let pieces = self.pieces(&mut open);
            let next = self.likeliest(&open, &pieces)?;
            for ((proposal, piece), next) in open.iter_mut().zip(pieces).filter(|(_, piece)| *piece > 0).zip(next) {
                let progress = self.requests.get_mut(&proposal.id).expect("it was begun");
                let computed: Vec<u32> = proposal.pending.drain(..piece).collect();
                proposal.computed += piece;
                let beyond = proposal.computed.saturating_sub(proposal.certain).min(piece);
                progress.computed += piece - beyond;
                progress.proposed.extend(&computed[piece - beyond..]);
                if self.pools.has_states() && proposal.computed == proposal.certain {
                    let slot = progress.blocks.slot();
                    self.cache.save_states(slot, slot)?;
                    progress.saved = progress.computed;
                }
                let own: &mut Vec<u32> = &mut proposed[proposal.number];
                // A proposal ends at a token that the engine's model does not have, or at logits that are not finite.
                if proposal.pending.is_empty() && (0..self.vocabulary as i32).contains(&next) {
                    own.push(next as u32);
                    proposal.pending.extend((own.len() < proposal.most).then_some(next as u32));
                }
            }
            open.retain(|proposal| !proposal.pending.is_empty());
        }
        Ok(proposed)
    }

    /// Begins a proposal after the tokens of the request that are in the cache.
    fn begin(&mut self, number: usize, wanted: &Wanted) -> Result<Option<Proposal>> {
        let &Wanted { id, tokens, most } = wanted;
        let most = most.min(self.tokens);
        let is_known = |&token: &u32| (token as usize) < self.vocabulary;
        let progress = self.requests.entry(id).or_default();
        let Progress { computed, proposed, saved, .. } = progress;
        // The tokens of the last proposal that the request has accepted are in the cache.
        let accepted = proposed.iter().zip(&tokens[*computed..]).take_while(|(a, b)| a == b).count();
        let reached = *computed + proposed.len();
        *computed = (*computed + accepted).min(tokens.len() - 1);
        proposed.clear();
        // The cache has the recurrent states after all proposed tokens.
        if self.pools.has_states() && *computed != reached {
            if (1..=*computed).contains(saved) {
                *computed = *saved;
                let slot = progress.blocks.slot();
                self.cache.restore_states(slot, slot)?;
            } else {
                self.pools.put_back(&mut progress.blocks);
                *progress = Progress::default();
            }
        }
        let (computed, certain) = (progress.computed, tokens.len());
        let pending = tokens[computed..].to_vec();
        let fits = most > 0 && tokens.len() + most <= self.positions && pending.iter().all(is_known);
        Ok(fits.then_some(Proposal { id, number, computed, certain, pending, most }))
    }

    /// Returns the number of tokens of each proposal that the next pass computes, and takes blocks for them. A proposal ends if no blocks are left.
    fn pieces(&mut self, open: &mut [Proposal]) -> Vec<usize> {
        let mut room = ROWS;
        let piece = |proposal: &mut Proposal| {
            let piece = proposal.pending.len().min(room);
            let progress = self.requests.get_mut(&proposal.id).expect("it was begun");
            // A block leaves a window only if no token after the certain tokens sees it, since proposed tokens may be rejected.
            if !self.pools.extend(&mut progress.blocks, progress.computed, proposal.computed + piece) {
                self.pools.put_back(&mut progress.blocks);
                *progress = Progress::default();
                proposal.pending.clear();
                return 0;
            }
            room -= piece;
            piece
        };
        open.iter_mut().map(piece).collect()
    }

    /// Computes `pieces` of proposals, and returns the most likely token after each piece that is not empty.
    fn likeliest(&mut self, open: &[Proposal], pieces: &[usize]) -> Result<Vec<i32>> {
        let Draft { model, cache, steps, requests, .. } = self;
        let pieces = open.iter().zip(pieces).filter(|(_, piece)| **piece > 0);
        let sequences: Vec<SequenceTokens> = pieces
            .map(|(&Proposal { id, computed, ref pending, .. }, &piece)| {
                let blocks = &requests[&id].blocks;
                SequenceTokens::new(computed, &pending[..piece], &blocks.tables).in_slot(blocks.slot())
            })
            .collect();
        if sequences.is_empty() {
            return Ok(Vec::new());
        }
        let mut end = 0;
        let last = |sequence: &SequenceTokens| {
            end += sequence.new.len();
            end - 1
        };
        let last: Vec<usize> = sequences.iter().map(last).collect();
        if let Device::Cuda(_) = model.device() {
            let scored = steps.run(model, None, cache, &SequenceTokens::rows(&sequences), None)?;
            let all = scored.likeliest.to_vec::<i32>()?;
            return Ok(last.into_iter().map(|row| all[row]).collect());
        }
        let hidden = model.hidden(&InferenceBatch::padded(model.device(), &sequences)?, cache)?;
        let rows: Vec<i32> = last.iter().map(|&row| row as i32).collect();
        let rows = Tensor::from_slice(model.device(), &[rows.len()], &rows)?;
        Ok(Scored::score(model, &hidden, &rows)?.likeliest.to_vec()?)
    }
}
