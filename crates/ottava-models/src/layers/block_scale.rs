//! A number that multiplies the output of a block, and that a folder stores. It is no parameter of training: transformers does not train it either.

use ottava_common::error::Result;
use ottava_recipe::param::{Builder, FolderTensor, Init, Param, Split};
use ottava_tensor::ops::{embedding, scale_columns};
use ottava_tensor::{DType, Tensor};

/// `y = number · x`.
pub struct BlockScale {
    /// The number, `[1]` in the type of sums.
    number: Param,
    /// Zeros, I32 `[C]`, by which the number is repeated for each column.
    columns: Tensor,
}

impl BlockScale {
    /// Creates the number that a folder has in the tensor `name`, for activations of `channels` columns.
    pub fn new(build: &mut Builder, name: String, channels: usize) -> Result<BlockScale> {
        let shard = build.shard(FolderTensor::new(name, vec![1]), Split::None)?;
        let number = Param::new(build, vec![shard], Init::Ones)?.in_sums(build);
        Ok(BlockScale { number, columns: Tensor::zeros(build.device, &[channels], DType::I32)? })
    }

    /// Returns `x` `[T, C]` times the number.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let number = self.number.weights.value()?.reshape(&[1, 1])?;
        let factors = embedding(&number, &self.columns)?.reshape(&[self.columns.len()])?;
        Ok(scale_columns(x, &factors)?)
    }

    /// Returns the gradient by `x` from the gradient by the result.
    pub fn backward(&mut self, dy: &Tensor) -> Result<Tensor> {
        if self.number.is_trained() {
            // A gradient of zeros makes the update leave the number unchanged.
            self.number.gradient.sum_mut()?;
        }
        self.apply(dy)
    }

    /// Returns the number.
    pub fn parameter(&self) -> &Param {
        &self.number
    }

    /// Returns the number mutably.
    pub fn parameter_mut(&mut self) -> &mut Param {
        &mut self.number
    }
}
