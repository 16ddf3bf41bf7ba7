//! The groups of hierarchical ZeRO: ranks that divide parameters among them, and ranks that store the same slices.
//!
//! The ranks of data x context with the same other coordinates are cut into shard groups of consecutive ranks. Ranks of a shard group divide the
//! parameters. The ranks at the same place of all shard groups store the same slices.

use super::{Axis, Mesh, MeshShape, ShardGroups};
use crate::comm::group::Group;
use crate::error::{Error, Result};

impl MeshShape {
    /// Errors with [`Error::Value`] if groups of `size` ranks do not divide the ranks of data x context evenly, or do not have each expert.
    pub fn check_shards(&self, size: usize) -> Result<()> {
        let all = self.data * self.context;
        if size == 0 || !all.is_multiple_of(size) {
            return Err(Error::Value(format!(
                "shard groups have {size} ranks, and data x context has {all}; choose a divisor of {all}"
            )));
        }
        if !size.is_multiple_of(self.expert) {
            return Err(Error::Value(format!(
                "shard groups have {size} ranks, and the expert axis has {}; choose a multiple of {}",
                self.expert, self.expert
            )));
        }
        Ok(())
    }

    /// Returns the place of `rank` among the ranks of data x context, and the number of its coordinates on the other axes.
    fn place_of_rows(&self, rank: usize) -> (usize, usize) {
        let [data, context, tensor, pipeline] =
            [Axis::Data, Axis::Context, Axis::Tensor, Axis::Pipeline].map(|axis| self.coordinate(rank, axis));
        (data * self.context + context, pipeline * self.tensor + tensor)
    }
}

impl Mesh {
    /// Cuts the ranks of data x context into shard groups of `size` ranks, for [`Mesh::shard_group`] and [`Mesh::slice_replicas`]. All ranks must call
    /// it. With all ranks of data x context in one group, this changes nothing.
    ///
    /// Errors like [`MeshShape::check_shards`] and [`Group::split`].
    pub fn with_shards(mut self, size: usize) -> Result<Mesh> {
        let shape = self.shape;
        shape.check_shards(size)?;
        let rows = shape.data * shape.context;
        if size == rows {
            return Ok(self);
        }
        let split = |name: &str, colour: &dyn Fn(usize, usize) -> usize| {
            self.world().split_by(name, |rank| {
                let (place, other) = shape.place_of_rows(rank);
                (other * rows + colour(place, place / size), rank)
            })
        };
        let shard = split("shard group", &|_, group| group)?;
        let replicas = split("replicas of slices", &|place, _| place % size)?;
        let of_experts = match shape.expert {
            1 => None,
            expert => Some(split("shard group of experts", &|place, group| group * expert + place % expert)?),
        };
        self.shards = Some(ShardGroups { shard, of_experts, replicas });
        Ok(self)
    }

    /// Returns the ranks that divide parameters with this rank, if ranks divide parameters: of experts, or all others.
    pub fn shard_group(&self, of_experts: bool) -> &Group {
        match &self.shards {
            None if of_experts => self.expert_replicas(),
            None => self.group(&[Axis::Data, Axis::Context]),
            Some(ShardGroups { of_experts: Some(group), .. }) if of_experts => group,
            Some(shards) => &shards.shard,
        }
    }

    /// Returns the ranks that store the same slices as this rank, this rank included.
    pub fn slice_replicas(&self) -> &Group {
        self.shards.as_ref().map_or(&self.alone, |shards| &shards.replicas)
    }
}
