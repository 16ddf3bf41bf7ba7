use super::{KvBlocks, PagedBatch};
use crate::cuda::{CudaDevice, TensorMap};
use crate::ops::attention::Outputs;
use crate::ops::declaration::{AddressMut, kernels};
use crate::ops::launch::{BLOCK, Defines, aligned};
use crate::ops::{Angles, AttentionSpec, RopePairs};
use crate::{DType, Error, Result, Tensor};
use std::f64::consts::LOG2_E;

kernels! {
    static SOURCE = {
        file: "paged_attention", headers: ["attention_order.cuh", "paged_attention/batch.cuh", "rope/pairs.cuh"], constants: [WARPS], variants: VARIANTS
    };
    static TENSOR_CORES = {
        file: "paged_attention",
        headers: ["attention_order.cuh", "paged_attention/batch.cuh", "paged_attention/tiles.cuh", "paged_attention/tensor_cores.cuh"],
        constants: [WARPS, SPLITS],
        variants: &[HALF_VARIANTS, CODE_VARIANTS].concat()
    };
    static BOUNDED_SOURCE = {
        file: "paged_attention", headers: ["attention_order.cuh", "paged_attention/batch.cuh", "rope/pairs.cuh"], macros: [BOUNDED], constants: [WARPS],
        variants: VARIANTS
    };
    static BOUNDED_TENSOR_CORES = {
        file: "paged_attention",
        headers: ["attention_order.cuh", "paged_attention/batch.cuh", "paged_attention/tiles.cuh", "paged_attention/tensor_cores.cuh"],
        macros: [BOUNDED],
        constants: [WARPS, SPLITS],
        variants: &[HALF_VARIANTS, CODE_VARIANTS].concat()
    };
    static COPIED_SOURCE = {
        file: "paged_attention",
        headers: ["hopper.cuh", "attention_order.cuh", "paged_attention/batch.cuh", "paged_attention/tiles.cuh", "paged_attention/tensor_cores.cuh"],
        macros: [COPIED],
        needs: [BulkCopies],
        constants: [WARPS, SPLITS, STEP],
        variants: CODE_VARIANTS
    };
    kernel append_kv, append_kv_neighbours(
        cache: *mut KV, scale_inv: *mut f32, qkv: *mut X, table: *const f32, positions: *const i32, query_starts: *const i32, context_lens: *const i32, cached_lens: *const i32, block_tables: *const i32,
        sequences: i32, max_blocks: i32, block_size: i32, heads: i32, kv_heads: i32,
        dim: i32, log2_lanes: i32
    );
    kernel document_blocks(
        starts: *mut i32, lengths: *mut i32, block_tables: *mut i32, at: *const i32, documents: i32, length: i32, max_blocks: i32, block_size: i32,
        blocks: i32
    );
    kernel attend(
        o: *mut X, qkv: *const X, cache: *const KV, scale_inv: *const f32, sinks: *const X, query_starts: *const i32, context_lens: *const i32, cached_lens: *const i32, block_tables: *const i32,
        sequences: i32, max_blocks: i32, block_size: i32, heads: i32, kv_heads: i32,
        dim: i32, scale: f32, #[BOUNDED] window: i32, #[BOUNDED] cap: f32
    );
    kernel attend_1, attend_2(
        o: *mut X, lse: *mut f32, lse_length: i32, parts: *mut f32, stats: *mut f32, arrived: *mut u32, qkv: *const X, cache: *const KV, scale_inv: *const f32,
        sinks: *const X, query_starts: *const i32, context_lens: *const i32, cached_lens: *const i32, block_tables: *const i32,
        sequences: i32, max_blocks: i32, block_size: i32, tokens: i32, group: i32, most: i32, dim: i32, together: i32,
        most_splits: i32, rounds: i32, part: i32, most_parts: i32, scale: f32, #[BOUNDED] window: i32, #[BOUNDED] cap: f32
    );
    kernel attend_copied(
        o: *mut X, lse: *mut f32, lse_length: i32, parts: *mut f32, stats: *mut f32, arrived: *mut u32, qkv: *const X, cache: TensorMap, scale_inv: *const f32,
        sinks: *const X, query_starts: *const i32, context_lens: *const i32, cached_lens: *const i32, block_tables: *const i32,
        sequences: i32, max_blocks: i32, block_size: i32, tokens: i32, group: i32, most: i32, dim: i32, together: i32,
        most_splits: i32, rounds: i32, part: i32, most_parts: i32, scale: f32, #[BOUNDED] window: i32, #[BOUNDED] cap: f32
    );
}

