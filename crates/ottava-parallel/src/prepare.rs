//! The values that ranks compute together before an update that transforms whole matrices.

use crate::Partition;
use crate::matrices::{Divided, MatrixPlan};
use crate::optim::{self, Optimizer, Prepared};
use crate::tensor::flat;
use crate::whole::{part_of, tensors_of};
use ottava_common::error::Result;
use ottava_recipe::param::{Param, Shard};
use ottava_tensor::Tensor;
use ottava_tensor::comm::{Axis, Group};

impl Partition {
    /// Returns the ends of the parts of `params` that are updated one after the other. A part has one unit per rank. Ranks then transform equal
    /// numbers of matrices, and the directions of few units are in memory.
    pub(super) fn ends_of_parts(&self, params: &[&mut Param]) -> Vec<usize> {
        let part = |at: usize| params[at].identity.id.unit.0 / self.ranks().shard_group(false).size();
        (1..params.len()).filter(|&at| part(at) != part(at - 1)).collect()
    }

    /// Computes the inputs of an update of `params` that transforms matrices. The first of `params` is parameter number `start` of the model.
    pub(super) fn prepare(
        &self,
        params: &mut [&mut Param],
        start: usize,
        optimizer: &mut dyn Optimizer,
        norm: &Tensor,
    ) -> Result<Prepared> {
        let amaxes = self.amaxes(params, start, optimizer, &Prepared::default(), norm)?;
        let mut directions = optim::directions(optimizer, params, start, amaxes, norm)?;
        for experts in [false, true] {
            let is_of_kind = |param: &Param| param.identity.is_of_experts() == experts && optimizer.transforms(param);
            let transformed: Vec<usize> = (0..params.len()).filter(|&at| is_of_kind(params[at])).collect();
            if !transformed.is_empty() {
                self.transform(params, &transformed, optimizer, &mut directions)?;
            }
        }
        let mut prepared = Prepared { amaxes: None, directions };
        prepared.amaxes = self.amaxes(params, start, optimizer, &prepared, norm)?;
        Ok(prepared)
    }

    /// Replaces the directions of the parameters numbered `transformed` by directions with transformed matrices. All of these parameters have the same
    /// replicas.
    fn transform(
        &self,
        params: &[&mut Param],
        transformed: &[usize],
        optimizer: &dyn Optimizer,
        directions: &mut [Option<Tensor>],
    ) -> Result<()> {
        let of_experts = params[transformed[0]].identity.is_of_experts();
        let (ranks, device) = (self.transforming(of_experts), params[0].weights.device());
        let divided = transformed.iter().map(|&at| self.divided(params[at], ranks.size())).collect();
        let shards: Vec<&[Shard]> =
            transformed.iter().flat_map(|&at| tensors_of(&params[at].identity.shards)).collect();
        let mut flat =
            transformed.iter().map(|&at| directions[at].take().map(flat).transpose()).collect::<Result<Vec<_>>>()?;
        let plan = MatrixPlan::new(divided, ranks.size());
        let whole = |at: usize, own: &Tensor| self.transform_whole(optimizer, shards[at], own);
        plan.transform(ranks, !self.divides(), device, &mut flat, whole)?;
        for (&at, direction) in transformed.iter().zip(flat) {
            directions[at] = direction.map(|own| self.of_first_replica(params[at], own)).transpose()?;
        }
        Ok(())
    }

    /// Returns the ranks that share the transforms of matrices: the ranks that divide the matrices, or all replicas of undivided matrices.
    fn transforming(&self, of_experts: bool) -> &Group {
        if self.divides() { self.ranks().shard_group(of_experts) } else { self.ranks().replicas_of(of_experts) }
    }

    /// Sends a transformed `direction` of a slice from the first shard group to the others. So replicas of slices have the same bits even if GPUs
    /// choose different algorithms for a product.
    fn of_first_replica(&self, param: &Param, direction: Tensor) -> Result<Tensor> {
        if self.ranks().slice_replicas().size() == 1 || direction.is_empty() {
            return Ok(direction);
        }
        Ok(self.ranks().of_replicas(|group| group.broadcast(param.identity.name(), 0, direction))?.wait()?)
    }

    /// Returns this rank's part of the transform of a matrix. `own` is this rank's part of the matrix. If ranks of the tensor axis divide the matrix, each
    /// of them gathers and transforms it.
    fn transform_whole(&self, optimizer: &dyn Optimizer, shards: &[Shard], own: &Tensor) -> Result<Tensor> {
        let is_divided = shards.iter().any(|shard| shard.split.dim().is_some());
        if !is_divided || !self.ranks().place(Axis::Tensor).is_divided() {
            return optimizer.transform(own);
        }
        let whole = self.joined(&shards[0].tensor.name, shards, own.clone())?;
        part_of(&optimizer.transform(&whole)?, shards)
    }

    /// Returns this rank's parts of the matrices of a parameter, and the elements that each of `ranks` replicas updates.
    fn divided(&self, param: &Param, ranks: usize) -> Divided {
        let matrix = |shards: &[Shard]| {
            let [_, columns]: [usize; 2] = shards[0].shape().try_into().expect("a matrix");
            [shards.iter().map(|shard| shard.shape()[0]).sum(), columns]
        };
        let matrices = tensors_of(&param.identity.shards).map(matrix).collect();
        let buckets = self.buckets();
        // A single rank without replicas has no bucket.
        let bucket = buckets.iter().find_map(|bucket| Some((bucket, bucket.number_of(param)?)));
        let slice = |rank| match bucket.filter(|_| self.divides()) {
            Some((bucket, at)) => bucket.slices.owned(rank).swap_remove(at),
            None => param.slice(),
        };
        Divided { matrices, slices: (0..ranks).map(slice).collect() }
    }
}
