//! The state space duality in chunks, in F64: products of matrices. It is independent of the recurrence.

use crate::ops::ssd::SsdSpec;
use crate::testing::matrix::Matrix;

/// The inputs of all tokens, as of [`ssd`](crate::ops::ssd()).
pub(super) struct Inputs<'a> {
    pub xbc: &'a [f64],
    pub dt: &'a [f64],
    pub a_log: &'a [f64],
    pub dt_bias: &'a [f64],
    pub d: &'a [f64],
}

/// The inputs of a chunk of one head.
struct Chunk {
    b: Matrix,
    c: Matrix,
    /// `x` times the time step.
    input: Matrix,
    /// The cumulative sum of the logarithm of the decay.
    sum: Vec<f64>,
}

/// The gradients of a chunk.
struct Gradients {
    b: Matrix,
    c: Matrix,
    input: Matrix,
    /// By the logarithm of the decay.
    decay: Vec<f64>,
    state: Matrix,
}

impl Chunk {
    fn last(&self) -> f64 {
        self.sum[self.sum.len() - 1]
    }

    fn decay(&self) -> Matrix {
        let (n, sum) = (self.sum.len(), &self.sum);
        Matrix::of(n, n, |i, j| if i >= j { (sum[i] - sum[j]).exp() } else { 0.0 })
    }

    /// Returns the output and the state `[P, N]` after the chunk.
    fn forward(&self, state: &Matrix) -> (Matrix, Matrix) {
        let Chunk { b, c, input, sum } = self;
        let within = c.times(&b.t()).by(&self.decay()).times(input);
        let y = within.plus(&c.times(&state.t()).scaled(|i| sum[i].exp()));
        let weighted = b.scaled(|i| (self.last() - sum[i]).exp());
        (y, state.scaled(|_| self.last().exp()).plus(&input.t().times(&weighted)))
    }

    fn backward(&self, state: &Matrix, dy: &Matrix, d_after: &Matrix) -> Gradients {
        let Chunk { b, c, input, sum } = self;
        let (n, to_end) = (sum.len(), |i: usize| (self.last() - sum[i]).exp());
        let decay = self.decay();
        let scores = c.times(&b.t()).by(&decay);
        let dscores = dy.times(&input.t()).lower(true);
        let m = dscores.by(&decay);
        let z = input.times(d_after).scaled(to_end);
        let through_state = dy.times(state).scaled(|i| sum[i].exp());
        let dinput = scores.t().times(dy).plus(&b.scaled(to_end).times(&d_after.t()));
        let dstate = d_after.scaled(|_| self.last().exp()).plus(&dy.t().times(&c.scaled(|i| sum[i].exp())));
        let (with_c, both, with_b) = (through_state.by(c), dscores.by(&scores), z.by(b));
        let of = |i: usize| with_c.row_sum(i) + both.row_sum(i) - both.column_sum(i) - with_b.row_sum(i);
        let mut of_sum: Vec<f64> = (0..n).map(of).collect();
        of_sum[n - 1] += with_b.sum() + self.last().exp() * state.by(d_after).sum();
        for i in (1..n).rev() {
            of_sum[i - 1] += of_sum[i];
        }
        Gradients {
            b: m.t().times(c).plus(&z),
            c: through_state.plus(&m.times(b)),
            input: dinput,
            decay: of_sum,
            state: dstate,
        }
    }
}

/// Returns the output, the state after the tokens, and the gradients by `xbc`, `dt`, the state before the tokens, `a_log`, `dt_bias` and `d`, in chunks of
/// `size` tokens.
pub(super) fn run(
    inputs: &Inputs,
    before: &[f64],
    [dy, d_after]: [&[f64]; 2],
    spec: &SsdSpec,
    size: usize,
) -> [Vec<f64>; 8] {
    let SsdSpec { heads, head_dim, state_dim, dt_limits: [least, most], .. } = *spec;
    let Inputs { xbc, dt, a_log, dt_bias, d } = *inputs;
    let (tokens, width, out) = (dt.len() / heads, spec.xbc_width(), spec.width());
    let mut results =
        [tokens * out, before.len(), xbc.len(), dt.len(), before.len(), heads, heads, heads].map(|len| vec![0.0; len]);
    for h in 0..heads {
        let rate = -a_log[h].exp();
        let raw = |t: usize| dt[t * heads + h] + dt_bias[h];
        let softplus = |t: usize| raw(t).exp().ln_1p();
        let step = |t: usize| softplus(t).max(least).min(most);
        let (at_x, at_b) = (h * head_dim, out + h / spec.group() * state_dim);
        let at_c = at_b + spec.group_width();
        let x = |t: usize, p: usize| xbc[t * width + at_x + p];
        let chunk = |first: usize| {
            let n = size.min(tokens - first);
            let of = |at: usize| Matrix::of(n, state_dim, move |i, c| xbc[(first + i) * width + at + c]);
            let sum = (first..first + n).scan(0.0, |sum, t| {
                *sum += step(t) * rate;
                Some(*sum)
            });
            let input = Matrix::of(n, head_dim, |i, p| step(first + i) * x(first + i, p));
            Chunk { b: of(at_b), c: of(at_c), input, sum: sum.collect() }
        };
        let state_at = h * head_dim * state_dim;
        let of_state = |from: &[f64]| Matrix::of(head_dim, state_dim, |p, n| from[state_at + p * state_dim + n]);
        let (mut state, mut starts) = (of_state(before), Vec::new());
        for first in (0..tokens).step_by(size) {
            let (y, after) = chunk(first).forward(&state);
            for i in 0..size.min(tokens - first) {
                for p in 0..head_dim {
                    results[0][(first + i) * out + at_x + p] = y.at(i, p) + d[h] * x(first + i, p);
                }
            }
            starts.push((first, std::mem::replace(&mut state, after)));
        }
        results[1][state_at..][..state.values.len()].copy_from_slice(&state.values);
        let mut dstate = of_state(d_after);
        for (first, state) in starts.into_iter().rev() {
            let (chunk, count) = (chunk(first), size.min(tokens - first));
            let of_rows = Matrix::of(count, head_dim, |i, p| dy[(first + i) * out + at_x + p]);
            let of = chunk.backward(&state, &of_rows, &dstate);
            for i in 0..count {
                let t = first + i;
                for c in 0..state_dim {
                    results[2][t * width + at_b + c] += of.b.at(i, c);
                    results[2][t * width + at_c + c] += of.c.at(i, c);
                }
                let mut of_step = rate * of.decay[i];
                for p in 0..head_dim {
                    let (dy, dinput) = (of_rows.at(i, p), of.input.at(i, p));
                    results[2][t * width + at_x + p] = step(t) * dinput + d[h] * dy;
                    of_step += dinput * x(t, p);
                    results[7][h] += dy * x(t, p);
                }
                let is_free = (least..=most).contains(&softplus(t));
                let ddt = if is_free { of_step / (1.0 + (-raw(t)).exp()) } else { 0.0 };
                results[3][t * heads + h] = ddt;
                results[5][h] += step(t) * rate * of.decay[i];
                results[6][h] += ddt;
            }
            dstate = of.state;
        }
        results[4][state_at..][..dstate.values.len()].copy_from_slice(&dstate.values);
    }
    results
}
