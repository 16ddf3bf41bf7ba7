use super::{KvBlocks, PagedBatch};
use crate::cuda::{Arg, CudaDevice, Kernel, TensorMap};
use crate::ops::launch::{Defines, aligned, kernel_source};
use crate::ops::{Angles, AttentionSpec, RopePairs};
use crate::{DType, Error, Result, Tensor};
use std::f64::consts::LOG2_E;

kernel_source!(SOURCE, "paged_attention", "paged_attention/batch.cuh", "rope/pairs.cuh"; WARPS);
kernel_source!(
    TENSOR_CORES, "paged_attention", "paged_attention/batch.cuh", "paged_attention/tiles.cuh", "paged_attention/tensor_cores.cuh";
    WARPS, SPLITS
);
kernel_source!(BOUNDED, "paged_attention", "paged_attention/batch.cuh", "rope/pairs.cuh" + BOUNDED; WARPS);
kernel_source!(
    BOUNDED_TENSOR_CORES, "paged_attention", "paged_attention/batch.cuh", "paged_attention/tiles.cuh",
    "paged_attention/tensor_cores.cuh" + BOUNDED; WARPS, SPLITS
);
kernel_source!(
    COPIED, "paged_attention", "hopper.cuh", "paged_attention/batch.cuh", "paged_attention/tiles.cuh",
    "paged_attention/tensor_cores.cuh" + COPIED needs [BulkCopies]; WARPS, SPLITS, STEP
);

/// The maximum number of splits of a context, which bounds the memory of partial results and the time to merge them.
const SPLITS: usize = 32;
/// The maximum number of times that a warp reads 16 or 32 tokens in the smallest split of a context. Partial results are written and read
/// in F32: 3 % of the bytes of keys and values if four query heads share 512 tokens of 128 bytes.
const MOST_ROUNDS: usize = 8;
/// These rounds for any batch, if rows must not depend on others: the sums of a token then depend only on its own context.
const INVARIANT_ROUNDS: usize = 4;
/// Bytes of a row of keys or values in shared memory.
const STEP: usize = TensorMap::BOX_BYTES;
/// The minimum number of blocks that a multiprocessor runs at once.
const BLOCKS: usize = 2;

/// Storage types of activations and of the cache.
pub(crate) const VARIANTS: &[Defines] = &[
    &[("X", "f32"), ("KV", "f32")],
    &[("X", "f16"), ("KV", "f16")],
    &[("X", "bf16"), ("KV", "bf16")],
    &[("X", "f32"), ("KV", "bf16")],
    &[("X", "f16"), ("KV", "bf16")],
    &[("X", "f32"), ("KV", "e4m3")],
    &[("X", "f16"), ("KV", "e4m3")],
    &[("X", "bf16"), ("KV", "e4m3")],
];

/// The variants for tensor cores with 16-bit caches, and the largest head size of each.
pub(crate) const HALF_VARIANTS: &[Defines] = &[
    &[("X", "f16"), ("KV", "f16"), ("DIM", "64")],
    &[("X", "f16"), ("KV", "f16"), ("DIM", "128")],
    &[("X", "f16"), ("KV", "f16"), ("DIM", "256")],
    &[("X", "bf16"), ("KV", "bf16"), ("DIM", "64")],
    &[("X", "bf16"), ("KV", "bf16"), ("DIM", "128")],
    &[("X", "bf16"), ("KV", "bf16"), ("DIM", "256")],
];

/// Likewise for codes.
pub(crate) const CODE_VARIANTS: &[Defines] = &[
    &[("X", "f16"), ("KV", "e4m3"), ("DIM", "64")],
    &[("X", "f16"), ("KV", "e4m3"), ("DIM", "128")],
    &[("X", "f16"), ("KV", "e4m3"), ("DIM", "256")],
    &[("X", "bf16"), ("KV", "e4m3"), ("DIM", "64")],
    &[("X", "bf16"), ("KV", "e4m3"), ("DIM", "128")],
    &[("X", "bf16"), ("KV", "e4m3"), ("DIM", "256")],
];

/// Warps and threads of a block.
const WARPS: u32 = 4;
const THREADS: u32 = 32 * WARPS;

/// The kernel for these types among `variants`; for tensor cores, also for heads of up to `dim`.
fn defines(variants: &[Defines], x: DType, kv: DType, dim: Option<&str>) -> Option<Defines> {
    let name = |dtype| match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::E4M3 => "e4m3",
        _ => "",
    };
    let wanted = [Some(name(x)), Some(name(kv)), dim];
    variants
        .iter()
        .copied()
        .find(|defines| defines.iter().map(|d| Some(d.1)).eq(wanted.into_iter().take(defines.len())))
}

