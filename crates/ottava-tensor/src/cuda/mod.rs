//! CUDA: one device with its context, stream, memory pool, kernels and libraries, which are found at run time.
//!
//! This crate links to no CUDA library. Each library is opened when it is first needed. If a library is missing, the [`Error`](crate::Error) names
//! it. The work of a device goes through one stream in the order of the calls, except copies between host and device memory (`transfer.rs`) and
//! collectives (`nccl.rs`, `peers.rs`).
//!
//! Kernels and products have one compute stream and run in the order of their calls. Freed memory can thus be reused at once. Copies between host and
//! device memory have two streams, collectives have one, and messages of a pipeline have one per direction. Events order these streams, so that
//! callers see one stream.
//!
//! | file | what it wraps or does |
//! |---|---|
//! | `load.rs` | finds libraries, and loads the functions of a library in one call |
//! | `driver.rs`, `nvrtc.rs`, `cublaslt.rs`, `cudnn.rs`, `nccl.rs`, `nvml.rs` | wrap one library each |
//! | `peers.rs` | copies to the GPU memory of other processes, which CUDA IPC opens |
//! | `kernel.rs`, `launch.rs` | describe and launch kernels |
//! | `pool.rs`, `dry.rs` | allocate device memory, and simulate a device without memory for dry runs |
//! | `graph.rs` | captures and replays CUDA graphs |
//! | `ahead.rs`, `shipped.rs` | provide kernels that are compiled before they are needed |
//! | `trace.rs`, `profile.rs` | write launches as text for tests, and measure the time of each call on the device for `ottava bench train` |
//!
//! Kernels are CUDA C++ next to the Rust code. NVRTC compiles them for the GPU in use, without contraction of multiply and add. Cubins are cached
//! on disk by the hash of source, options and compiler version. A program built with `OTTAVA_KERNELS` contains cubins. Constants that a
//! kernel shares with Rust are defined in Rust and passed to NVRTC as macros (`Source::constants`). Cache files are replaced by rename, so that
//! several processes may write them at once.

mod ahead;
mod beside;
mod buffer;
mod cublaslt;
mod cudnn;
mod device;
mod driver;
mod dry;
mod graph;
mod inventory;
mod kernel;
mod launch;
mod load;
mod lock;
mod nccl;
mod nvml;
mod nvrtc;
mod peers;
mod pinned;
mod pool;
mod profile;
mod shipped;
mod symmetric;
#[cfg(test)]
mod tests;
mod trace;
mod transfer;

pub use ahead::{Workload, compile_all, pack_kernels};
pub(crate) use beside::Beside;
pub use buffer::DeviceBuffer;
pub(crate) use buffer::FormerBuffer;
pub(crate) use cublaslt::GemmPointers;
pub use cublaslt::{GemmSpec, Major, ScaleMode};
pub(crate) use cudnn::{AttentionBackward, AttentionForward, DocumentPointers, ScoreFactors};
pub use cudnn::{AttentionShape, plan_attention};
#[cfg(test)]
pub(crate) use device::test_device;
pub use device::{BatchInvariance, CudaDevice};
pub use driver::{Event, PeerLink};
pub use dry::GpuModel;
pub use graph::Graph;
pub use inventory::inventory;
pub(crate) use kernel::DEFAULT_SHARED_BYTES;
pub use kernel::{Arg, BoxDim, Defines, Entry, Kernel, KernelModule, Kind, Parameter, Signature, Source, TensorMap};
pub use load::{LIBRARY_PATH_VARIABLE, LibraryReport, searched_places};
pub(crate) use nccl::{Collective, Message, NcclComm, NcclId, NcclOp, require_nccl};
pub use nvrtc::{CACHE_VARIABLE, arch_of, compile};
pub(crate) use peers::{PeerCopy, Peers};
pub use pinned::PinnedBuffer;
pub use pool::MemoryStats;
pub use profile::{Call, HOST_TRANSFER};
pub(crate) use symmetric::{Place, SymmetricHeap};
pub(crate) use transfer::Transfer;
