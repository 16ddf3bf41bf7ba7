//! Loads a model that ranks divide. Each rank reads only the elements that it stores.

use crate::frozen::divide_frozen;
use crate::{Partition, Shared, Zero};
use ottava_common::error::Result;
use ottava_common::hash::name_hash;
use ottava_models::Decoder;
use ottava_recipe::param::{FolderCodes, FolderTensor, Init, Param, WeightSource};
use ottava_tensor::comm::Reduce;
use ottava_tensor::ops::checksums;
use ottava_tensor::{Device, Granularity, Nf4Tensor, Tensor};
use std::ops::Range;

/// The number of first elements of a divided tensor that all ranks hash.
const DIGESTED: usize = 1024;

impl Partition {
    /// Loads the weights of `model` that this rank stores. A rank reads only its slices of divided trained matrices, so loading takes no
    /// more memory than training. Frozen matrices are divided unit by unit, because they are cast whole.
    ///
    /// Returns a digest of the elements that all ranks with the same layers read: whole tensors, and the first elements of divided tensors. The
    /// digest of a single rank is 0. Ranks that loaded different weights have different digests.
    pub fn load(&self, model: &mut Decoder, weights: &mut dyn WeightSource) -> Result<u64> {
        let is_compared = self.ranks().size() > 1 && !matches!(model.device(), Device::DryCpu(_));
        let mut weights = Digested { weights, sum: 0, is_whole: false };
        let load = |param: &mut Param| {
            weights.is_whole = is_compared && !param.is_sliced();
            param.load(&mut weights, &mut |name, amax| {
                Ok(self.ranks().sharing(Shared::Elements).all_reduce(name, Reduce::Max, amax)?.wait()?)
            })?;
            if is_compared && param.is_sliced() { weights.add_first(param) } else { Ok(()) }
        };
        let divides_frozen = self.divides() && self.zero() == Zero::Weights;
        model.load_each(load, |unit| {
            if divides_frozen {
                self.frozen().extend(divide_frozen(unit, self.ranks())?);
            }
            Ok(())
        })?;
        if !self.ranks().have_whole_model() {
            model.expect_all(weights.weights)?;
        }
        Ok(weights.sum)
    }
}

/// A source that hashes weights while they are read.
struct Digested<'a> {
    weights: &'a mut dyn WeightSource,
    sum: u64,
    /// Whether all ranks read the whole current tensor.
    is_whole: bool,
}

impl Digested<'_> {
    fn add(&mut self, tensor: &FolderTensor, values: &Tensor) -> Result<()> {
        if !values.is_empty() {
            let checksum = checksums(&[values])?.to_vec::<i64>()?[0];
            self.sum = self.sum.wrapping_add(name_hash(checksum as u64, &tensor.name));
        }
        Ok(())
    }

    /// Hashes the first elements of the tensors of `param`.
    fn add_first(&mut self, param: &Param) -> Result<()> {
        for shard in &param.identity.shards {
            let first = 0..shard.tensor.elements().min(DIGESTED);
            let values = self.weights.read(&shard.tensor, first, param.identity.init)?;
            self.add(&shard.tensor, &values)?;
        }
        Ok(())
    }
}

impl WeightSource for Digested<'_> {
    fn read(&mut self, tensor: &FolderTensor, elements: Range<usize>, init: Init) -> Result<Tensor> {
        let values = self.weights.read(tensor, elements, init)?;
        if self.is_whole {
            self.add(tensor, &values)?;
        }
        Ok(values)
    }

    fn codes(&mut self, tensor: &FolderTensor, granularity: Granularity) -> Result<FolderCodes> {
        let found = self.weights.codes(tensor, granularity)?;
        if let (true, FolderCodes::Codes { codes, .. }) = (self.is_whole, &found) {
            self.add(tensor, codes)?;
        }
        Ok(found)
    }

    fn packed(&mut self, tensor: &FolderTensor, device: &Device) -> Result<Option<Nf4Tensor>> {
        let found = self.weights.packed(tensor, device)?;
        if let (true, Some(Nf4Tensor { codes, scales, groups, .. })) = (self.is_whole, &found) {
            [codes, scales, groups].into_iter().try_for_each(|part| self.add(tensor, part))?;
        }
        Ok(found)
    }
}
