//! The encoding of activations and their gradients that ranks send: between neighbours of a pipeline, and as partial sums of ranks that divide
//! tensors or experts.

use ottava_common::error::{Error, Result};
use ottava_tensor::ops::{decode_gradients, encode_gradients, gradient_code_bytes};
use ottava_tensor::{DType, Tensor};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The number of elements that must divide the size of a tensor whose codes are sent.
const ELEMENTS: usize = 256;

/// The type in which ranks send activations and their gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SentActivations {
    /// The compute type.
    #[default]
    Auto,
    /// E4M3 codes with a power-of-two scale (E8M0) for each 128 values, of BF16 and F32.
    Float8,
}

impl SentActivations {
    /// Returns whether tensors of `dtype` are sent as codes.
    fn encodes(self, dtype: DType) -> bool {
        self == SentActivations::Float8 && matches!(dtype, DType::BF16 | DType::F32)
    }

    /// Returns the tensor that is sent for `x`: codes, or `x` itself. Errors refer to `x` by `name`.
    pub(super) fn encode(self, name: &str, x: &Tensor) -> Result<Tensor> {
        if !self.encodes(x.dtype()) {
            return Ok(x.clone());
        }
        expect_elements(name, x)?;
        Ok(encode_gradients(x, 1, None, None)?)
    }

    /// Returns a tensor that can receive the result of `encode` for a tensor like `x`. Errors refer to `x` by `name`.
    pub(super) fn place(self, name: &str, x: Tensor) -> Result<Tensor> {
        if !self.encodes(x.dtype()) {
            return Ok(x);
        }
        expect_elements(name, &x)?;
        Ok(Tensor::empty(x.device(), &[1, gradient_code_bytes(x.len())], DType::E4M3)?)
    }

    /// Decodes `received`, which holds tensors of `elements` elements of `dtype`, one after the other.
    pub(super) fn decode(self, received: Tensor, elements: usize, dtype: DType) -> Result<Tensor> {
        if !self.encodes(dtype) {
            return Ok(received);
        }
        let bytes = gradient_code_bytes(elements);
        Ok(decode_gradients(&received.reshape(&[received.len() / bytes, bytes])?, elements, dtype)?)
    }
}

fn expect_elements(name: &str, x: &Tensor) -> Result<()> {
    if x.len().is_multiple_of(ELEMENTS) {
        return Ok(());
    }
    Err(Error::Config(format!(
        "{name} has shape {:?}, {} values, but `parallel.communication.activation_dtype = \"float8\"` needs a multiple of {ELEMENTS}; change `data.max_length` or `training.per_device_train_batch_size`, or set `parallel.communication.activation_dtype = \"auto\"`",
        x.shape(),
        x.len()
    )))
}
