//! The identity of a parameter: its position in the model, and the tensors of a model folder that it holds.

use super::builder::Init;
use super::id::ParamId;
use super::shard::{Shard, Split};
use ottava_common::hash::name_hash;
use std::ops::Range;

/// The properties of a parameter that never change after its layer is built.
pub struct Identity {
    /// The position in the model.
    pub id: ParamId,
    /// The parts of tensors of a model folder that the parameter holds, stacked along the first dimension.
    pub shards: Vec<Shard>,
    /// The initial values without a model folder.
    pub init: Init,
    /// The place in a stack of experts that ranks divide. `None` for all other parameters.
    pub(super) stack: Option<Stack>,
    /// Whether the parameter belongs to a block.
    pub(super) in_block: bool,
}

/// The place of a parameter in the stack of the experts of all ranks.
pub(super) struct Stack {
    /// The first tensor of the stack.
    pub first: String,
    /// Whether this rank has the first tensor.
    pub is_here: bool,
}

impl Identity {
    /// Returns the name of the first tensor, even if another rank has the tensor.
    pub fn name(&self) -> &str {
        self.stack.as_ref().map_or(&self.shards[0].tensor.name, |stack| &stack.first)
    }

    /// Returns the seed of stochastic rounding. It is a hash of the name of this rank's first tensor, so it does not depend on the other
    /// parameters of a process.
    pub fn seed(&self) -> u64 {
        name_hash(0, &self.shards[0].tensor.name)
    }

    /// Returns whether the parameter is a matrix. Norms and biases are vectors.
    pub fn is_matrix(&self) -> bool {
        self.shards[0].tensor.shape.len() > 1
    }

    /// Returns whether the parameter is a matrix of a block. Embeddings, the head, norms, biases and convolutions are not.
    pub fn is_hidden_matrix(&self) -> bool {
        self.in_block && self.shards[0].tensor.shape.len() == 2
    }

    /// Returns whether all ranks of the tensor axis have the same elements. Such parameters are norms, biases that are added to sums over ranks,
    /// learned positions, projections to latents, routers and undivided parameters of mixtures, and the halves of adapters that are not divided.
    pub fn is_whole(&self) -> bool {
        self.shards.iter().all(|shard| shard.split == Split::None)
    }

    /// Returns how many ranks of the tensor axis have the same key and value heads, or the same latents, while other ranks have other elements.
    /// Returns 1 if no other rank has the same elements.
    pub fn replicas(&self) -> usize {
        self.shards.iter().map(|shard| shard.replica.ranks).max().unwrap_or(1)
    }

    /// Returns whether the parameter belongs to experts that ranks divide.
    pub fn is_of_experts(&self) -> bool {
        self.stack.is_some()
    }

    /// Returns whether this rank has the first element of the stack. It is true if ranks divide no stack of experts.
    pub fn begins_stack(&self) -> bool {
        self.stack.as_ref().is_none_or(|stack| stack.is_here)
    }

    /// Returns the elements of the shards that `are_meant`, within the elements `slice` of the flat parameter. The ranges are relative to the start
    /// of `slice`, ascending and not adjacent.
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

    /// Returns the shards that contain `elements` of the flat parameter, with ranges of their flat folder tensors.
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
