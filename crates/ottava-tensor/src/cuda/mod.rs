//! CUDA: one device with its context, stream, memory pool, kernels and libraries, found at run time.
//!
//! Nothing here links to CUDA. Each library is opened when first needed and each failure is an
//! [`Error`](crate::Error) that says what is missing. All work of a device goes through one stream, in the order of
//! the calls, except copies between host and device memory (`transfer.rs`) and collectives (`nccl.rs`, `peers.rs`).
//!
//! There is no second compute stream: all kernels and products run in call order, so freed memory can be reused at once. Copies between host and
//! device memory have two streams, collectives have one, and messages of a pipeline have one per direction; events order all streams, so callers
//! see one stream.
//!
//! | file | what it wraps or does |
//! |---|---|
//! | `load.rs` | finds libraries, and loads all functions of a library at once |
//! | `driver.rs`, `nvrtc.rs`, `cublaslt.rs`, `cudnn.rs`, `nccl.rs`, `nvml.rs` | one library each |
//! | `peers.rs` | copies to the GPU memory of other processes, opened by CUDA IPC |
//! | `kernel.rs`, `launch.rs` | kernels and their launch |
//! | `pool.rs`, `dry.rs` | device memory, and a device without memory for dry runs |
//! | `graph.rs` | capture and replay of CUDA graphs |
//! | `ahead.rs`, `shipped.rs` | kernels compiled before they are needed |
//! | `trace.rs`, `profile.rs` | launches as text, for tests; the time of each call on the device, for `ottava bench train` |
//!
//! Kernels are CUDA C++ next to the Rust code. NVRTC compiles them for the GPU in use, without contraction of multiply and add. Cubins are cached
//! on disk by the hash of source, options and compiler version. A program built with `OTTAVA_KERNELS` contains cubins of its own. Constants that a
//! kernel shares with Rust are defined in Rust and passed to NVRTC as macros (`Source::constants`). Cache files are replaced by rename, so several
//! processes may write them at once.

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
pub(crate) use cublaslt::GemmPointers;
pub use cublaslt::{GemmSpec, Major, ScaleMode};
pub(crate) use cudnn::{AttentionBackward, AttentionForward, DocumentPointers, ScoreFactors};
pub use cudnn::{AttentionShape, plan_attention};
pub use device::CudaDevice;
#[cfg(test)]
pub(crate) use device::test_device;
pub use driver::{Event, PeerLink};
pub use dry::GpuModel;
pub use graph::Graph;
pub use inventory::inventory;
pub(crate) use kernel::DEFAULT_SHARED_BYTES;
pub use kernel::{Arg, Defines, Entry, Kernel, KernelModule, Kind, Parameter, Signature, Source, TensorMap};
pub use load::{LIBRARY_PATH_VARIABLE, LibraryReport};
pub(crate) use nccl::{Collective, Message, NcclComm, NcclId, NcclOp, require_nccl};
pub use nvrtc::{CACHE_VARIABLE, arch_of, compile};
pub(crate) use peers::{PeerCopy, Peers};
pub use pinned::PinnedBuffer;
pub use pool::MemoryStats;
pub use profile::{Call, HOST_TRANSFER};
pub(crate) use symmetric::{Place, SymmetricHeap};
pub(crate) use transfer::Transfer;