fn kernel(x: DType, kv: DType, entry: &'static str) -> Result<Kernel> {
    let missing = || Error::Value(format!("paged attention: a GPU has no cache in {kv} for {x}"));
    Ok(Kernel { source: &SOURCE, defines: defines(VARIANTS, x, kv, None).ok_or_else(missing)?, entry })
}

/// The defines for tensor cores, and the largest head size that they support; `None` if they do not support the types or sizes.
fn tensor_cores(qkv: &Tensor, cache: &KvBlocks, spec: &AttentionSpec) -> Option<(Defines, usize)> {
    let (dim, size) = match spec.head_dim {
        0..=64 => ("64", 64),
        65..=128 => ("128", 128),
        129..=256 => ("256", 256),
        _ => return None,
    };
    let whole = spec.head_dim.is_multiple_of(16) && cache.block_size().is_power_of_two() && cache.block_size() >= 16;
    let variants = if cache.scale_inv.is_some() { CODE_VARIANTS } else { HALF_VARIANTS };
    let defines = defines(variants, qkv.dtype(), cache.dtype(), Some(dim))?;
    (whole && aligned(&[qkv, &cache.data])).then_some((defines, size))
}

/// The tensors of a batch, and their sizes.
fn of_batch(batch: &PagedBatch, cache: &KvBlocks) -> [Arg; 7] {
    [
        Arg::Ptr(batch.query_starts.device_ptr()),
        Arg::Ptr(batch.context_lens.device_ptr()),
        Arg::Ptr(batch.cached_lens.device_ptr()),
        Arg::Ptr(batch.block_tables.device_ptr()),
        Arg::I32(batch.capacity() as i32),
        Arg::I32(batch.block_tables.shape()[1] as i32),
        Arg::I32(cache.block_size() as i32),
    ]
}

pub(super) fn append_kv(
    gpu: &CudaDevice,
    qkv: &mut Tensor,
    cache: &mut KvBlocks,
    batch: &PagedBatch,
    spec: &AttentionSpec,
    rotation: Option<(Angles, RopePairs)>,
) -> Result<()> {
    let entry = match rotation {
        Some((_, RopePairs::Neighbours)) => "append_kv_neighbours",
        _ => "append_kv",
    };
    let kernel = kernel(qkv.dtype(), cache.dtype(), entry)?;
    let scales = cache.scale_inv.as_mut().map_or(0, Tensor::device_ptr_mut);
    let indices = of_batch(batch, cache);
    let [table, positions] =
        rotation.map_or([0; 2], |(angles, _)| [angles.table, angles.positions].map(Tensor::device_ptr));
    let pointers = [cache.data.device_ptr_mut(), scales, qkv.device_ptr_mut(), table, positions].map(Arg::Ptr);
    let lanes = spec.head_dim.div_ceil(16).next_power_of_two();
    let sizes = [spec.heads, spec.kv_heads, spec.head_dim, lanes.ilog2() as usize].map(|size| Arg::I32(size as i32));
    let args = [pointers.as_slice(), &indices, &sizes].concat();
    let blocks = (spec.heads + 2 * spec.kv_heads).div_ceil(THREADS as usize / lanes);
    // SAFETY: the op has checked sizes; tables name blocks of the cache, and the angles have all positions, as contracts demand of the
    // caller. The kernel waits for its predecessors before it reads or writes.
    unsafe { gpu.launch_early(&kernel, [qkv.shape()[0] as u32, blocks as u32, 1], THREADS, 0, &args) }
}