/// The maximum number of splits of a context, which bounds the memory of partial results and the time to merge them.
const SPLITS: usize = 32;
/// The maximum number of times that a warp reads 16 or 32 tokens in the smallest split of a context. Splits of this size add little traffic. For
/// example, with FP8 keys of head size 128, four query heads per key head and 1,024 tokens per split, writing and reading partial results in F32
/// moves 1.6 % of the bytes of keys and values.
const MOST_ROUNDS: usize = 8;
/// The number of such rounds in a part of a context if rows must not depend on other rows. It is the same for any batch, so the sums of a token depend only
/// on its own context. A split has one or more parts.
const INVARIANT_ROUNDS: usize = 4;
/// The number of bytes of a row of keys or values in shared memory.
const STEP: usize = TensorMap::BOX_BYTES;
/// The minimum number of blocks that a multiprocessor runs at once.
const BLOCKS: usize = 2;

/// The storage types of activations and of the cache.
const VARIANTS: &[Defines] = &[
    &[("X", "f32"), ("KV", "f32")],
    &[("X", "f16"), ("KV", "f16")],
    &[("X", "bf16"), ("KV", "bf16")],
    &[("X", "f32"), ("KV", "bf16")],
    &[("X", "f16"), ("KV", "bf16")],
    &[("X", "f32"), ("KV", "e4m3")],
    &[("X", "f16"), ("KV", "e4m3")],
    &[("X", "bf16"), ("KV", "e4m3")],
];

/// The variants for tensor cores with 16-bit caches, and the largest head size of each variant.
const HALF_VARIANTS: &[Defines] = &[
    &[("X", "f16"), ("KV", "f16"), ("DIM", "64")],
    &[("X", "f16"), ("KV", "f16"), ("DIM", "128")],
    &[("X", "f16"), ("KV", "f16"), ("DIM", "256")],
    &[("X", "bf16"), ("KV", "bf16"), ("DIM", "64")],
    &[("X", "bf16"), ("KV", "bf16"), ("DIM", "128")],
    &[("X", "bf16"), ("KV", "bf16"), ("DIM", "256")],
];

/// The variants for tensor cores with caches in codes, and the largest head size of each variant.
const CODE_VARIANTS: &[Defines] = &[
    &[("X", "f16"), ("KV", "e4m3"), ("DIM", "64")],
    &[("X", "f16"), ("KV", "e4m3"), ("DIM", "128")],
    &[("X", "f16"), ("KV", "e4m3"), ("DIM", "256")],
    &[("X", "bf16"), ("KV", "e4m3"), ("DIM", "64")],
    &[("X", "bf16"), ("KV", "e4m3"), ("DIM", "128")],
    &[("X", "bf16"), ("KV", "e4m3"), ("DIM", "256")],
];

/// The number of warps, and the number of threads, of a block.
const WARPS: u32 = 4;
const THREADS: u32 = 32 * WARPS;

/// Returns the variant for these types among `variants`. For tensor cores, `dim` is the largest head size of the variant.
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

/// Returns the variant for types without tensor cores.
fn variant(x: DType, kv: DType) -> Result<Defines> {
    let missing = || Error::Value(format!("paged attention: a GPU has no cache in {kv} for {x}"));
    defines(VARIANTS, x, kv, None).ok_or_else(missing)
}

/// Returns the defines for tensor cores, and the largest head size that they support; `None` if they do not support the types or sizes.
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

