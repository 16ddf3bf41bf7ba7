//! Tensors, FP8 formats and the ops of LLM training, each on the CPU and on CUDA.

pub mod bench;
pub mod crossing;
pub mod cuda;
pub mod device;
pub mod dtype;
pub mod element;
pub mod error;
pub mod fp8;
pub mod granularity;
pub mod ledger;
pub mod ops;
pub mod quantized;
pub mod stored;
pub mod tensor;
pub mod testing;

pub use crossing::{Crossing, evict};
pub use device::{Device, Home};
pub use dtype::DType;
pub use error::{Error, Result};
pub use granularity::Granularity;
pub use quantized::QuantizedTensor;
pub use stored::{Expanded, Scaled};
pub use tensor::Tensor;
