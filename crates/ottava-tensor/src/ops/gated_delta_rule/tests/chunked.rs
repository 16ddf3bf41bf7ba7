//! The gated delta rule in chunks, in F64: products of matrices and one triangular inverse per chunk. It is independent of the recurrence.

use crate::ops::gated_delta_rule::DeltaSpec;
use crate::testing::matrix::Matrix;

/// The inputs of a chunk of one head.
struct Chunk {
    q: Matrix,
    k: Matrix,
    v: Matrix,
    beta: Vec<f64>,
    /// The cumulative sum of `g`.
    b: Vec<f64>,
}

/// The matrices that forward and backward of a chunk share.
struct Parts {
    decay: Matrix,
    inverse: Matrix,
    u: Matrix,
    w: Matrix,
    values: Matrix,
    p: Matrix,
}

/// The gradients of a chunk: by queries, keys, values, `g` and `beta`, and by the state before the chunk.
struct Gradients {
    q: Matrix,
    k: Matrix,
    v: Matrix,
    g: Vec<f64>,
    beta: Vec<f64>,
    state: Matrix,
}

impl Chunk {
    fn len(&self) -> usize {
        self.b.len()
    }

    fn last(&self) -> f64 {
        self.b[self.len() - 1]
    }

    /// Returns the matrix below the diagonal whose inverse solves the chunk.
    fn l(&self, decay: &Matrix) -> Matrix {
        self.k.times(&self.k.t()).scaled(|i| self.beta[i]).by(decay).lower(false)
    }

    fn parts(&self, state: &Matrix) -> Parts {
        let Chunk { q, k, v, beta, b } = self;
        let n = self.len();
        let decay = Matrix::of(n, n, |i, j| if i >= j { (b[i] - b[j]).exp() } else { 0.0 });
        let inverse = self.l(&decay).inverse_of_one_plus();
        let u = inverse.times(&v.scaled(|i| beta[i]));
        let w = inverse.times(&k.scaled(|i| beta[i] * b[i].exp()));
        let values = u.minus(&w.times(state));
        let p = q.times(&k.t()).by(&decay).lower(true);
        Parts { decay, inverse, u, w, values, p }
    }

    fn forward(&self, state: &Matrix) -> (Matrix, Matrix) {
        let Parts { values, p, .. } = self.parts(state);
        let o = self.q.scaled(|i| self.b[i].exp()).times(state).plus(&p.times(&values));
        let weighted = self.k.scaled(|i| (self.last() - self.b[i]).exp());
        let after = state.scaled(|_| self.last().exp()).plus(&weighted.t().times(&values));
        (o, after)
    }

    fn backward(&self, state: &Matrix, d_o: &Matrix, d_after: &Matrix) -> Gradients {
        let Chunk { q, k, v, beta, b } = self;
        let Parts { decay, inverse, u, w, values, p } = &self.parts(state);
        let (n, of_last) = (self.len(), |i: usize| (self.last() - b[i]).exp());
        let dvalues = p.t().times(d_o).plus(&k.scaled(of_last).times(d_after));
        let dstate = d_after
            .scaled(|_| self.last().exp())
            .plus(&q.scaled(|i| b[i].exp()).t().times(d_o))
            .minus(&w.t().times(&dvalues));
        let dp = d_o.times(&values.t()).lower(true);
        let (m, z) = (dp.by(decay), values.times(&d_after.t()).scaled(of_last));
        let (x, y) = (inverse.t().times(&dvalues), inverse.t().times(&dvalues.times(&state.t())).scaled(|_| -1.0));
        let dl = x.times(&u.t()).plus(&y.times(&w.t())).lower(false).scaled(|_| -1.0);
        let (nn, kk) = (dl.by(decay), k.times(&k.t()));
        let through_state = d_o.times(&state.t()).scaled(|i| b[i].exp());
        let dk = m.t().times(q).plus(&z);
        let dk = dk.plus(&nn.times(k).scaled(|i| beta[i])).plus(&nn.t().times(&k.scaled(|i| beta[i])));
        let of_beta = (nn.by(&kk), x.by(v), y.by(k));
        let of_beta =
            (0..n).map(|i| of_beta.0.row_sum(i) + of_beta.1.row_sum(i) + b[i].exp() * of_beta.2.row_sum(i)).collect();
        let both = dp.by(p).plus(&dl.by(&self.l(decay)));
        let (with_q, with_y, with_z) = (through_state.by(q), y.by(&k.scaled(|i| beta[i] * b[i].exp())), z.by(k));
        let mut db: Vec<f64> = (0..n)
            .map(|i| with_q.row_sum(i) + both.row_sum(i) - both.column_sum(i) + with_y.row_sum(i) - with_z.row_sum(i))
            .collect();
        db[n - 1] += with_z.sum() + self.last().exp() * state.by(d_after).sum();
        for i in (1..n).rev() {
            db[i - 1] += db[i];
        }
        Gradients {
            q: through_state.plus(&m.times(k)),
            k: dk.plus(&y.scaled(|i| beta[i] * b[i].exp())),
            v: x.scaled(|i| beta[i]),
            g: db,
            beta: of_beta,
            state: dstate,
        }
    }
}

