//! The CPU reference. Sums have the same order as in `ops/attention/cpu.rs`, so both references give the same bits for a sequence.

use super::{KvBlocks, PagedBatch};
use crate::element::{Float, Real, with_float};
use crate::fp8::E4M3;
use crate::ops::attention::softmax;
use crate::ops::attention_sink::softmax_share;
use crate::ops::parallel_rows::rows_per_task;
use crate::ops::quantize::cpu::current_scale;
use crate::ops::{AttentionSpec, CurrentScaling};
use crate::{DType, Error, Result, Tensor};
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;

/// The new tokens of a sequence, and the blocks of its keys and values.
struct Sequence<'a> {
    first_token: usize,
    new: usize,
    context: usize,
    blocks: &'a [i32],
}

/// Returns the sequences that have new tokens. Errors if an index is outside of `tokens` or the cache.
fn sequences<'a>(batch: &PagedBatch<'a>, tokens: usize, cache: &KvBlocks) -> Result<Vec<Sequence<'a>>> {
    let (starts, lens) = (batch.query_starts.host::<i32>(), batch.context_lens.host::<i32>());
    let per_row = batch.block_tables.shape()[1];
    let mut found = Vec::new();
    for (r, (start, &context)) in starts.windows(2).zip(lens).enumerate() {
        let [first, end] = [start[0], start[1]];
        if first == end {
            continue;
        }
        let blocks = &batch.block_tables.host::<i32>()[r * per_row..][..per_row];
        let used = (context.max(0) as usize).div_ceil(cache.block_size());
        let fits = 0 <= first && first < end && end as usize <= tokens && end - first <= context;
        let in_cache = |block: &i32| (0..cache.data.shape()[0] as i32).contains(block);
        if !fits || used > per_row || !blocks[..used].iter().all(in_cache) {
            return Err(Error::Value(format!(
                "paged attention: tokens {first}..{end} of {tokens}, the last of {context} of sequence {r} in blocks {:?}, do not fit a cache of shape {:?}",
                &blocks[..used.min(per_row)],
                cache.data.shape()
            )));
        }
        let (first_token, new, context) = (first as usize, (end - first) as usize, context as usize);
        found.push(Sequence { first_token, new, context, blocks: &blocks[..used] });
    }
    Ok(found)
}

/// Returns the index of the row of a token and head in `[blocks, 2, H_kv, block size]`. `part` is 0 for keys and 1 for values.
fn row_of(s: &Sequence, position: usize, block_size: usize, kv_heads: usize, part: usize, head: usize) -> usize {
    let block = s.blocks[position / block_size] as usize;
    ((block * 2 + part) * kv_heads + head) * block_size + position % block_size
}

pub(super) fn append_kv(
    qkv: &mut Tensor,
    cache: &mut KvBlocks,
    batch: &PagedBatch,
    spec: &AttentionSpec,
) -> Result<()> {
    let sequences = sequences(batch, qkv.shape()[0], cache)?;
    with_float!(qkv.dtype(), S => append::<S>(qkv.host_mut(), cache, &sequences, spec));
    Ok(())
}

fn append<S: Float>(qkv: &mut [S], cache: &mut KvBlocks, sequences: &[Sequence], spec: &AttentionSpec) {
    let (block_size, dim) = (cache.block_size(), spec.head_dim);
    let KvBlocks { data, scale_inv, .. } = cache;
    let same = data.dtype() == S::DTYPE;
    for s in sequences {
        for i in 0..s.new {
            let keys = &mut qkv[(s.first_token + i) * spec.qkv_width()..][spec.output_width()..spec.qkv_width()];
            for (number, x) in keys.chunks_exact_mut(dim).enumerate() {
                let (part, head) = (number / spec.kv_heads, number % spec.kv_heads);
                let row = row_of(s, s.context - s.new + i, block_size, spec.kv_heads, part, head);
                let place = row * dim..(row + 1) * dim;
                match scale_inv {
                    Some(scale_inv) => {
                        let codes = &mut data.host_mut::<E4M3>()[place];
                        let scale_inv = &mut scale_inv.host_mut::<f32>()[row];
                        *scale_inv = encode(x, codes);
                        for (x, code) in x.iter_mut().zip(codes) {
                            *x = S::store(S::Real::of(f64::from(code.to_f32() * *scale_inv)));
                        }
                    }
                    None if same => data.host_mut::<S>()[place].copy_from_slice(x),
                    None => {
                        for (value, x) in data.host_mut::<bf16>()[place].iter_mut().zip(x) {
                            *value = bf16::from_f32(x.load().to_f64() as f32);
                        }
                    }
                }
            }
        }
    }
}

/// Encodes `x`, and returns the inverse scale.
fn encode<S: Float>(x: &[S], codes: &mut [E4M3]) -> f32 {
    let wide = |x: &S| x.load().to_f64() as f32;
    let amax = x.iter().map(|x| wide(x).abs()).fold(0.0, f32::max);
    let largest = DType::E4M3.max_finite().expect("E4M3 is finite");
    let scale = current_scale(amax, largest, f32::MAX, CurrentScaling::default());
    for (code, x) in codes.iter_mut().zip(x) {
        *code = E4M3::from_f32(wide(x) * scale);
    }
    1.0 / scale
}

pub(super) fn paged_attention(
    qkv: &Tensor,
    cache: &KvBlocks,
    batch: &PagedBatch,
    spec: &AttentionSpec,
    sinks: Option<&Tensor>,
    o: &mut Tensor,
    lse: Option<&mut Tensor>,
) -> Result<()> {
    let sequences = sequences(batch, qkv.shape()[0], cache)?;
    with_float!(qkv.dtype(), S => {
        let gather: Gather<<S as Float>::Real> = with_float!(cache.dtype(), C => gather::<C, <S as Float>::Real>);
        let found = forward::<S>(gather, qkv, cache, &sequences, spec, sinks, o);
        if let Some(lse) = lse {
            let [_, heads, length] = lse.dims("lse")?;
            let lse = lse.host_mut::<<S as Float>::Real>();
            for ([token, head], value) in found {
                lse[(token / length * heads + head) * length + token % length] = value;
            }
        }
    });
    Ok(())
}

