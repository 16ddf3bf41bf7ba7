//! A GPU in a dry run. It has the memory pool of a real GPU, with addresses without memory.
//!
//! A dry run is a `CudaDevice` without a context. It checks calls, enqueues nothing, and reads return zeros. Its memory comes from the same pool,
//! with unmapped addresses. Because of this, CUDA code up to the launch runs on a machine without a GPU, and the memory of a plan is the memory of
//! the run. A dry run of the CPU is `Device::DryCpu`, an arm of `dispatch!` in `ops/dispatch.rs`. `tracker.rs` accounts for memory by scope, and the
//! plan of `ottava-train` reads these accounts.

use super::ahead::Workload;
use super::cudnn::{AttentionPass, AttentionShape};
use super::driver::Context;
use super::lock::lock;
use super::pool::Backing;
use super::trace::Trace;
use crate::error::{Error, Result};
use crate::tracker::MemoryTracker;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// The properties of a GPU that a plan needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuModel {
    /// The product name.
    pub name: String,
    /// The compute capability, major and minor.
    pub capability: (i32, i32),
    /// The number of streaming multiprocessors.
    pub sm_count: usize,
    /// The number of bytes available to tensors.
    pub memory: usize,
}

impl GpuModel {
    /// The number of bytes that an open context takes, measured on an H200.
    const CONTEXT: usize = 512 << 20;

    /// The number of bytes reserved for libraries, kernels and graphs. They took 80 MiB for a small model on an H200.
    const RESERVE: usize = 512 << 20;

    /// Returns the number of bytes available to tensors on a GPU of `total` bytes.
    pub fn usable(total: usize) -> usize {
        total.saturating_sub(GpuModel::CONTEXT + GpuModel::RESERVE)
    }

    /// Returns the number of bytes available to tensors on an open GPU with `free` free bytes.
    pub(super) fn usable_of_free(free: usize) -> usize {
        free.saturating_sub(GpuModel::RESERVE)
    }

    /// Returns an H200 of 139.8 GiB that no other process uses.
    pub fn h200() -> GpuModel {
        let memory = GpuModel::usable(150_110_011_392);
        GpuModel { name: "NVIDIA H200".into(), capability: (9, 0), sm_count: 132, memory }
    }

    /// Returns the names that [`GpuModel::named`] knows, in alphabetical order.
    pub fn names() -> Vec<&'static str> {
        let mut names: Vec<_> = GPUS.iter().map(|gpu| gpu.0).chain(["H200"]).collect();
        names.sort_unstable();
        names
    }

    /// Returns the FLOP/s of dense BF16 products from NVIDIA's data sheet, and `None` if the product name is not known.
    pub fn peak_bf16_flops(&self) -> Option<f64> {
        // Laptops have other chips with the same product numbers.
        let is_known = |name: &str| self.name.contains(name) && !self.name.contains("Laptop");
        PEAKS.iter().find(|(name, _)| is_known(name)).map(|(_, flops)| *flops)
    }

    /// Returns the GPU called `name`, such as `h100` or `RTX 4090`, with the memory of its data sheet. It assumes that no other process uses this
    /// memory.
    ///
    /// An unknown name is [`Error::Value`], which lists the known names.
    pub fn named(name: &str) -> Result<GpuModel> {
        let plain = |name: &str| name.to_lowercase().replace("nvidia", "").replace([' ', '-', '_'], "");
        if plain(name) == "h200" {
            return Ok(GpuModel::h200());
        }
        let found = GPUS.iter().find(|gpu| plain(gpu.0) == plain(name));
        let Some(&(name, capability, sm_count, gib)) = found else {
            return Err(Error::Value(format!(
                "there is no GPU `{name}` here; known are {}",
                GpuModel::names().join(", ")
            )));
        };
        let memory = GpuModel::usable(gib << 30);
        Ok(GpuModel { name: format!("NVIDIA {name}"), capability, sm_count, memory })
    }
}

/// The name, compute capability, multiprocessors and GiB of memory of GPUs, from NVIDIA's data sheets. A GPU with ECC reports less memory.
const GPUS: &[(&str, (i32, i32), usize, usize)] = &[
    ("A100", (8, 0), 108, 80),
    ("RTX 3090", (8, 6), 82, 24),
    ("L4", (8, 9), 58, 24),
    ("L40S", (8, 9), 142, 48),
    ("RTX 4090", (8, 9), 128, 24),
    ("H20", (9, 0), 78, 96),
    ("H100", (9, 0), 132, 80),
    ("H100 NVL", (9, 0), 132, 94),
    ("H100 PCIe", (9, 0), 114, 80),
    ("GH200", (9, 0), 132, 96),
    ("B200", (10, 0), 148, 180),
    ("RTX 5090", (12, 0), 170, 32),
];

