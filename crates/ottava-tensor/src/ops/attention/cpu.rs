//! The CPU reference. Innermost loops run over contiguous memory, so the keys and values of each head are transposed once.

use super::{AttentionInput, AttentionSpec, HeadView};
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use crate::ops::parallel_rows::{ParallelRows, rows_per_task};
use crate::ops::real_type;
use crate::ops::transpose::cpu::columns_to_rows;
use crate::wide::wide;
use rayon::prelude::*;
use std::ops::Range;

/// Returns one head of the tokens `rows` in the type of sums, `[S, D]`.
fn head<S: Float>(view: HeadView, rows: Range<usize>, head: usize, dim: usize) -> Vec<S::Real> {
    let (x, stride) = (view.matrix.host::<S>(), view.stride());
    let mut values = Vec::with_capacity(rows.len() * dim);
    for t in rows {
        values.extend(x[t * stride + view.column + head * dim..][..dim].iter().map(|x| x.load()));
    }
    values
}

fn transposed<R: Real>(x: &[R], dim: usize) -> Vec<R> {
    let mut columns = vec![R::default(); x.len()];
    columns_to_rows(x, dim, 0, &mut columns);
    columns
}

/// Returns for each of the `B·S` queries the range of keys of its sequence that it sees.
fn visible_keys(input: &AttentionInput, spec: &AttentionSpec) -> Vec<Range<usize>> {
    let (queries, keys) = (input.query_len(), input.key_len());
    let document_of = |sequence: usize, position: usize| match input.cu_seqlens {
        None => 0..keys,
        Some(at) => {
            let (edges, token) = (at.host::<i32>(), sequence * keys + position);
            let document = edges[..edges.len() - 1].partition_point(|&start| start as usize <= token).saturating_sub(1);
            let within = |edge: i32| (edge as usize).saturating_sub(sequence * keys).min(keys);
            within(edges[document])..within(edges[document + 1])
        }
    };
    let of_query = |query: usize| {
        let (sequence, position) = (query / queries, input.first_query + query % queries);
        spec.visible(position, document_of(sequence, position))
    };
    (0..input.batch * queries).map(of_query).collect()
}

impl AttentionSpec {
    /// Returns the keys that the query at `position` sees. `keys` are the keys of its document. The range may be empty.
    pub(in crate::ops) fn visible(&self, position: usize, keys: Range<usize>) -> Range<usize> {
        let start = self.window.map_or(0, |window| (position + 1).saturating_sub(window)).max(keys.start);
        let end = match self.window {
            _ if self.causal => keys.end.min(position + 1),
            Some(window) => keys.end.min(position.saturating_add(window)),
            None => keys.end,
        };
        start.min(end)..end
    }

    /// Returns the score from the product of a query and a key.
    pub(in crate::ops) fn score<R: Real>(&self, product: R) -> R {
        let scaled = product * R::of(self.scale);
        match self.soft_cap.map(R::of) {
            Some(cap) => cap * (scaled / cap).tanh(),
            None => scaled,
        }
    }

    /// Returns the derivative of a `score` by the scaled product, without the factor `scale`: `1 − (score / soft_cap)²`. `None` without a soft cap.
    fn slope<R: Real>(&self, score: R) -> Option<R> {
        let relative = score / R::of(self.soft_cap?);
        Some(R::of(1.0) - relative * relative)
    }
}

wide! {
    /// Computes `out[j] = Σ_d q[d] · kt[d, first + j]` for `out.len()` columns of `kt` `[D, S]`.
    fn products[R: Real](q: &[R], kt: &[R], first: usize, out: &mut [R]) {
        let stride = kt.len() / q.len();
        out.fill(R::default());
        for (d, &q) in q.iter().enumerate() {
            for (out, &k) in out.iter_mut().zip(&kt[d * stride + first..]) {
                *out += q * k;
            }
        }
    }

    /// Computes `out[c] += Σ_j factors[j] · x[j, c]` for `x` `[J, C]`, in the order of `j`.
    fn accumulate[R: Real](out: &mut [R], factors: &[R], x: &[R]) {
        for (&factor, x) in factors.iter().zip(x.chunks_exact(out.len())) {
            for (out, &x) in out.iter_mut().zip(x) {
                *out += factor * x;
            }
        }
    }

    /// Computes `out[j, c] += factors[j] · x[c]` for `out` `[J, C]`.
    fn accumulate_rows[R: Real](out: &mut [R], factors: &[R], x: &[R]) {
        for (out, &factor) in out.chunks_exact_mut(x.len()).zip(factors) {
            for (out, &x) in out.iter_mut().zip(x) {
                *out += factor * x;
            }
        }
    }

    /// Replaces scores by their softmax and returns the log-sum-exp, which is −∞ without scores.
    pub(in crate::ops) fn softmax[R: Real](scores: &mut [R]) -> R {
        let largest = scores.iter().copied().reduce(|a, b| if b > a { b } else { a });
        let Some(largest) = largest else { return R::of(f64::NEG_INFINITY) };
        scores.iter_mut().for_each(|s| *s = (*s - largest).exp());
        let sum: R = scores.iter().copied().sum();
        scores.iter_mut().for_each(|s| *s = *s / sum);
        largest + sum.ln()
    }

    /// Replaces the products of query and keys in `p` by the probabilities. Replaces the products of the gradient of the output and values in `ds` by
    /// the gradients by the unscaled products of query and keys.
    fn probabilities[R: Real](p: &mut [R], ds: &mut [R], lse: R, delta: R, spec: &AttentionSpec) {
        let scale = R::of(spec.scale);
        for (p, ds) in p.iter_mut().zip(ds) {
            let score = spec.score(*p);
            *p = (score - lse).exp();
            *ds = *p * (*ds - delta) * scale;
            if let Some(slope) = spec.slope(score) {
                *ds = *ds * slope;
            }
        }
    }
}

