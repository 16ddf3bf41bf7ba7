//! A GPU in a dry run: the pool of a real one over memory that does not exist.

use super::ahead::Workload;
use super::cudnn::{AttentionShape, Pass};
use super::driver::Context;
use super::lock::lock;
use super::pool::Backing;
use super::trace::Trace;
use crate::error::{Error, Result};
use crate::ledger::Ledger;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// What a plan must know of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuModel {
    /// The product name.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// Streaming multiprocessors.
    pub sm_count: usize,
    /// Bytes that tensors can have.
    pub memory: usize,
}

impl GpuModel {
    /// Bytes that an open GPU has taken for itself: seen on an H200.
    const CONTEXT: usize = 512 << 20;

    /// Bytes that are left to libraries, kernels and recorded steps. Seen on an H200: 80 MiB after a small model's steps.
    const RESERVE: usize = 512 << 20;

    /// What tensors can have of the `total` bytes of a GPU.
    pub fn usable(total: usize) -> usize {
        total.saturating_sub(GpuModel::CONTEXT + GpuModel::RESERVE)
    }

    /// What tensors can have of the bytes that are `free` on a GPU that is open.
    pub(super) fn usable_of_free(free: usize) -> usize {
        free.saturating_sub(GpuModel::RESERVE)
    }

    /// An H200, with what nobody else has taken of its 139.8 GiB.
    pub fn h200() -> GpuModel {
        let memory = GpuModel::usable(150_110_011_392);
        GpuModel { name: "NVIDIA H200".into(), capability: (9, 0), sm_count: 132, memory }
    }
}

/// Where a device's segments come from.
pub(super) enum Memory {
    /// The driver.
    Driver(Arc<Context>),
    /// Nowhere: addresses are as good as real ones, and there are as many as a GPU has memory.
    Dry(DryMemory),
}

/// Addresses handed out, each with its size.
pub(super) struct DryMemory {
    capacity: usize,
    live: Mutex<BTreeMap<u64, usize>>,
}

impl DryMemory {
    pub(super) fn new(capacity: usize) -> DryMemory {
        DryMemory { capacity, live: Mutex::default() }
    }

    fn taken(&self) -> usize {
        lock(&self.live).values().sum()
    }
}

/// Segments lie on multiples of this, as the driver's do.
const SEGMENT_ALIGNMENT: u64 = 2 << 20;

impl Backing for Memory {
    fn allocate(&self, bytes: usize) -> Result<Option<u64>> {
        match self {
            Memory::Driver(context) => context.allocate(bytes),
            Memory::Dry(memory) if memory.taken().saturating_add(bytes) > memory.capacity => Ok(None),
            Memory::Dry(memory) => {
                let mut live = lock(&memory.live);
                let end = live.last_key_value().map_or(0, |(at, size)| at + *size as u64);
                let address = (end + 1).next_multiple_of(SEGMENT_ALIGNMENT);
                live.insert(address, bytes);
                Ok(Some(address))
            }
        }
    }

    fn free(&self, pointer: u64) -> Result<()> {
        match self {
            // SAFETY: the pool waits for the stream before it gives an unused segment back.
            Memory::Driver(context) => unsafe { context.free(pointer) },
            Memory::Dry(memory) => {
                lock(&memory.live).remove(&pointer);
                Ok(())
            }
        }
    }

    fn synchronize(&self) -> Result<()> {
        match self {
            Memory::Driver(context) => context.synchronize(),
            Memory::Dry(_) => Ok(()),
        }
    }

    fn memory_info(&self) -> Result<(usize, usize)> {
        match self {
            Memory::Driver(context) => context.memory_info(),
            Memory::Dry(memory) => Ok((memory.capacity - memory.taken(), memory.capacity)),
        }
    }
}

/// A GPU that is not there.
#[derive(Default)]
pub(super) struct DryGpu {
    pub(super) ledger: Arc<Ledger>,
    pub(super) trace: Trace,
    /// What was launched so far.
    pub(super) workload: Mutex<Workload>,
}

impl DryGpu {
    /// Bytes of scratch memory that cuDNN 9.14 plans for a pass on an H200, as `graphs_are_planned_for_hopper_from_a_description` saw
    /// them: next to nothing, but for the gradients of keys and values of each query head where heads share them, and for the gradients of scores
    /// where a product reads them.
    pub(super) fn attention_workspace(shape: &AttentionShape, pass: Pass) -> usize {
        let per_head = (shape.lse_len() * shape.head_dim * 2).next_multiple_of(256);
        let tiles = shape.seq.next_multiple_of(64) * shape.seq.next_multiple_of(128);
        let scores = if shape.deterministic { shape.batch * shape.heads * tiles * 2 } else { 0 };
        match pass {
            Pass::Forward => 256,
            Pass::Backward if shape.heads != shape.kv_heads => 256 + scores + 2 * per_head,
            Pass::Backward => 256 + scores,
        }
    }
}

/// What a dry run cannot do.
pub(super) fn not_there(what: &str) -> Error {
    Error::Value(format!("{what}: the GPU of a dry run does nothing"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Device, Tensor};

    const MIB: usize = 1 << 20;

    #[test]
    fn memory_ends_where_that_of_the_model_ends() {
        let device = Device::dry_gpu(GpuModel { memory: 100 * MIB, ..GpuModel::h200() });
        let kept = Tensor::empty(&device, &[80 * MIB], DType::E4M3).unwrap();
        let Err(Error::OutOfMemory { requested, free, total }) = Tensor::empty(&device, &[30 * MIB], DType::E4M3)
        else {
            panic!("there are 20 MiB left");
        };
        assert_eq!((requested, free, total), (30 * MIB, 20 * MIB, 100 * MIB));
        drop(kept);
        Tensor::empty(&device, &[90 * MIB], DType::E4M3).expect("idle segments go back first");
    }

    /// Byte for byte what [`super::super::plan_attention`] said on an H200 with cuDNN 9.14.
    #[test]
    fn attention_takes_the_scratch_memory_that_cudnn_planned() {
        for (deterministic, batch, heads, kv_heads, head_dim, seq, backward) in [
            (false, 2, 4, 4, 128, 512, 256),
            (false, 2, 4, 2, 128, 100, 409_856),
            (false, 2, 2, 1, 8, 16, 2304),
            (false, 4, 32, 32, 128, 2048, 256),
            (false, 8, 32, 8, 128, 1024, 134_217_984),
            (false, 8, 14, 2, 64, 1024, 29_360_384),
            (false, 16, 16, 4, 64, 512, 33_554_688),
            (false, 3, 6, 3, 40, 777, 2_238_208),
            (true, 2, 4, 4, 128, 512, 4_194_560),
            (true, 2, 4, 2, 128, 100, 672_000),
            (true, 2, 2, 1, 8, 16, 67_840),
            (true, 2, 3, 3, 96, 777, 8_945_920),
            (true, 2, 3, 3, 96, 4096, 201_326_848),
        ] {
            let shape =
                AttentionShape { deterministic, ..AttentionShape::fused([batch, seq], heads, kv_heads, head_dim) };
            assert_eq!(DryGpu::attention_workspace(&shape, Pass::Forward), 256);
            assert_eq!(DryGpu::attention_workspace(&shape, Pass::Backward), backward, "{shape:?}");
        }
    }
}
