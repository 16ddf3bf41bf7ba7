//! Values that a layer computes and later layers read, beside the residual stream.
//!
//! The layer that computes a value puts it into the `SharedValues` of the pass. A stage keeps the values of forward for backward, in which layers
//! run in the opposite order: each reader adds its part to the gradient by the value, and at last the layer that computed the value takes the sum.

use ottava_common::error::{Error, Result};
use ottava_tensor::Tensor;
use ottava_tensor::ops::add;
use std::collections::BTreeMap;

/// The names of shared values. Blocks are numbered in the whole model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SharedKey {
    /// The keys and then the values of the attention of this block, `[T, 2·H_kv·D]`, as attention reads them.
    KeysAndValues(usize),
    /// The embedding of each token for this block, `[T, C]`.
    LayerEmbedding(usize),
}

/// The values that layers of a stage share in a pass, and the gradients by these values.
#[derive(Default)]
pub struct SharedValues {
    values: BTreeMap<SharedKey, Tensor>,
    gradients: BTreeMap<SharedKey, Tensor>,
}

impl SharedValues {
    /// Stores a value for later layers. A recomputed value replaces the same value.
    pub fn put(&mut self, key: SharedKey, value: Tensor) {
        self.values.insert(key, value);
    }

    /// Returns a value.
    ///
    /// Errors if no layer of the pass has computed it: ranks of a pipeline have divided the layers.
    pub fn get(&self, key: SharedKey) -> Result<Tensor> {
        self.values.get(&key).cloned().ok_or_else(|| {
            Error::Config(format!(
                "no layer of this stage of the pipeline has computed {key:?}; set `parallel.pipeline` to 1"
            ))
        })
    }

    /// Adds `gradient` to the gradient by a value. The sum has the type of the parts.
    pub fn add_gradient(&mut self, key: SharedKey, gradient: Tensor) -> Result<()> {
        let sum = match self.gradients.remove(&key) {
            Some(sum) => add(&sum, &gradient)?,
            None => gradient,
        };
        self.gradients.insert(key, sum);
        Ok(())
    }

    /// Takes the gradient by a value, or `None` if no layer has read the value.
    pub fn take_gradient(&mut self, key: SharedKey) -> Option<Tensor> {
        self.gradients.remove(&key)
    }
}