pub(super) fn paged_attention(
    gpu: &CudaDevice,
    qkv: &Tensor,
    cache: &KvBlocks,
    batch: &PagedBatch,
    spec: &AttentionSpec,
    sinks: Option<&Tensor>,
    o: &mut Tensor,
) -> Result<()> {
    // exp2 is cheaper than exp.
    let scale = (spec.scale * LOG2_E) as f32;
    let is_bounded = spec.window.is_some() || spec.soft_cap.is_some();
    let cap = (spec.soft_cap.unwrap_or(0.0) * LOG2_E) as f32;
    let bounds = [Arg::I32(spec.window.unwrap_or(0).min(i32::MAX as usize) as i32), Arg::F32(cap)];
    let factors = [&[Arg::F32(scale)][..], if is_bounded { &bounds } else { &[] }].concat();
    let inputs_with = |data: Arg| {
        let scales = cache.scale_inv.as_ref().map_or(0, Tensor::device_ptr);
        let sinks = sinks.map_or(0, Tensor::device_ptr);
        [&[Arg::Ptr(qkv.device_ptr()), data, Arg::Ptr(scales), Arg::Ptr(sinks)], of_batch(batch, cache).as_slice()]
            .concat()
    };
    let data = Arg::Ptr(cache.data.device_ptr());
    let (tokens, group) = (qkv.shape()[0], spec.group());
    let Some((defines, size)) = tensor_cores(qkv, cache, spec) else {
        let sizes = [spec.heads, spec.kv_heads, spec.head_dim].map(|size| Arg::I32(size as i32));
        let args = [&[Arg::Ptr(o.device_ptr_mut())], inputs_with(data).as_slice(), &sizes, &factors].concat();
        let source = if is_bounded { &BOUNDED } else { &SOURCE };
        let kernel = Kernel { source, ..kernel(qkv.dtype(), cache.dtype(), "attend")? };
        // SAFETY: the op has checked sizes, and tables name blocks of the cache, as its contract demands of the caller.
        return unsafe { gpu.launch_early(&kernel, [tokens as u32, spec.heads as u32, 1], THREADS, 0, &args) };
    };
    // The columns of a product are queries that share a key head: of one new token in decode, of several in prefill. With heads of 256,
    // registers suffice for eight columns.
    let (columns, entry) = match size < 256 && (group > 8 || batch.max_new > 1) {
        true => (16, "attend_2"),
        false => (8, "attend_1"),
    };
    let together = if batch.max_new > 1 { (columns / group).max(1) } else { 1 };
    let tiles = if together > 1 { tokens / together + batch.capacity() + 1 } else { tokens };
    let chunks = group.div_ceil(columns);
    let most = group.div_ceil(chunks);
    // Tokens of TILES tiles in tiles.cuh.
    let of_warp = if size * cache.dtype().size() <= 128 { 32 } else { 16 };
    let stride = of_warp * THREADS as usize / 32;
    // With a window, a tile reads the keys of all its tokens, from the 16 tokens on that contain the first.
    let in_window = spec.window.map_or(usize::MAX, |window| window.saturating_add(together + 15));
    let most_keys = batch.max_context(cache).min(in_window);
    let splits_of = |rounds: usize| most_keys.div_ceil(rounds * stride).clamp(1, SPLITS);
    // With few sequences, splits are short, so that all multiprocessors read; with many, splits are long, in one wave of blocks if
    // possible.
    let fits = |rounds: usize| batch.capacity() * spec.kv_heads * chunks * splits_of(rounds) <= BLOCKS * gpu.sm_count();
    let rounds = match gpu.is_batch_invariant() {
        true => INVARIANT_ROUNDS,
        false => [1, 2, 4].into_iter().find(|&rounds| fits(rounds)).unwrap_or(MOST_ROUNDS),
    };
    let splits = splits_of(rounds);
    let room = batch.capacity() * spec.kv_heads * chunks * splits * together * most;
    let parts = |width: usize| Tensor::empty(qkv.device(), &[if splits > 1 { room } else { 0 }, width], DType::F32);
    let (mut sums, mut stats) = (parts(spec.head_dim)?, parts(2)?);
    let outputs = [o, &mut sums, &mut stats].map(|to| Arg::Ptr(to.device_ptr_mut()));
    let sizes = [tokens, group, most, spec.head_dim, together, splits, rounds].map(|size| Arg::I32(size as i32));
    // The cache has counters for as many sequences as it has blocks. There are more if several sequences share blocks.
    let own = &cache.arrived;
    let more = (batch.capacity() > own.shape()[0])
        .then(|| Tensor::zeros(own.device(), &[batch.capacity(), own.shape()[1]], DType::I32))
        .transpose()?;
    let arrived = more.as_ref().unwrap_or(own);
    // Where more blocks than BLOCKS on each multiprocessor have codes to read, `CopiedTiles` is faster.
    let copies = rounds == MOST_ROUNDS
        && !fits(rounds)
        && entry == "attend_1"
        && !is_bounded
        && cache.scale_inv.is_some()
        && gpu.runs(&COPIED);
    let codes = TensorMap {
        address: cache.data.device_ptr(),
        rows: cache.data.len() / spec.head_dim,
        row_bytes: spec.head_dim,
        pitch: spec.head_dim,
        box_rows: 16,
    };
    let (source, entry, data) = match (copies, is_bounded) {
        (true, _) => (&COPIED, "attend_copied", Arg::Map(codes)),
        (false, true) => (&BOUNDED_TENSOR_CORES, entry, data),
        (false, false) => (&TENSOR_CORES, entry, data),
    };
    let args = [outputs.as_slice(), &[Arg::Ptr(arrived.device_ptr())], &inputs_with(data), &sizes, &factors].concat();
    let grid = [(tiles + batch.capacity() * (splits - 1)) as u32, spec.kv_heads as u32, chunks as u32];
    // SAFETY: as above; parts have room for all splits and `arrived` for all sequences and key heads. The launch leaves `arrived` as it was,
    // and launches of a device are in order, so none shares it with another.
    unsafe { gpu.launch_early(&Kernel { source, defines, entry }, grid, THREADS, 0, &args) }
}
