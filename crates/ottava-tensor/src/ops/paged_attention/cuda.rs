use super::{KvBlocks, PagedBatch, PagedLayout};
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{BLOCK, Defines, kernel_source};
use crate::{DType, Error, Result, Tensor};

kernel_source!("paged_attention");

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

/// Threads of a block of attention.
const THREADS: u32 = 128;

/// Tokens of a context that a block reads in decoding. A constant, so that no result depends on other sequences. Parts of 256 tokens are
/// written and read again, in F32: 3 % of the bytes of keys and values in BF16 where four query heads share them.
const SPLIT: usize = 256;

fn kernel(x: DType, kv: DType, entry: &'static str) -> Result<Kernel> {
    let name = |dtype| match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::E4M3 => "e4m3",
        _ => "",
    };
    let defines = VARIANTS.iter().find(|defines| defines[0].1 == name(x) && defines[1].1 == name(kv));
    let missing = || Error::Value(format!("paged attention: a GPU has no cache in {kv} for {x}"));
    Ok(Kernel { source: &SOURCE, defines: defines.ok_or_else(missing)?, entry })
}

/// The tensors of a batch, and their sizes.
fn of_batch(batch: &PagedBatch, cache: &KvBlocks) -> [Arg; 6] {
    [
        Arg::Ptr(batch.query_starts.device_ptr()),
        Arg::Ptr(batch.context_lens.device_ptr()),
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
    l: PagedLayout,
) -> Result<()> {
    let kernel = kernel(qkv.dtype(), cache.dtype(), "append_kv")?;
    let scales = cache.scale_inv.as_mut().map_or(0, Tensor::device_ptr_mut);
    let indices = of_batch(batch, cache);
    let head = [Arg::Ptr(cache.data.device_ptr_mut()), Arg::Ptr(scales), Arg::Ptr(qkv.device_ptr_mut())];
    let sizes = [l.kv_heads, l.head_dim, l.qkv_width(), l.output_width()].map(|size| Arg::I32(size as i32));
    let args = [head.as_slice(), &indices, &sizes].concat();
    // SAFETY: the op has checked sizes; tables name blocks of the cache, as its contract demands of the caller.
    unsafe { gpu.launch(&kernel, [qkv.shape()[0] as u32, 1, 1], BLOCK, 0, &args) }
}

pub(super) fn paged_attention(
    gpu: &CudaDevice,
    qkv: &Tensor,
    cache: &KvBlocks,
    batch: &PagedBatch,
    l: PagedLayout,
    o: &mut Tensor,
) -> Result<()> {
    if l.head_dim > 256 {
        return Err(Error::Value(format!("paged attention: heads of {} are larger than 256", l.head_dim)));
    }
    let (tokens, group) = (qkv.shape()[0], l.heads / l.kv_heads);
    // Prompts have blocks enough without splits, whose parts would take memory per token.
    let split = if batch.max_new == 1 { SPLIT } else { batch.max_context(cache).max(1) };
    let splits = batch.max_context(cache).div_ceil(split);
    let (together, entry) = match group {
        1 => (1, "attend_1"),
        2 => (2, "attend_2"),
        3 | 4 => (4, "attend_4"),
        _ => (8, "attend_8"),
    };
    let parts = |width: usize| {
        let rows = if splits > 1 { tokens * l.heads * splits } else { 0 };
        Tensor::empty(qkv.device(), &[rows, width], DType::F32)
    };
    let (mut sums, mut stats) = (parts(l.head_dim)?, parts(2)?);
    // Powers of two are cheaper than powers of e.
    let scale = (l.scale() * std::f64::consts::LOG2_E) as f32;
    let head = [
        Arg::Ptr(o.device_ptr_mut()),
        Arg::Ptr(sums.device_ptr_mut()),
        Arg::Ptr(stats.device_ptr_mut()),
        Arg::Ptr(qkv.device_ptr()),
        Arg::Ptr(cache.data.device_ptr()),
        Arg::Ptr(cache.scale_inv.as_ref().map_or(0, Tensor::device_ptr)),
    ];
    let lanes = l.head_dim.div_ceil(8).next_power_of_two();
    let sizes = [l.heads, l.kv_heads, l.head_dim, lanes, split].map(|size| Arg::I32(size as i32));
    let args = [head.as_slice(), &of_batch(batch, cache), &sizes, &[Arg::F32(scale)]].concat();
    let grid = [splits as u32, (l.kv_heads * group.div_ceil(together)) as u32, tokens as u32];
    // SAFETY: the op has checked sizes, parts have room for all splits, and tables name blocks of the cache, as the contract demands.
    unsafe { gpu.launch(&kernel(qkv.dtype(), cache.dtype(), entry)?, grid, THREADS, 0, &args)? };
    if splits < 2 {
        return Ok(());
    }
    let args = [
        Arg::Ptr(o.device_ptr_mut()),
        Arg::Ptr(sums.device_ptr()),
        Arg::Ptr(stats.device_ptr()),
        Arg::Ptr(batch.query_starts.device_ptr()),
        Arg::Ptr(batch.context_lens.device_ptr()),
        Arg::I32(batch.capacity() as i32),
        Arg::I32(l.heads as i32),
        Arg::I32(l.head_dim as i32),
        Arg::I32(split as i32),
        Arg::I32(splits as i32),
    ];
    let kernel = kernel(qkv.dtype(), cache.dtype(), "merge_splits")?;
    // SAFETY: as above.
    unsafe { gpu.launch(&kernel, [l.heads as u32, tokens as u32, 1], THREADS, 0, &args) }
}