/// Computes attention, and returns the log-sum-exp of each token and head, without sinks.
fn forward<S: Float>(
    gather: Gather<S::Real>,
    qkv: &Tensor,
    cache: &KvBlocks,
    sequences: &[Sequence],
    spec: &AttentionSpec,
    sinks: Option<&Tensor>,
    o: &mut Tensor,
) -> Vec<([usize; 2], S::Real)> {
    let group = spec.heads / spec.kv_heads;
    let tasks: Vec<(&Sequence, usize)> =
        sequences.iter().flat_map(|s| (0..spec.kv_heads).map(move |h| (s, h))).collect();
    let largest = sequences.iter().map(|s| s.new * s.context).max().unwrap_or(0);
    let (outputs, lse): (Vec<Vec<S::Real>>, Vec<Vec<_>>) = tasks
        .par_iter()
        .with_min_len(rows_per_task(group * largest * spec.head_dim))
        .map(|&(s, kv_head)| {
            let (keys, values) = gather(cache, s, spec, kv_head);
            let mut out = vec![S::Real::default(); s.new * group * spec.head_dim];
            let mut p = vec![S::Real::default(); s.context];
            let mut found = Vec::new();
            for (i, out) in out.chunks_exact_mut(group * spec.head_dim).enumerate() {
                let row = &qkv.host::<S>()[(s.first_token + i) * spec.qkv_width()..];
                let visible = spec.visible(s.context - s.new + i, 0..s.context);
                for (g, out) in out.chunks_exact_mut(spec.head_dim).enumerate() {
                    let head = kv_head * group + g;
                    let query = &row[head * spec.head_dim..][..spec.head_dim];
                    let lse = attend(query, [&keys, &values], visible.clone(), &mut p[visible.clone()], spec, out);
                    found.push(([s.first_token + i, head], lse));
                    if let Some(sinks) = sinks {
                        // Like `attention_sink`, reads the stored output.
                        let share = softmax_share(lse, sinks.host::<S>()[head].load()).0;
                        out.iter_mut().for_each(|out| *out = S::store(*out).load() * share);
                    }
                }
            }
            (out, found)
        })
        .unzip();
    let o = o.host_mut::<S>();
    for (&(s, kv_head), output) in tasks.iter().zip(&outputs) {
        for (i, from) in output.chunks_exact(group * spec.head_dim).enumerate() {
            let to = &mut o[(s.first_token + i) * spec.output_width() + kv_head * group * spec.head_dim..];
            to.iter_mut().zip(from).for_each(|(to, &x)| *to = S::store(x));
        }
    }
    lse.into_iter().flatten().collect()
}

/// The type of [`gather`].
type Gather<R> = fn(&KvBlocks, &Sequence, &AttentionSpec, usize) -> (Vec<R>, Vec<R>);

/// Returns the transposed keys `[D, context]` and the values `[context, D]` of a head.
fn gather<C: Float, R: Real>(cache: &KvBlocks, s: &Sequence, spec: &AttentionSpec, head: usize) -> (Vec<R>, Vec<R>) {
    let (size, dim) = (cache.block_size(), spec.head_dim);
    let data = cache.data.host::<C>();
    let scales = cache.scale_inv.as_ref().map(|scales| scales.host::<f32>());
    // The product of code and scale is rounded to F32, as in the kernel.
    let value = |x: C, row: usize| match scales {
        Some(scales) => R::of(f64::from(x.load().to_f64() as f32 * scales[row])),
        None => R::of(x.load().to_f64()),
    };
    let (mut keys, mut values) = (vec![R::default(); s.context * dim], vec![R::default(); s.context * dim]);
    for first in (0..s.context).step_by(size) {
        let count = size.min(s.context - first);
        let [of_keys, of_values] = [0, 1].map(|part| row_of(s, first, size, spec.kv_heads, part, head));
        let block = &data[of_keys * dim..][..count * dim];
        for (d, keys) in keys.chunks_exact_mut(s.context).enumerate() {
            for (t, key) in keys[first..first + count].iter_mut().enumerate() {
                *key = value(block[t * dim + d], of_keys + t);
            }
        }
        let block = &data[of_values * dim..][..count * dim];
        for (i, (to, &x)) in values[first * dim..].iter_mut().zip(block).enumerate() {
            *to = value(x, of_values + i / dim);
        }
    }
    (keys, values)
}

/// Adds the attention of one query to `out`, and returns its log-sum-exp. `p` is scratch memory for the probabilities of its visible keys.
fn attend<S: Float>(
    query: &[S],
    [keys, values]: [&[S::Real]; 2],
    visible: Range<usize>,
    p: &mut [S::Real],
    spec: &AttentionSpec,
    out: &mut [S::Real],
) -> S::Real {
    let context = keys.len() / query.len();
    p.fill(S::Real::default());
    for (q, keys) in query.iter().zip(keys.chunks_exact(context)) {
        let q = q.load();
        p.iter_mut().zip(&keys[visible.clone()]).for_each(|(p, &k)| *p += q * k);
    }
    p.iter_mut().for_each(|p| *p = spec.score(*p));
    let lse = softmax(p);
    for (&p, values) in p.iter().zip(values.chunks_exact(query.len()).skip(visible.start)) {
        out.iter_mut().zip(values).for_each(|(out, &v)| *out += p * v);
    }
    lse
}
