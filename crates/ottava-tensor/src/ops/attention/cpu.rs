//! Innermost loops run over contiguous memory: keys and values are transposed once per head.

use super::AttentionLayout;
use crate::element::{Float, Real, with_float};
use crate::ops::real_type;
use crate::{DType, Tensor};
use rayon::prelude::*;

/// The rows of one head of a fused matrix, widened: `[S, D]`.
fn head<S: Float>(x: &[S], width: usize, rows: std::ops::Range<usize>, column: usize, dim: usize) -> Vec<S::Real> {
    rows.flat_map(|t| x[t * width + column..][..dim].iter().map(|x| x.load())).collect()
}

fn transposed<R: Real>(x: &[R], dim: usize) -> Vec<R> {
    let rows = x.len() / dim;
    (0..dim).flat_map(|d| (0..rows).map(move |t| x[t * dim + d])).collect()
}

/// For each of the tokens, the first one of its sequence that it sees.
fn first_keys(cu_seqlens: Option<&Tensor>, l: AttentionLayout) -> Vec<usize> {
    let Some(at) = cu_seqlens else { return vec![0; l.tokens()] };
    let starts = &at.host::<i32>()[..at.len() - 1];
    let first = |token: usize| {
        let document = starts.partition_point(|&start| start as usize <= token).saturating_sub(1);
        (starts[document] as usize).saturating_sub(token / l.seq_len * l.seq_len)
    };
    (0..l.tokens()).map(first).collect()
}

/// `out[j] = Σ_d q[d] · kt[d, first + j]` for `out.len()` columns of `kt` `[D, S]`.
fn scores<R: Real>(q: &[R], kt: &[R], first: usize, out: &mut [R]) {
    let stride = kt.len() / q.len();
    out.fill(R::default());
    for (d, &q) in q.iter().enumerate() {
        for (out, &k) in out.iter_mut().zip(&kt[d * stride + first..]) {
            *out += q * k;
        }
    }
}

/// `out += factor · x`.
fn accumulate<R: Real>(out: &mut [R], factor: R, x: &[R]) {
    for (out, &x) in out.iter_mut().zip(x) {
        *out += factor * x;
    }
}

/// Softmax in place; returns the log-sum-exp.
fn softmax<R: Real>(scores: &mut [R], scale: R) -> R {
    scores.iter_mut().for_each(|s| *s = *s * scale);
    let largest = scores.iter().copied().reduce(|a, b| if b > a { b } else { a }).expect("a query sees itself");
    scores.iter_mut().for_each(|s| *s = (*s - largest).exp());
    let sum: R = scores.iter().copied().sum();
    scores.iter_mut().for_each(|s| *s = *s / sum);
    largest + sum.ln()
}

/// Scratch bytes of forward: the widened outputs of all heads, and per thread Q, K, V and Kᵀ of one head.
pub(super) fn scratch(l: AttentionLayout, dtype: DType) -> usize {
    let per_thread = 4 * l.seq_len * l.head_dim;
    (l.tokens() * l.output_width() + threads(l.batch * l.heads) * per_thread) * real_type(dtype).size()
}

/// Scratch bytes of backward: the widened gradients of all heads, and per thread K, V and their transposes of one key head, and Q, the
/// output and its gradient of one query head.
pub(super) fn scratch_of_backward(l: AttentionLayout, dtype: DType) -> usize {
    let per_thread = 7 * l.seq_len * l.head_dim;
    (l.tokens() * l.qkv_width() + threads(l.batch * l.kv_heads) * per_thread) * real_type(dtype).size()
}

/// Number of `tasks` that run at once.
fn threads(tasks: usize) -> usize {
    tasks.min(rayon::current_num_threads())
}

pub(super) fn attention(
    qkv: &Tensor,
    cu_seqlens: Option<&Tensor>,
    l: AttentionLayout,
    o: &mut Tensor,
    lse: &mut Tensor,
) {
    let first = first_keys(cu_seqlens, l);
    with_float!(qkv.dtype(), S => forward::<S>(qkv.host(), &first, l, o.host_mut(), lse.host_mut()));
}

fn forward<S: Float>(qkv: &[S], first: &[usize], l: AttentionLayout, o: &mut [S], lse: &mut [S::Real]) {
    let (seq, dim, width) = (l.seq_len, l.head_dim, l.qkv_width());
    let scale = S::Real::of(l.scale());
    let outputs: Vec<Vec<S::Real>> = lse
        .par_chunks_mut(seq.max(1))
        .enumerate()
        .map(|(index, lse)| {
            let (b, h) = (index / l.heads, index % l.heads);
            let kv = h / (l.heads / l.kv_heads);
            let rows = b * seq..(b + 1) * seq;
            let q = head(qkv, width, rows.clone(), h * dim, dim);
            let kt = transposed(&head(qkv, width, rows.clone(), (l.heads + kv) * dim, dim), dim);
            let v = head(qkv, width, rows, (l.heads + l.kv_heads + kv) * dim, dim);
            let mut o = vec![S::Real::default(); seq * dim];
            let mut p = vec![S::Real::default(); seq];
            for (i, (o, lse)) in o.chunks_exact_mut(dim).zip(lse).enumerate() {
                let first = first[b * seq + i];
                let p = &mut p[first..=i];
                scores(&q[i * dim..][..dim], &kt, first, p);
                *lse = softmax(p, scale);
                for (&p, v) in p.iter().zip(v[first * dim..].chunks_exact(dim)) {
                    accumulate(o, p, v);
                }
            }
            o
        })
        .collect();
    o.par_chunks_mut(l.output_width()).enumerate().for_each(|(t, row)| {
        for (h, out) in row.chunks_exact_mut(dim).enumerate() {
            let from = &outputs[t / seq * l.heads + h][t % seq * dim..][..dim];
            out.iter_mut().zip(from).for_each(|(out, &x)| *out = S::store(x));
        }
    });
}