/// Returns the number of sequences of a batch, of blocks per sequence, and of tokens per block.
fn sizes_of(batch: &PagedBatch, cache: &KvBlocks) -> [usize; 3] {
    [batch.capacity(), batch.block_tables.shape()[1], cache.block_size()]
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
        Some((_, RopePairs::Neighbours)) => kernel::append_kv_neighbours,
        _ => kernel::append_kv,
    };
    let (tokens, defines) = (qkv.shape()[0], variant(qkv.dtype(), cache.dtype())?);
    let [sequences, max_blocks, block_size] = sizes_of(batch, cache);
    let PagedBatch { query_starts, context_lens, cached_lens, block_tables, .. } = *batch;
    let (table, positions) = (rotation.map(|(angles, _)| angles.table), rotation.map(|(angles, _)| angles.positions));
    let lanes = spec.head_dim.div_ceil(16).next_power_of_two();
    let AttentionSpec { heads, kv_heads, head_dim, .. } = *spec;
    let entry = entry(
        &mut cache.data,
        cache.scale_inv.as_mut(),
        qkv,
        table,
        positions,
        query_starts,
        context_lens,
        cached_lens,
        block_tables,
        sequences,
        max_blocks,
        block_size,
        heads,
        kv_heads,
        head_dim,
        lanes.ilog2() as i32,
    );
    let kernel = SOURCE.kernel(defines, entry);
    let blocks = (spec.heads + 2 * spec.kv_heads).div_ceil(THREADS as usize / lanes);
    // SAFETY: the op has checked sizes. Tables name blocks of the cache, and the angles have all positions, as the contract demands of the
    // caller. The kernel waits for its predecessors before it reads or writes data of other kernels.
    unsafe { gpu.launch_early(&kernel, [tokens as u32, blocks as u32, 1], THREADS, 0) }
}

/// How tensor cores divide an attention.
struct Tiling {
    /// Columns of a product: queries that share a key head.
    columns: usize,
    /// Query tokens of a tile.
    together: usize,
    /// Tiles of all tokens.
    tiles: usize,
    /// Parts of the query heads that share a key head.
    chunks: usize,
    /// The maximum number of query heads of a part.
    most: usize,
    /// The number of times that a warp reads keys in a split of the context.
    rounds: usize,
    /// The number of tokens of a part of the context, if the order of sums must not depend on the batch; otherwise 0, and each split is a part.
    part: usize,
    /// The maximum number of parts of a context.
    parts: usize,
    /// The maximum number of splits of a context.
    splits: usize,
    /// Whether the blocks of all splits run in one wave.
    is_one_wave: bool,
}

impl Tiling {
    /// Divides the attention of `tokens` query tokens with a kernel for heads of up to `size` values.
    fn new(
        gpu: &CudaDevice,
        tokens: usize,
        cache: &KvBlocks,
        batch: &PagedBatch,
        spec: &AttentionSpec,
        size: usize,
    ) -> Tiling {
        let group = spec.group();
        // In decode, the queries of a product belong to one new token, and in prefill to several new tokens. With heads of 256, registers suffice only
        // for eight columns.
        let columns = if size < 256 && (group > 8 || batch.max_new > 1) { 16 } else { 8 };
        let together = if batch.max_new > 1 { (columns / group).max(1) } else { 1 };
        let tiles = if together > 1 { tokens / together + batch.capacity() + 1 } else { tokens };
        let chunks = group.div_ceil(columns);
        // The number of tokens in TILES tiles (tiles.cuh).
        let of_warp = if size * cache.dtype().size() <= 128 { 32 } else { 16 };
        let stride = of_warp * THREADS as usize / 32;
        let part = if gpu.is_batch_invariant() { INVARIANT_ROUNDS * stride } else { 0 };
        // With a window, a tile reads the keys that its tokens see, beginning with the first key rounded down to a multiple of 16, or to a whole part.
        let in_window = spec.window.map_or(usize::MAX, |window| window.saturating_add(together + part.max(16) - 1));
        let most_keys = batch.max_context(cache).min(in_window);
        let splits_of = |rounds: usize| most_keys.div_ceil(rounds * stride).clamp(1, SPLITS);
        // With few sequences, splits are short, so that all multiprocessors read. With many sequences, splits are long, so that one wave of blocks
        // suffices if possible.
        let fits =
            |rounds: usize| batch.capacity() * spec.kv_heads * chunks * splits_of(rounds) <= BLOCKS * gpu.sm_count();
        let rounds = [1, 2, 4].into_iter().find(|&rounds| fits(rounds)).unwrap_or(MOST_ROUNDS);
        let rounds = if part > 0 { rounds.max(INVARIANT_ROUNDS) } else { rounds };
        let (splits, most, is_one_wave) = (splits_of(rounds), group.div_ceil(chunks), fits(rounds));
        let parts = if part > 0 { most_keys.div_ceil(part) } else { splits };
        Tiling { columns, together, tiles, chunks, most, rounds, part, parts, splits, is_one_wave }
    }