/// Returns the scratch bytes of forward: the outputs of all heads in the type of sums, and per thread Q, K, V and Kᵀ of one head.
pub(super) fn scratch(input: &AttentionInput, spec: &AttentionSpec) -> usize {
    let (queries, keys) = (input.query_len(), input.key_len());
    let per_thread = queries * spec.head_dim + keys * (2 * spec.head_dim + spec.value_dim);
    let outputs = input.batch * queries * spec.output_width();
    (outputs + threads(input.batch * spec.heads) * per_thread) * real_type(input.q.matrix.dtype()).size()
}

/// Returns the scratch bytes of backward: the gradients of all heads in the type of sums, and per thread K, V and their transposes for one key head,
/// and Q, the output and its gradient for one query head.
pub(super) fn scratch_of_backward(input: &AttentionInput, spec: &AttentionSpec) -> usize {
    let (queries, keys) = (input.query_len(), input.key_len());
    let (dim, value_dim) = (spec.head_dim, spec.value_dim);
    let per_thread = queries * (dim + 2 * value_dim) + 2 * keys * (dim + value_dim);
    let gradients = input.batch * (queries * spec.query_width() + keys * (spec.key_width() + spec.value_width()));
    (gradients + threads(input.batch * spec.kv_heads) * per_thread) * real_type(input.q.matrix.dtype()).size()
}

/// Returns how many of the `tasks` run at once.
fn threads(tasks: usize) -> usize {
    tasks.min(rayon::current_num_threads())
}

/// Returns the rows of sequence `b`. Each sequence has `len` tokens.
fn rows(b: usize, len: usize) -> Range<usize> {
    b * len..(b + 1) * len
}

pub(super) fn attention(input: AttentionInput, spec: &AttentionSpec, o: &mut Tensor, lse: &mut Tensor) {
    let visible = visible_keys(&input, spec);
    with_float!(o.dtype(), S => forward::<S>(input, spec, &visible, o.host_mut(), lse.host_mut()));
}

fn forward<S: Float>(
    input: AttentionInput,
    spec: &AttentionSpec,
    visible: &[Range<usize>],
    o: &mut [S],
    lse: &mut [S::Real],
) {
    let (queries, keys) = (input.query_len(), input.key_len());
    let (dim, value_dim) = (spec.head_dim, spec.value_dim);
    let outputs: Vec<Vec<S::Real>> = lse
        .par_chunks_mut(queries.max(1))
        .with_min_len(rows_per_task(queries * keys * dim))
        .enumerate()
        .map(|(index, lse)| {
            let (b, h) = (index / spec.heads, index % spec.heads);
            let kv = h / spec.group();
            let q = head::<S>(input.q, rows(b, queries), h, dim);
            let kt = transposed(&head::<S>(input.k, rows(b, keys), kv, dim), dim);
            let v = head::<S>(input.v, rows(b, keys), kv, value_dim);
            let mut o = vec![S::Real::default(); queries * value_dim];
            let mut p = vec![S::Real::default(); keys];
            for (i, (o, lse)) in o.chunks_exact_mut(value_dim).zip(lse).enumerate() {
                let visible = visible[b * queries + i].clone();
                let p = &mut p[visible.clone()];
                products(&q[i * dim..][..dim], &kt, visible.start, p);
                p.iter_mut().for_each(|p| *p = spec.score(*p));
                *lse = softmax(p);
                accumulate(o, p, &v[visible.start * value_dim..]);
            }
            o
        })
        .collect();
    o.par_rows_mut(spec.output_width()).enumerate().for_each(|(t, row)| {
        for (h, out) in row.chunks_exact_mut(value_dim).enumerate() {
            let from = &outputs[t / queries * spec.heads + h][t % queries * value_dim..][..value_dim];
            out.iter_mut().zip(from).for_each(|(out, &x)| *out = S::store(x));
        }
    });
}