pub(super) fn attention_backward(
    d_o: &Tensor,
    qkv: &Tensor,
    o: &Tensor,
    lse: &Tensor,
    cu_seqlens: Option<&Tensor>,
    l: AttentionLayout,
    dqkv: &mut Tensor,
) {
    let first = first_keys(cu_seqlens, l);
    with_float!(qkv.dtype(), S => backward::<S>([d_o.host(), qkv.host(), o.host()], lse.host(), &first, l, dqkv.host_mut()));
}

fn backward<S: Float>([d_o, qkv, o]: [&[S]; 3], lse: &[S::Real], first: &[usize], l: AttentionLayout, dqkv: &mut [S]) {
    let (seq, dim, width) = (l.seq_len, l.head_dim, l.qkv_width());
    let group = l.heads / l.kv_heads;
    // One task per key head: gradients of shared keys and values are summed in the order of the query heads.
    let gradients: Vec<[Vec<S::Real>; 3]> = (0..l.batch * l.kv_heads)
        .into_par_iter()
        .map(|index| {
            let (b, kv) = (index / l.kv_heads, index % l.kv_heads);
            let rows = b * seq..(b + 1) * seq;
            let k = head(qkv, width, rows.clone(), (l.heads + kv) * dim, dim);
            let v = head(qkv, width, rows.clone(), (l.heads + l.kv_heads + kv) * dim, dim);
            let (kt, vt) = (transposed(&k, dim), transposed(&v, dim));
            let mut dq = vec![S::Real::default(); group * seq * dim];
            let mut dk = vec![S::Real::default(); seq * dim];
            let mut dv = vec![S::Real::default(); seq * dim];
            for (g, dq) in dq.chunks_exact_mut((seq * dim).max(1)).enumerate() {
                let h = kv * group + g;
                let q = head(qkv, width, rows.clone(), h * dim, dim);
                let o = head(o, l.output_width(), rows.clone(), h * dim, dim);
                let d_o = head(d_o, l.output_width(), rows.clone(), h * dim, dim);
                let lse = &lse[(b * l.heads + h) * seq..][..seq];
                let first = &first[b * seq..][..seq];
                head_backward([&q, &k, &kt, &vt, &o, &d_o], lse, first, S::Real::of(l.scale()), [dq, &mut dk, &mut dv]);
            }
            [dq, dk, dv]
        })
        .collect();
    dqkv.par_chunks_mut(width).enumerate().for_each(|(t, row)| {
        let (b, i) = (t / seq, t % seq);
        for (h, out) in row.chunks_exact_mut(dim).enumerate() {
            let (kv, part, at) = match h.checked_sub(l.heads) {
                None => (h / group, 0, h % group * seq + i),
                Some(h) => (h % l.kv_heads, 1 + h / l.kv_heads, i),
            };
            let from = &gradients[b * l.kv_heads + kv][part][at * dim..][..dim];
            out.iter_mut().zip(from).for_each(|(out, &x)| *out = S::store(x));
        }
    });
}

fn head_backward<R: Real>(
    [q, k, kt, vt, o, d_o]: [&[R]; 6],
    lse: &[R],
    first: &[usize],
    scale: R,
    [dq, dk, dv]: [&mut [R]; 3],
) {
    let dim = q.len() / lse.len();
    let (mut p, mut dp) = (vec![R::default(); lse.len()], vec![R::default(); lse.len()]);
    for i in 0..lse.len() {
        let row = i * dim..(i + 1) * dim;
        let (p, dp) = (&mut p[..=i - first[i]], &mut dp[..=i - first[i]]);
        scores(&q[row.clone()], kt, first[i], p);
        scores(&d_o[row.clone()], vt, first[i], dp);
        let delta: R = d_o[row.clone()].iter().zip(&o[row.clone()]).map(|(&a, &b)| a * b).sum();
        for (j, (&p, &dp)) in (first[i]..).zip(p.iter().zip(dp.iter())) {
            let probability = (p * scale - lse[i]).exp();
            let ds = probability * (dp - delta) * scale;
            let column = j * dim..(j + 1) * dim;
            accumulate(&mut dv[column.clone()], probability, &d_o[row.clone()]);
            accumulate(&mut dk[column.clone()], ds, &q[row.clone()]);
            accumulate(&mut dq[row.clone()], ds, &k[column]);
        }
    }
}
