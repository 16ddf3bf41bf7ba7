use super::Inputs;
use super::head::{Head, Token};
use crate::element::{Float, Real, with_float};
use crate::ops::real_type;
use crate::ops::rmsnorm::cpu::add_partial_sums;
use crate::ops::segments::{BoundaryStates, Segments, scatter, tasks};
use crate::ops::ssd::{SsdGradient, SsdInput, SsdParameterGradients, SsdSpec};
use crate::{Result, Tensor};
use rayon::prelude::*;
use std::ops::Range;

/// The number of tokens between two states that backward stores while it runs forward. It has no influence on results.
const STORED: usize = 64;
/// The number of rows per partial sum of the gradients of parameters. Partial sums are added in order, so the result does not depend on the number of
/// threads.
const ROWS: usize = 64;

/// Returns the scratch bytes of backward: gradients in the type of sums, and for each thread the states of a segment that are stored.
pub(in crate::ops::ssd) fn scratch_of_backward(xbc: &Tensor, spec: &SsdSpec, segments: &Segments) -> usize {
    let rows = xbc.shape()[0];
    let states = segments.longest(rows).div_ceil(STORED) + STORED + 4;
    let threads = rayon::current_num_threads().min(segments.count() * spec.groups);
    let size = spec.head_dim * spec.state_dim;
    let elements =
        rows * (spec.xbc_width() + 6 * spec.heads) + threads * states * size + segments.count() * spec.heads * size;
    elements * real_type(xbc.dtype()).size()
}

pub(in crate::ops::ssd) fn ssd_backward(
    dy: &Tensor,
    input: SsdInput,
    spec: &SsdSpec,
    segments: Segments,
    states: BoundaryStates,
    gradient: &mut SsdGradient,
    parameters: SsdParameterGradients,
) -> Result<()> {
    let ranges = segments.ranges("ssd_backward", dy.shape()[0])?;
    let tasks = tasks(&ranges, spec.groups);
    with_float!(dy.dtype(), S => {
        type R = <S as Float>::Real;
        let inputs = Inputs::<S>::new(input, spec);
        let size = spec.group() * spec.head_dim * spec.state_dim;
        let of_states = |values: Option<&Tensor>, segment: usize, g: usize| -> Vec<R> {
            let zeros = || vec![R::of(0.0); size];
            values.map_or_else(zeros, |values| values.host::<R>()[(segment * spec.groups + g) * size..][..size].to_vec())
        };
        let run = |&[segment, g]: &[usize; 2]| {
            let mut group = GroupGradient::new(spec, ranges[segment].clone(), g);
            let (before, after) = (of_states(states.before, segment, g), of_states(states.gradient, segment, g));
            group.run(&inputs, dy.host::<S>(), &before, after);
            group
        };
        let results: Vec<GroupGradient<R>> = tasks.par_iter().map(run).collect();
        for tensor in [&mut gradient.xbc, &mut gradient.dt] {
            tensor.host_mut::<S>().fill(S::store(R::of(0.0)));
        }
        if let (Some(before), Some(after)) = (&mut gradient.before, states.gradient) {
            // A segment without rows passes the gradient on.
            before.copy_from(0, after)?;
        } else if let Some(before) = &mut gradient.before {
            before.fill_zero()?;
        }
        let mut of_tokens = [(); 3].map(|()| vec![R::of(0.0); input.dt.len()]);
        for (&[segment, g], group) in tasks.iter().zip(results) {
            group.write::<S>(gradient, &mut of_tokens);
            if let Some(before) = &mut gradient.before {
                before.host_mut::<R>()[(segment * spec.groups + g) * size..][..size].copy_from_slice(&group.dstate);
            }
        }
        let SsdParameterGradients { a_log, dt_bias, d } = parameters;
        for (of_tokens, sum) in of_tokens.iter().zip([a_log, dt_bias, d]) {
            sum_tokens(of_tokens, sum.host_mut::<R>());
        }
    });
    Ok(())
}

/// Adds the rows of `of_tokens` `[T, H]` to `sum` `[H]`.
fn sum_tokens<R: Real>(of_tokens: &[R], sum: &mut [R]) {
    for rows in of_tokens.chunks(ROWS * sum.len()) {
        let mut partial = vec![R::of(0.0); sum.len()];
        add_partial_sums(&mut partial, rows.chunks(sum.len()));
        add_partial_sums(sum, std::iter::once(partial.as_slice()));
    }
}

/// The gradients of a segment, of the heads of one group.
struct GroupGradient<'a, R> {
    spec: &'a SsdSpec,
    /// The rows of the segment.
    rows: Range<usize>,
    /// The group.
    g: usize,
    /// `[rows, group · P]`.
    dx: Vec<R>,
    /// `[rows, N]` each.
    db: Vec<R>,
    dc: Vec<R>,
    /// The terms of the gradients of `a_log`, `dt_bias` and `d`, `[rows, group]` each. The term of `dt_bias` is also the gradient by `dt`.
    terms: [Vec<R>; 3],
    /// By the states before the segment, `[group, P, N]`.
    dstate: Vec<R>,
}