pub(super) fn attention_backward(
    d_o: &Tensor,
    input: AttentionInput,
    o: &Tensor,
    lse: &Tensor,
    spec: &AttentionSpec,
    gradients: &mut [Tensor],
) {
    let visible = visible_keys(&input, spec);
    with_float!(o.dtype(), S => backward::<S>([d_o, o], input, lse.host(), &visible, spec, gradients));
}

fn backward<S: Float>(
    [d_o, o]: [&Tensor; 2],
    input: AttentionInput,
    lse: &[S::Real],
    visible: &[Range<usize>],
    spec: &AttentionSpec,
    gradients: &mut [Tensor],
) {
    let (queries, keys) = (input.query_len(), input.key_len());
    let (dim, value_dim, group) = (spec.head_dim, spec.value_dim, spec.group());
    let (o, d_o) = (HeadView::whole(o), HeadView::whole(d_o));
    // One task per key head: gradients of shared keys and values are summed in the order of the query heads.
    let sums: Vec<[Vec<S::Real>; 3]> = (0..input.batch * spec.kv_heads)
        .into_par_iter()
        .with_min_len(rows_per_task(group * queries * keys * dim))
        .map(|index| {
            let (b, kv) = (index / spec.kv_heads, index % spec.kv_heads);
            let k = head::<S>(input.k, rows(b, keys), kv, dim);
            let v = head::<S>(input.v, rows(b, keys), kv, value_dim);
            let (kt, vt) = (transposed(&k, dim), transposed(&v, value_dim));
            let mut dq = vec![S::Real::default(); group * queries * dim];
            let mut dk = vec![S::Real::default(); keys * dim];
            let mut dv = vec![S::Real::default(); keys * value_dim];
            for (g, dq) in dq.chunks_exact_mut((queries * dim).max(1)).enumerate() {
                let h = kv * group + g;
                let q = head::<S>(input.q, rows(b, queries), h, dim);
                let [o, d_o] = [o, d_o].map(|x| head::<S>(x, rows(b, queries), h, value_dim));
                let lse = &lse[(b * spec.heads + h) * queries..][..queries];
                let visible = &visible[b * queries..][..queries];
                head_backward([&q, &k, &kt, &vt, &o, &d_o], lse, visible, spec, [dq, &mut dk, &mut dv]);
            }
            [dq, dk, dv]
        })
        .collect();
    // The query heads that share a key head are added in order.
    let parts = [(queries, dim, group), (keys, dim, 1), (keys, value_dim, 1)];
    for (part, (view, matrix)) in input.views().into_iter().zip(input.matrix_of_views()).enumerate() {
        let (len, dim, group) = parts[part];
        let width = spec.kv_heads * group * dim;
        let rows = gradients[matrix].host_mut::<S>().par_rows_mut(view.stride());
        rows.enumerate().for_each(|(t, row)| {
            let (b, i) = (t / len, t % len);
            for (h, out) in row[view.column..][..width].chunks_exact_mut(dim).enumerate() {
                let from = &sums[b * spec.kv_heads + h / group][part][(h % group * len + i) * dim..][..dim];
                out.iter_mut().zip(from).for_each(|(out, &x)| *out = S::store(x));
            }
        });
    }
}

fn head_backward<R: Real>(
    [q, k, kt, vt, o, d_o]: [&[R]; 6],
    lse: &[R],
    visible: &[Range<usize>],
    spec: &AttentionSpec,
    [dq, dk, dv]: [&mut [R]; 3],
) {
    let (dim, value_dim) = (spec.head_dim, spec.value_dim);
    let keys = k.len() / dim;
    let (mut p, mut ds) = (vec![R::default(); keys], vec![R::default(); keys]);
    for (i, visible) in visible.iter().enumerate() {
        let (row, value_row) = (i * dim..(i + 1) * dim, i * value_dim..(i + 1) * value_dim);
        let (p, ds) = (&mut p[visible.clone()], &mut ds[visible.clone()]);
        products(&q[row.clone()], kt, visible.start, p);
        products(&d_o[value_row.clone()], vt, visible.start, ds);
        let delta: R = d_o[value_row.clone()].iter().zip(&o[value_row.clone()]).map(|(&a, &b)| a * b).sum();
        probabilities(p, ds, lse[i], delta, spec);
        accumulate_rows(&mut dv[visible.start * value_dim..], p, &d_o[value_row]);
        accumulate_rows(&mut dk[visible.start * dim..], ds, &q[row.clone()]);
        accumulate(&mut dq[row], ds, &k[visible.start * dim..]);
    }
}
