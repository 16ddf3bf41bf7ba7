//! Tensors, FP8 formats and the ops of LLM training, each on the CPU and on CUDA.

pub mod cuda;
pub mod dtype;
pub mod error;
pub mod mapped;

pub use dtype::DType;
pub use error::{Error, Result};