    /// Whether bulk copies read the keys and values of `cache`. They are faster if codes are read by more than BLOCKS blocks per multiprocessor.
    fn copies(&self, gpu: &CudaDevice, cache: &KvBlocks, is_bounded: bool) -> bool {
        let waves = self.rounds == MOST_ROUNDS && !self.is_one_wave;
        waves
            && self.part == 0
            && self.columns == 8
            && !is_bounded
            && cache.scale_inv.is_some()
            && gpu.runs(&COPIED_SOURCE)
    }
}

/// Returns the window and the bound of the logits as kernels with BOUNDED read them; nothing if the attention has neither.
fn bounds(spec: &AttentionSpec) -> (Option<usize>, Option<f64>) {
    let is_bounded = spec.window.is_some() || spec.soft_cap.is_some();
    let window = is_bounded.then(|| spec.window.unwrap_or(0).min(i32::MAX as usize));
    (window, is_bounded.then(|| spec.soft_cap.unwrap_or(0.0) * LOG2_E))
}

/// Returns the factor of logits whose exponentials have base 2: exp2 is cheaper than exp.
fn scale(spec: &AttentionSpec) -> f32 {
    (spec.scale * LOG2_E) as f32
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
    match tensor_cores(qkv, cache, spec) {
        Some((defines, size)) => {
            let tiling = Tiling::new(gpu, qkv.shape()[0], cache, batch, spec, size);
            by_tensor_cores(gpu, qkv, cache, batch, spec, sinks, o, None, defines, &tiling)
        }
        None => by_warps(gpu, qkv, cache, batch, spec, sinks, o),
    }
}

/// Writes the sequences of documents, as [`Documents::new`](super::documents::Documents) describes them.
pub(super) fn document_blocks(
    gpu: &CudaDevice,
    [starts, lengths, block_tables]: [&mut Tensor; 3],
    at: Option<&Tensor>,
    length: usize,
    cache: &KvBlocks,
    dtype: DType,
) -> Result<()> {
    let [documents, max_blocks] = block_tables.dims("block_tables")?;
    let elements = block_tables.len();
    let [blocks, .., block_size, _] = cache.data.dims::<5>("cache")?;
    let entry =
        kernel::document_blocks(starts, lengths, block_tables, at, documents, length, max_blocks, block_size, blocks);
    let kernel = SOURCE.kernel(variant(dtype, cache.dtype())?, entry);
    // SAFETY: the tensors have the sizes that the kernel writes, and `at` has one element more than there are documents.
    unsafe { gpu.launch(&kernel, [elements.div_ceil(BLOCK as usize) as u32, 1, 1], BLOCK, 0) }
}

/// Attention of whole documents as of their tokens over a cache.
pub(super) fn attention_of_documents(
    gpu: &CudaDevice,
    qkv: &Tensor,
    cache: &KvBlocks,
    batch: &PagedBatch,
    spec: &AttentionSpec,
    sinks: Option<&Tensor>,
    Outputs { o, lse, length, .. }: &mut Outputs,
) -> Result<()> {
    let Some((defines, size)) = tensor_cores(qkv, cache, spec) else {
        return Err(Error::Value(format!(
            "attention of documents over a cache in {} does not support {spec} in {}",
            cache.dtype(),
            qkv.dtype()
        )));
    };
    // A document has one split, because it has no tile of its own that is longer than its context.
    let tiling = Tiling { splits: 1, ..Tiling::new(gpu, qkv.shape()[0], cache, batch, spec, size) };
    by_tensor_cores(gpu, qkv, cache, batch, spec, sinks, o, Some((lse, *length)), defines, &tiling)
}

/// Attention without tensor cores.
fn by_warps(
    gpu: &CudaDevice,
    qkv: &Tensor,
    cache: &KvBlocks,
    batch: &PagedBatch,
    spec: &AttentionSpec,
    sinks: Option<&Tensor>,
    o: &mut Tensor,
) -> Result<()> {
    let [sequences, max_blocks, block_size] = sizes_of(batch, cache);
    let PagedBatch { query_starts, context_lens, cached_lens, block_tables, .. } = *batch;
    let AttentionSpec { heads, kv_heads, head_dim, .. } = *spec;
    let (window, cap) = bounds(spec);
    let entry = kernel::attend(
        o,
        qkv,
        &cache.data,
        cache.scale_inv.as_ref(),
        sinks,
        query_starts,
        context_lens,
        cached_lens,
        block_tables,
        sequences,
        max_blocks,
        block_size,
        heads,
        kv_heads,
        head_dim,
        scale(spec),
        window,
        cap,
    );
    let source = if window.is_some() { &BOUNDED_SOURCE } else { &SOURCE };
    let kernel = source.kernel(variant(qkv.dtype(), cache.dtype())?, entry);
    // SAFETY: the op has checked sizes. Tables name blocks of the cache, as the contract demands of the caller.
    unsafe { gpu.launch_early(&kernel, [qkv.shape()[0] as u32, heads as u32, 1], THREADS, 0) }
}

