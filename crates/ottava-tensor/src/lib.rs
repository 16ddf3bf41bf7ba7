//! Tensors, FP8 formats and the ops of LLM training. Each op runs on the CPU and on CUDA.
//!
//! A product of two small matrices:
//!
//! ```
//! use ottava_tensor::ops::{Accumulation, Operand, gemm_nt};
//! use ottava_tensor::{DType, Device, Tensor};
//!
//! let x = Tensor::from_slice(&Device::Cpu, &[1, 2], &[1.0f32, 2.0])?;
//! let w = Tensor::from_slice(&Device::Cpu, &[2, 2], &[3.0f32, 4.0, 5.0, 6.0])?;
//! let y = gemm_nt(Operand::plain(&x), Operand::plain(&w), DType::F32, Accumulation::Exact)?;
//! assert_eq!(y.to_vec::<f32>()?, [11.0, 17.0]);
//! # Ok::<(), ottava_tensor::Error>(())
//! ```
//!
//! Building this crate never needs CUDA: no Cargo feature selects it, and nothing links to it. A library is loaded when it is first needed, and
//! a missing library is an `Error::Library` with a remedy. Only this crate has `unsafe` code, and the other crates forbid it.
//!
//! Modules are arranged in floors. A file imports only from its own floor or from lower floors:
//!
//! - 0: formats and errors (`dtype`, `fp4`, `fp8`, `element`, `granularity`, `error`, `capability`)
//! - 1: memory and devices (`tensor`, `quantized`, `device`, `host_transfer`, `cuda`)
//! - 2: `ops` and `comm`, which use both
//!
//! No file has only shapes or only rounding. Shapes are slices of `usize`, checked at the start of each op. Rounding to nearest even is in
//! `fp8.rs` and `element.rs`. Stochastic rounding is in `ops/adamw/`, because only this op needs it.

pub mod bench;
pub mod capability;
pub mod comm;
pub mod cuda;
pub mod device;
pub mod dtype;
pub mod element;
pub mod error;
pub mod fp4;
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
pub use granularity::{Granularity, GranularityInfo, Microscaling};
pub use host_transfer::{HostTransfer, discard_mirrors};
pub use quantized::QuantizedTensor;
pub use snapshot::Snapshot;
pub use staging::Staging;
pub use stored::{ExpandedTensor, Nf4Tensor, ScaledTensor};
pub use tensor::{Suspended, Tensor};