/// Parts of product names, and the FLOP/s of dense BF16 products with sums in F32, from NVIDIA's data sheets. The first part that a name contains
/// counts.
const PEAKS: &[(&str, f64)] = &[
    ("A100", 312e12),
    ("RTX 3090", 71e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 4090", 165e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H200 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("RTX 5090", 209e12),
    // Product names of H200 contain this name too, and precede it in this list.
    ("H20", 148e12),
];

/// The source of the segments of a pool.
pub(super) enum Memory {
    /// The driver.
    Driver(Arc<Context>),
    /// A dry run, which has addresses without memory. The number of its bytes is limited to the memory of the GPU.
    Dry(DryMemory),
}

/// The allocated addresses with their sizes.
pub(super) struct DryMemory {
    capacity: usize,
    live: Mutex<BTreeMap<u64, usize>>,
}

impl DryMemory {
    pub(super) fn new(capacity: usize) -> DryMemory {
        DryMemory { capacity, live: Mutex::default() }
    }

    fn used_bytes(&self) -> usize {
        lock(&self.live).values().sum()
    }
}

/// The alignment of segments, which equals the alignment of the driver.
const SEGMENT_ALIGNMENT: u64 = 2 << 20;

impl Backing for Memory {
    fn allocate(&self, bytes: usize) -> Result<Option<u64>> {
        match self {
            Memory::Driver(context) => context.allocate(bytes),
            Memory::Dry(memory) if memory.used_bytes().saturating_add(bytes) > memory.capacity => Ok(None),
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
            // SAFETY: the pool waits for the stream before it returns an unused segment.
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
            Memory::Dry(memory) => Ok((memory.capacity - memory.used_bytes(), memory.capacity)),
        }
    }
}

/// The records of a dry run.
#[derive(Default)]
pub(super) struct DryGpu {
    pub(super) tracker: Arc<MemoryTracker>,
    pub(super) trace: Trace,
    /// The kernels and attention passes that the dry run has launched.
    pub(super) workload: Mutex<Workload>,
}

impl DryGpu {
    /// Returns the workspace of cuDNN 9.14 and 9.19 on an H200. The test `graphs_are_planned_for_hopper_from_a_description` compares it with cuDNN.
    /// With grouped-query attention, it holds the gradients of keys and values per query head. In deterministic mode, it holds the gradients of the
    /// scores. With documents, it holds descriptors of the tensors of each document. cuDNN 9.19 has room for at least 33 pairs of documents in the
    /// forward pass.
    pub(super) fn attention_workspace(shape: &AttentionShape, pass: AttentionPass) -> usize {
        let per_head = (shape.lse_len() * shape.head_dim * 2).next_multiple_of(256);
        let tiles = shape.seq.next_multiple_of(64) * shape.seq.next_multiple_of(128);
        let scores = if shape.deterministic { shape.batch * shape.heads * tiles * 2 } else { 0 };
        let pairs_of_documents = shape.documents / 2 + 1;
        match pass {
            AttentionPass::Forward if shape.documents > 0 => 256 + 512 * pairs_of_documents.max(33),
            AttentionPass::Backward if shape.documents > 0 => 256 + 896 * pairs_of_documents,
            AttentionPass::Forward => 256,
            AttentionPass::Backward if shape.heads != shape.kv_heads => 256 + scores + 2 * per_head,
            AttentionPass::Backward => 256 + scores,
        }
    }
}

/// Returns the error of a call that a dry run does not support.
pub(super) fn unsupported(what: &str) -> Error {
    Error::Value(format!("{what}: not possible in a dry run"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Device, Tensor};

    const MIB: usize = 1 << 20;

    #[test]
    fn the_peak_of_a_product_is_that_of_its_own_name() {
        let peak = |name: &str| GpuModel { name: name.into(), ..GpuModel::h200() }.peak_bf16_flops();
        for (name, flops) in [
            ("NVIDIA H100 80GB HBM3", Some(989e12)),
            ("NVIDIA H100 PCIe", Some(756e12)),
            ("NVIDIA H200", Some(989e12)),
            ("NVIDIA H20", Some(148e12)),
            ("NVIDIA GH200 480GB", Some(989e12)),
            ("NVIDIA L40S", Some(362e12)),
            ("NVIDIA L40", Some(181e12)),
            ("NVIDIA L4", Some(121e12)),
            ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
            ("NVIDIA T4", None),
        ] {
            assert_eq!(peak(name), flops, "{name}");
        }
    }

    #[test]
    fn dry_memory_is_limited_by_the_model() {
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

    #[test]
    fn gpus_are_known_by_name_and_by_capability() {
        for name in GPUS.iter().map(|gpu| gpu.0).chain(["nvidia h200", "rtx4090", "L40s"]) {
            let model = GpuModel::named(name).unwrap();
            crate::Capability::find(model.capability).unwrap();
        }
        assert_eq!(GpuModel::named("H200").unwrap(), GpuModel::h200());
        let message = GpuModel::named("V100").unwrap_err().to_string();
        assert!(
            message.starts_with("there is no GPU `V100` here; known are A100, B200, GH200, H100, H100 NVL"),
            "{message}"
        );
    }

    /// An FP8 product with scales that cuBLASLt lacks on the GPU is an error before it is enqueued.
    #[test]
    fn products_follow_the_capability() {
        use crate::cuda::{GemmPointers, GemmSpec, ScaleMode};
        let spec = GemmSpec::contiguous([16, 16, 128], DType::E4M3, DType::E4M3, DType::BF16);
        let product = |name, scale| {
            let pointers = GemmPointers { a: 0, b: 0, a_scale: 0, b_scale: 0, addend: 0, out: 0 };
            let gpu = crate::cuda::CudaDevice::dry(GpuModel::named(name).unwrap());
            // SAFETY: a dry run enqueues nothing.
            unsafe { gpu.gemm(&GemmSpec { scale, ..spec }, &pointers) }
        };
        product("L40S", ScaleMode::PerTensor).unwrap();
        product("H100", ScaleMode::PerRow).unwrap();
        let message = product("L40S", ScaleMode::PerRow).unwrap_err().to_string();
        assert!(message.contains("no FP8 products with per-row scales on Ada GPUs"), "{message}");
        assert!(product("A100", ScaleMode::PerTensor).is_err());
    }

    /// These values are the results of [`super::super::plan_attention`] on an H200 with cuDNN 9.14.
    #[test]
    fn dry_attention_workspace_matches_cudnn() {
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
            assert_eq!(DryGpu::attention_workspace(&shape, AttentionPass::Forward), 256);
            assert_eq!(DryGpu::attention_workspace(&shape, AttentionPass::Backward), backward, "{shape:?}");
        }
    }
}