/// Attention of the variant `defines` for tensor cores.
#[expect(clippy::too_many_arguments, reason = "the arguments of the op, and how it is divided")]
fn by_tensor_cores(
    gpu: &CudaDevice,
    qkv: &Tensor,
    cache: &KvBlocks,
    batch: &PagedBatch,
    spec: &AttentionSpec,
    sinks: Option<&Tensor>,
    o: &mut Tensor,
    lse: Option<(&mut Tensor, usize)>,
    defines: Defines,
    tiling: &Tiling,
) -> Result<()> {
    let [sequences, max_blocks, block_size] = sizes_of(batch, cache);
    let PagedBatch { query_starts, context_lens, cached_lens, block_tables, .. } = *batch;
    let (tokens, group, (window, cap)) = (qkv.shape()[0], spec.group(), bounds(spec));
    let Tiling { together, tiles, chunks, most, rounds, part, parts, splits, .. } = *tiling;
    let room = batch.capacity() * spec.kv_heads * chunks * parts * together * most;
    let results = |width: usize| Tensor::empty(qkv.device(), &[if splits > 1 { room } else { 0 }, width], DType::F32);
    let (mut sums, mut stats) = (results(spec.head_dim)?, results(2)?);
    // The cache has as many counters as it has blocks. A batch may have more sequences if several sequences share blocks.
    let own = &cache.arrived;
    let more = (batch.capacity() > own.shape()[0])
        .then(|| Tensor::zeros(own.device(), &[batch.capacity(), own.shape()[1]], DType::I32))
        .transpose()?;
    let (lse, lse_length) = lse.unzip();
    let arrived = AddressMut(more.as_ref().unwrap_or(own).device_ptr());
    // The kernels differ in how they read the cache. A closure would fix its type.
    macro_rules! reading {
        ($cache:expr, $attend:expr) => {
            $attend(
                o,
                lse,
                lse_length.unwrap_or(0),
                &mut sums,
                &mut stats,
                arrived,
                qkv,
                $cache,
                cache.scale_inv.as_ref(),
                sinks,
                query_starts,
                context_lens,
                cached_lens,
                block_tables,
                sequences,
                max_blocks,
                block_size,
                tokens,
                group,
                most,
                spec.head_dim,
                together,
                splits,
                rounds,
                part,
                parts,
                scale(spec),
                window,
                cap,
            )
        };
    }
    let kernel = if tiling.copies(gpu, cache, window.is_some()) {
        COPIED_SOURCE.kernel(defines, reading!(codes(cache, spec), kernel::attend_copied))
    } else {
        let source = if window.is_some() { &BOUNDED_TENSOR_CORES } else { &TENSOR_CORES };
        let attend = if tiling.columns == 8 { kernel::attend_1 } else { kernel::attend_2 };
        source.kernel(defines, reading!(&cache.data, attend))
    };
    let grid = [(tiles + batch.capacity() * (splits - 1)) as u32, spec.kv_heads as u32, chunks as u32];
    // SAFETY: the op has checked sizes. Tables name blocks of the cache, as the contract demands of the caller. Parts have room for all splits, and
    // `arrived` has room for all sequences and key heads. The launch resets `arrived`, and launches of a device are in order, so no other launch uses
    // `arrived` at the same time.
    unsafe { gpu.launch_early(&kernel, grid, THREADS, 0) }
}

/// The codes of a cache as bulk copies read them.
fn codes(cache: &KvBlocks, spec: &AttentionSpec) -> TensorMap {
    TensorMap::matrix(cache.data.device_ptr(), cache.data.len() / spec.head_dim, spec.head_dim, spec.head_dim, 16)
}
