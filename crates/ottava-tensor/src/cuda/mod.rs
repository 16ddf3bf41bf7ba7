//! CUDA: one device with its context, stream, memory pool, kernels and libraries, found at run time.
//!
//! Nothing here links to CUDA. Each library is opened when first needed and each failure is an
//! [`Error`](crate::Error) that says what is missing. All work of a device goes through one stream, in the order of
//! the calls, except copies between host and device memory (`transfer.rs`) and collectives (`nccl.rs`, `peers.rs`).

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
pub use kernel::{Arg, Defines, Kernel, KernelModule, Source, TensorMap};
pub use load::{LIBRARY_PATH_VARIABLE, LibraryReport};
pub(crate) use nccl::{Collective, Message, NcclComm, NcclId, NcclOp, require_nccl};
pub use nvrtc::{CACHE_VARIABLE, arch_of, compile};
pub(crate) use peers::{PeerCopy, Peers};
pub use pinned::PinnedBuffer;
pub use pool::MemoryStats;
pub use profile::{Call, HOST_TRANSFER};
pub(crate) use symmetric::{Place, SymmetricHeap};
pub(crate) use transfer::Transfer;
