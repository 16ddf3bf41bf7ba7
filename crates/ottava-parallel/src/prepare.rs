//! The values that ranks compute together before an update that transforms whole matrices.

use crate::matrices::{Divided, MatrixPlan};
use crate::optim::{self, Optimizer, Prepared};
use crate::tensor::flat;
use crate::{Partition, Shared};
use ottava_common::error::Result;
use ottava_recipe::param::Param;
use ottava_tensor::Tensor;

impl Partition {
    /// Returns the ends of the parts of `params` that are updated one after the other. A part has one unit per rank. Ranks then transform equal
    /// numbers of matrices, and the directions of few units are in memory.
    pub(super) fn ends_of_parts(&self, params: &[&mut Param]) -> Vec<usize> {
        let part = |at: usize| params[at].identity.id.unit.0 / self.ranks().sharing(Shared::Slices).size();
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
        let ranks = self.ranks().sharing(Shared::Slices);
        let transformed: Vec<usize> = (0..params.len()).filter(|&at| optimizer.transforms(params[at])).collect();
        let divided = transformed.iter().map(|&at| self.divided(params[at])).collect();
        let mut flat =
            transformed.iter().map(|&at| directions[at].take().map(flat).transpose()).collect::<Result<Vec<_>>>()?;
        let plan = MatrixPlan::new(divided, ranks.size());
        let device = params[0].weights.device();
        plan.transform(ranks, !self.divides(), device, &mut flat, |matrix| optimizer.transform(matrix))?;
        transformed.into_iter().zip(flat).for_each(|(at, direction)| directions[at] = direction);
        let mut prepared = Prepared { amaxes: None, directions };
        prepared.amaxes = self.amaxes(params, start, optimizer, &prepared, norm)?;
        Ok(prepared)
    }

    /// Returns the matrices of a parameter, and the elements that each rank updates.
    fn divided(&self, param: &Param) -> Divided {
        let matrices = param.identity.shards.iter().map(|shard| shard.shape().try_into().expect("a matrix")).collect();
        let buckets = self.buckets();
        let place = buckets.iter().find_map(|bucket| Some((bucket, bucket.number_of(param)?)));
        let (bucket, at) = place.expect("the matrices of several ranks are in buckets");
        let slice = |rank| match self.divides() {
            true => bucket.slices.owned(rank).swap_remove(at),
            false => param.slice(),
        };
        Divided { matrices, slices: (0..self.ranks().sharing(Shared::Slices).size()).map(slice).collect() }
    }
}
