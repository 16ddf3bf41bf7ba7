//! The whole weights of parameters that ranks divide.

use crate::Partition;
use ottava_common::error::Result;
use ottava_recipe::param::{Param, Shard};
use ottava_tensor::Tensor;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::transpose;

impl Partition {
    /// Returns the whole weight of a parameter as on a single rank. It joins the [`Partition::value`] of each rank of the tensor and expert axes. The
    /// ranks must call it for the same parameters in the same order.
    pub fn whole_value(&self, param: &Param) -> Result<Tensor> {
        let (own, place) = (self.value(param)?, self.ranks().place(Axis::Tensor));
        if param.identity.is_of_experts() {
            // The experts are in the order of the ranks of expert x tensor.
            return self.ranks().start_gather(Axis::Expert, param.identity.name(), &own)?.wait();
        }
        if !place.is_divided() || param.identity.is_whole() {
            return Ok(own);
        }
        self.joined(param.identity.name(), &param.identity.shards, own)
    }

    /// Returns the whole tensors of `shards`, one after another, from `own`, the shards of this rank. The ranks of the tensor axis must call it for the
    /// same shards in the same order. `name` is for messages.
    pub(super) fn joined(&self, name: &str, shards: &[Shard], own: Tensor) -> Result<Tensor> {
        let place = self.ranks().place(Axis::Tensor);
        // Columns are transposed to rows, which are contiguous.
        let by_columns = shards[0].dim == 1;
        let own = if by_columns { transpose(&own)? } else { own };
        let (all, rows) = (self.ranks().start_gather(Axis::Tensor, name, &own)?.wait()?, own.shape()[0]);
        drop(own);
        let mut shape = all.shape().to_vec();
        // If several ranks have the same key and value heads, the whole tensor has fewer rows than all ranks together.
        shape[0] = tensors_of(shards).map(|shards| shards[0].tensor.shape[shards[0].dim]).sum();
        let (mut whole, mut first, mut at) = (Tensor::empty(all.device(), &shape, all.dtype())?, 0, 0);
        for shards in tensors_of(shards) {
            for shard in shards {
                let end = at + shard.range.len();
                for rank in 0..place.ranks {
                    let part = all.rows(rank * rows + at, rank * rows + end)?;
                    whole.copy_from(first + shard.first_of(rank, place), &part)?;
                }
                at = end;
            }
            first += shards[0].tensor.shape[shards[0].dim];
        }
        Ok(if by_columns { transpose(&whole)? } else { whole })
    }
}

/// Returns the shards of this rank of the `whole` tensor that they divide, as the inverse of [`Partition::joined`] for a single tensor.
pub(super) fn part_of(whole: &Tensor, shards: &[Shard]) -> Result<Tensor> {
    let by_columns = shards[0].dim == 1;
    let whole = if by_columns { transpose(whole)? } else { whole.clone() };
    let mut shape = whole.shape().to_vec();
    shape[0] = shards.iter().map(|shard| shard.range.len()).sum();
    let (mut part, mut at) = (Tensor::empty(whole.device(), &shape, whole.dtype())?, 0);
    for Shard { range, .. } in shards {
        part.copy_from(at, &whole.rows(range.start, range.end)?)?;
        at += range.len();
    }
    Ok(if by_columns { transpose(&part)? } else { part })
}

/// Returns the shards of each tensor. A fused tensor has several shards.
pub(super) fn tensors_of(shards: &[Shard]) -> impl Iterator<Item = &[Shard]> {
    shards.chunk_by(|a, b| a.tensor.name == b.tensor.name)
}
