//! Tensors, FP8 formats and the ops of LLM training, each on the CPU and on CUDA.

pub mod bench;
pub mod capability;
pub mod comm;
pub mod cuda;
pub mod device;
pub mod dtype;
pub mod element;
pub mod error;
pub mod fp8;
pub mod granularity;
pub mod host_transfer;
pub mod ops;
mod parts;
pub mod planted;
mod poison;
pub mod quantized;
pub mod snapshot;
pub mod staging;
pub mod stored;
pub mod tensor;
pub mod testing;
pub mod tracker;
mod wide;

pub use capability::{Capability, Feature};
pub use device::{Device, MemoryKind};
pub use dtype::DType;
pub use error::{Error, RankFault, Result};
pub use granularity::Granularity;
pub use host_transfer::{HostTransfer, discard_mirrors};
pub use quantized::QuantizedTensor;
pub use snapshot::Snapshot;
pub use staging::Staging;
pub use stored::{ExpandedTensor, ScaledTensor};
pub use tensor::Tensor;