/// Returns the output, the state after the tokens, and the gradients by `qkv`, `g`, `beta` and the state before the tokens, in chunks of `size` tokens.
pub(super) fn run(
    [qkv, g, beta, before]: [&[f64]; 4],
    [d_o, d_after]: [&[f64]; 2],
    spec: &DeltaSpec,
    size: usize,
) -> [Vec<f64>; 6] {
    let DeltaSpec { value_heads: heads, key_dim, value_dim, .. } = *spec;
    let tokens = g.len() / heads;
    let (width, out) = (spec.qkv_width(), spec.value_width());
    let mut results =
        [tokens * out, spec.state_len(), qkv.len(), g.len(), g.len(), spec.state_len()].map(|len| vec![0.0; len]);
    for j in 0..heads {
        let h = j / spec.group();
        let (at_q, at_k, at_v) = (h * key_dim, spec.key_width() + h * key_dim, 2 * spec.key_width() + j * value_dim);
        let rstd = |t: usize, at: usize| {
            let squares: f64 = qkv[t * width + at..][..key_dim].iter().map(|x| x * x).sum();
            1.0 / (squares + 1e-6).sqrt()
        };
        let scale = 1.0 / (key_dim as f64).sqrt();
        let chunk = |first: usize| {
            let n = size.min(tokens - first);
            let of = |at: usize, dim| Matrix::of(n, dim, move |i, c| qkv[(first + i) * width + at + c]);
            let b = (first..first + n).scan(0.0, |sum, t| {
                *sum += g[t * heads + j];
                Some(*sum)
            });
            Chunk {
                q: of(at_q, key_dim).scaled(|i| rstd(first + i, at_q) * scale),
                k: of(at_k, key_dim).scaled(|i| rstd(first + i, at_k)),
                v: of(at_v, value_dim),
                beta: (first..first + n).map(|t| beta[t * heads + j]).collect(),
                b: b.collect(),
            }
        };
        let state_at = j * key_dim * value_dim;
        let of_state = |from: &[f64]| Matrix::of(key_dim, value_dim, |i, c| from[state_at + i * value_dim + c]);
        let (mut state, mut starts) = (of_state(before), Vec::new());
        for first in (0..tokens).step_by(size) {
            let (o, after) = chunk(first).forward(&state);
            for (at, o) in o.values.iter().enumerate() {
                results[0][(first + at / value_dim) * out + j * value_dim + at % value_dim] = *o;
            }
            starts.push((first, std::mem::replace(&mut state, after)));
        }
        results[1][state_at..][..state.values.len()].copy_from_slice(&state.values);
        let mut dstate = of_state(d_after);
        for (first, state) in starts.into_iter().rev() {
            let chunk = chunk(first);
            let of_rows = Matrix::of(chunk.len(), value_dim, |i, c| d_o[(first + i) * out + j * value_dim + c]);
            let d = chunk.backward(&state, &of_rows, &dstate);
            for i in 0..chunk.len() {
                let t = first + i;
                for (at, unit, d, factor) in [(at_q, &chunk.q, &d.q, scale), (at_k, &chunk.k, &d.k, 1.0)] {
                    let y = |c: usize| unit.at(i, c) / factor;
                    let dot: f64 = (0..key_dim).map(|c| y(c) * d.at(i, c) * factor).sum();
                    for c in 0..key_dim {
                        results[2][t * width + at + c] += rstd(t, at) * (factor * d.at(i, c) - y(c) * dot);
                    }
                }
                for c in 0..value_dim {
                    results[2][t * width + at_v + c] = d.v.at(i, c);
                }
                (results[3][t * heads + j], results[4][t * heads + j]) = (d.g[i], d.beta[i]);
            }
            dstate = d.state;
        }
        results[5][state_at..][..dstate.values.len()].copy_from_slice(&dstate.values);
    }
    results
}
