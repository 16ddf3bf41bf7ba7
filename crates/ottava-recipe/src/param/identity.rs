//! The identity of a parameter: its place in the model, and the tensors of a model folder that it holds.

use super::builder::Init;
use super::id::ParamId;
use super::shard::{Shard, Split};
use ottava_common::hash::name_hash;
use std::ops::Range;

/// What a parameter is, from when its layer is built: neither loading nor training changes it.
pub struct Identity {
    /// Its place in the model.
    pub id: ParamId,
    /// The parts of tensors of a model folder that it holds, stacked along the first dimension.
    pub shards: Vec<Shard>,
    /// Its initial values without a model folder.
    pub init: Init,
    /// Its place in a stack of experts that ranks divide; `None` for all other parameters.
    pub(super) stack: Option<Stack>,
    /// Whether it belongs to a block.
    pub(super) in_block: bool,
}

/// The place of a parameter in the stack of the experts of all ranks.
pub(super) struct Stack {
    /// The first tensor of the stack.
    pub first: String,
    /// Whether this rank has it.
    pub is_here: bool,
}

impl Identity {
    /// The name of the first tensor, also if another rank has it.
    pub fn name(&self) -> &str {
        self.stack.as_ref().map_or(&self.shards[0].tensor.name, |stack| &stack.first)
    }

    /// The seed of stochastic rounding: a hash of the name of the first tensor of this rank, so that it does not depend on the other
    /// parameters of a process.
    pub fn seed(&self) -> u64 {
        name_hash(0, &self.shards[0].tensor.name)
    }

    /// Whether it is a matrix; norms and biases are vectors.
    pub fn is_matrix(&self) -> bool {
        self.shards[0].tensor.shape.len() > 1
    }

    /// Whether it is a matrix of a block, rather than an embedding, the head, a norm or a bias.
    pub fn is_hidden_matrix(&self) -> bool {
        self.in_block && self.is_matrix()
    }

    /// Whether all ranks of the tensor axis have the same elements of it: norms, biases that are added to sums over ranks, learned
    /// positions, projections to latents, routers and what is beside the experts that ranks divide, and the halves of adapters that are not
    /// divided.
    pub fn is_whole(&self) -> bool {
        self.shards.iter().all(|shard| shard.split == Split::None)
    }

    /// The ranks of the tensor axis that have the same key and value heads, or the same latents, while other ranks have other elements; 1 if
    /// no other rank has elements of it.
    pub fn replicas(&self) -> usize {
        self.shards.iter().map(|shard| shard.replica.ranks).max().unwrap_or(1)
    }

    /// Whether it is of experts that ranks divide.
    pub fn is_of_experts(&self) -> bool {
        self.stack.is_some()
    }

    /// Whether this rank has the first element of what the ranks with other experts have together.
    pub fn begins_stack(&self) -> bool {
        self.stack.as_ref().is_none_or(|stack| stack.is_here)
    }

    /// The elements of the shards that `are_meant`, among the elements `slice` of the flat parameter, and counted from the first of `slice`:
    /// ascending and not adjacent.
    pub fn elements_of(&self, slice: Range<usize>, are_meant: impl Fn(&Shard) -> bool) -> Vec<Range<usize>> {
        let (mut end, mut found) = (0, Vec::<Range<usize>>::new());
        for shard in &self.shards {
            let start = end;
            end += shard.elements();
            let (from, to) = (start.max(slice.start), end.min(slice.end));
            if from >= to || !are_meant(shard) {
                continue;
            }
            let piece = from - slice.start..to - slice.start;
            match found.last_mut().filter(|last| last.end == piece.start) {
                Some(last) => last.end = piece.end,
                None => found.push(piece),
            }
        }
        found
    }

    /// The shards that contain `elements` of the flat parameter, with the ranges of their flat tensors.
    pub(super) fn pieces(&self, elements: Range<usize>) -> Vec<(&Shard, Range<usize>)> {
        let (mut pieces, mut start) = (Vec::new(), 0);
        for shard in &self.shards {
            let end = start + shard.elements();
            let (from, to) = (elements.start.max(start), elements.end.min(end));
            if from < to {
                pieces.extend(shard.folder_ranges(from - start..to - start).into_iter().map(|range| (shard, range)));
            }
            start = end;
        }
        pieces
    }
}