impl<'a, R: Real> GroupGradient<'a, R> {
    fn new(spec: &'a SsdSpec, rows: Range<usize>, g: usize) -> GroupGradient<'a, R> {
        let (len, group) = (rows.len(), spec.group());
        let zeros = |width: usize| vec![R::of(0.0); len * width];
        let [db, dc] = [(); 2].map(|()| zeros(spec.state_dim));
        let (dx, terms) = (zeros(group * spec.head_dim), [(); 3].map(|()| zeros(group)));
        GroupGradient { spec, rows, g, dx, db, dc, terms, dstate: Vec::new() }
    }

    /// Computes the gradients, from the states `before` the segment and the gradients `after` by the states after the segment.
    fn run<S: Float<Real = R>>(&mut self, inputs: &Inputs<S>, dy: &[S], before: &[R], after: Vec<R>) {
        let size = self.spec.head_dim * self.spec.state_dim;
        self.dstate = after;
        for of_group in 0..self.spec.group() {
            let state = of_group * size..(of_group + 1) * size;
            self.run_head(inputs, dy, of_group, &before[state]);
        }
    }

    /// Runs forward of a head and stores each [`STORED`]th state. Then runs backward from the last stored state to the first.
    fn run_head<S: Float<Real = R>>(&mut self, inputs: &Inputs<S>, dy: &[S], of_group: usize, before: &[R]) {
        let (h, first) = (self.g * self.spec.group() + of_group, self.rows.start);
        let (mut head, mut stored) = (Head::new(self.spec, Some(before)), Vec::new());
        for t in self.rows.clone() {
            if (t - first).is_multiple_of(STORED) {
                stored.push(head.state.clone());
            }
            head.step(&inputs.token(t, h));
        }
        for (block, start) in stored.into_iter().enumerate().rev() {
            let tokens = first + block * STORED..self.rows.end.min(first + (block + 1) * STORED);
            let (mut head, mut states) = (Head::new(self.spec, Some(&start)), vec![start]);
            for t in tokens.clone() {
                head.step(&inputs.token(t, h));
                states.push(head.state.clone());
            }
            for t in tokens.clone().rev() {
                let of_token = [&states[t - tokens.start], &states[t - tokens.start + 1]].map(Vec::as_slice);
                let dy = &dy[t * self.spec.width() + h * self.spec.head_dim..][..self.spec.head_dim];
                self.step_back(&inputs.token(t, h), of_token, dy, [t - first, of_group]);
            }
        }
    }

    /// Runs a token backward. `states` are the states before and after the token, and `place` the token in the segment and the head in the group.
    fn step_back<S: Float<Real = R>>(
        &mut self,
        token: &Token<S>,
        [before, after]: [&[R]; 2],
        dy: &[S],
        [at, of_group]: [usize; 2],
    ) {
        let (SsdSpec { head_dim, state_dim, .. }, group) = (*self.spec, self.spec.group());
        let Token { x, b, c, a, d, dt, slope, decay } = token;
        let ds = &mut self.dstate[of_group * head_dim * state_dim..][..head_dim * state_dim];
        let (db, dc) = (&mut self.db[at * state_dim..][..state_dim], &mut self.dc[at * state_dim..][..state_dim]);
        let dx = &mut self.dx[(at * group + of_group) * head_dim..][..head_dim];
        let [mut of_decay, mut of_step, mut of_d] = [R::of(0.0); 3];
        for (p, ds) in ds.chunks_exact_mut(state_dim).enumerate() {
            let (x, dy) = (x[p].load(), dy[p].load());
            let ([before, after], input) = ([before, after].map(|state| &state[p * state_dim..][..state_dim]), *dt * x);
            let mut of_input = R::of(0.0);
            for (n, ds) in ds.iter_mut().enumerate() {
                dc[n] += after[n] * dy;
                *ds += dy * c[n].load();
                db[n] += *ds * input;
                of_input += *ds * b[n].load();
                *ds = *ds * *decay;
                of_decay += *ds * before[n];
            }
            dx[p] = *dt * of_input + *d * dy;
            of_step += of_input * x;
            of_d += dy * x;
        }
        let terms = [*dt * *a * of_decay, (*a * of_decay + of_step) * *slope, of_d];
        for (to, term) in self.terms.iter_mut().zip(terms) {
            to[at * group + of_group] = term;
        }
    }

    /// Writes the gradients of the segment's rows, and the terms of the gradients of parameters to `of_tokens`, `[T, H]` each.
    fn write<S: Float<Real = R>>(&self, to: &mut SsdGradient, of_tokens: &mut [Vec<R>; 3]) {
        let (spec, g, first, group) = (self.spec, self.g, self.rows.start, self.spec.group());
        let stored = |rows: &[R]| rows.iter().map(|&d| S::store(d)).collect::<Vec<S>>();
        let (dim, of_x) = (spec.state_dim, group * spec.head_dim);
        let of_b = [spec.width() + g * dim, dim];
        let of_c = [spec.width() + spec.group_width() + g * dim, dim];
        for (rows, [column, count]) in [(&self.dx, [g * of_x, of_x]), (&self.db, of_b), (&self.dc, of_c)] {
            scatter(&stored(rows), first, [spec.xbc_width(), column, count], to.xbc.host_mut());
        }
        let columns = [spec.heads, g * group, group];
        scatter(&stored(&self.terms[1]), first, columns, to.dt.host_mut());
        for (terms, of_tokens) in self.terms.iter().zip(of_tokens) {
            scatter(terms, first, columns, of_tokens);
        }
    }
}
