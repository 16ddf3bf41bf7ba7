use super::Inputs;
use super::head::{Head, Token, project};
use crate::element::{Float, Real, with_float};
use crate::ops::gated_delta_rule::{DeltaGradient, DeltaSpec, Segments};
use crate::ops::real_type;
use crate::ops::segments::{BoundaryStates, scatter, tasks};
use crate::{Result, Tensor};
use rayon::prelude::*;
use std::ops::Range;

/// The number of tokens between two states that backward stores while it runs forward. It has no influence on results.
const STORED: usize = 64;

/// Returns the scratch bytes of backward: gradients in the type of sums, and for each thread the states of a segment that are stored.
pub(in crate::ops::gated_delta_rule) fn scratch_of_backward(
    qkv: &Tensor,
    spec: &DeltaSpec,
    segments: &Segments,
) -> usize {
    let rows = qkv.shape()[0];
    let states = segments.longest(rows).div_ceil(STORED) + STORED + 4;
    let threads = rayon::current_num_threads().min(segments.count() * spec.key_heads);
    let elements = rows * (spec.qkv_width() + 2 * spec.value_heads)
        + threads * states * spec.key_dim * spec.value_dim
        + segments.count() * spec.state_len();
    elements * real_type(qkv.dtype()).size()
}

pub(in crate::ops::gated_delta_rule) fn gated_delta_rule_backward(
    d_o: &Tensor,
    inputs: [&Tensor; 3],
    spec: &DeltaSpec,
    segments: Segments,
    states: BoundaryStates,
    gradient: &mut DeltaGradient,
) -> Result<()> {
    let ranges = segments.ranges("gated_delta_rule_backward", d_o.shape()[0])?;
    let tasks = tasks(&ranges, spec.key_heads);
    with_float!(d_o.dtype(), S => {
        type R = <S as Float>::Real;
        let inputs = Inputs::<S>::new(inputs, spec);
        let size = spec.group() * spec.key_dim * spec.value_dim;
        let of_states = |values: Option<&Tensor>, segment: usize, h: usize| -> Vec<R> {
            let zeros = || vec![R::of(0.0); size];
            values.map_or_else(zeros, |values| values.host::<R>()[(segment * spec.key_heads + h) * size..][..size].to_vec())
        };
        let run = |&[segment, h]: &[usize; 2]| {
            let mut group = GroupGradient::new(spec, ranges[segment].clone(), h);
            let (before, after) = (of_states(states.before, segment, h), of_states(states.gradient, segment, h));
            group.run(&inputs, d_o.host::<S>(), &before, after);
            group
        };
        let results: Vec<GroupGradient<R>> = tasks.par_iter().map(run).collect();
        for tensor in [&mut gradient.gates.g, &mut gradient.gates.beta] {
            tensor.host_mut::<R>().fill(R::of(0.0));
        }
        gradient.qkv.host_mut::<S>().fill(S::store(R::of(0.0)));
        if let (Some(before), Some(after)) = (&mut gradient.before, states.gradient) {
            // A segment without rows passes the gradient on.
            before.copy_from(0, after)?;
        } else if let Some(before) = &mut gradient.before {
            before.fill_zero()?;
        }
        for (&[segment, h], group) in tasks.iter().zip(results) {
            group.write::<S>(gradient);
            if let Some(before) = &mut gradient.before {
                before.host_mut::<R>()[(segment * spec.key_heads + h) * size..][..size].copy_from_slice(&group.dstate);
            }
        }
    });
    Ok(())
}

/// The gradients of a segment, of one key head and its value heads.
struct GroupGradient<'a, R> {
    spec: &'a DeltaSpec,
    rows: Range<usize>,
    /// The key head.
    h: usize,
    /// By normalised queries and keys, then by projected queries and keys, `[rows, D_k]` each.
    dq: Vec<R>,
    dk: Vec<R>,
    /// `[rows, group · D_v]`.
    dv: Vec<R>,
    /// `[rows, group]` each.
    dg: Vec<R>,
    dbeta: Vec<R>,
    /// By the states before the segment, `[group, D_k, D_v]`.
    dstate: Vec<R>,
}

impl<'a, R: Real> GroupGradient<'a, R> {
    fn new(spec: &'a DeltaSpec, rows: Range<usize>, h: usize) -> GroupGradient<'a, R> {
        let (len, group) = (rows.len(), spec.group());
        let zeros = |width: usize| vec![R::of(0.0); len * width];
        let [dq, dk] = [(); 2].map(|()| zeros(spec.key_dim));
        let (dv, [dg, dbeta]) = (zeros(group * spec.value_dim), [(); 2].map(|()| zeros(group)));
        GroupGradient { spec, rows, h, dq, dk, dv, dg, dbeta, dstate: Vec::new() }
    }

    /// Computes the gradients, from the states `before` the segment and the gradients `after` by the states after the segment.
    fn run<S: Float<Real = R>>(&mut self, inputs: &Inputs<S>, d_o: &[S], before: &[R], after: Vec<R>) {
        let size = self.spec.key_dim * self.spec.value_dim;
        self.dstate = after;
        for of_group in 0..self.spec.group() {
            let state = of_group * size..(of_group + 1) * size;
            self.run_head(inputs, d_o, of_group, &before[state]);
        }
        let dim = self.spec.key_dim;
        for (at, t) in self.rows.clone().enumerate() {
            let token = inputs.token(t, self.h * self.spec.group());
            for (unit, d) in [(&token.q, &mut self.dq), (&token.k, &mut self.dk)] {
                let d = &mut d[at * dim..][..dim];
                let dx: Vec<R> = unit.backward(d).collect();
                d.copy_from_slice(&dx);
            }
        }
    }

    /// Runs forward of a value head and stores each [`STORED`]th state. Then runs backward from the last stored state to the first.
    fn run_head<S: Float<Real = R>>(&mut self, inputs: &Inputs<S>, d_o: &[S], of_group: usize, before: &[R]) {
        let (j, first) = (self.h * self.spec.group() + of_group, self.rows.start);
        let (mut head, mut stored) = (Head::new(self.spec, Some(before)), Vec::new());
        for t in self.rows.clone() {
            if (t - first).is_multiple_of(STORED) {
                stored.push(head.state.clone());
            }
            head.step(&inputs.token(t, j));
        }
        for (block, start) in stored.into_iter().enumerate().rev() {
            let tokens = first + block * STORED..self.rows.end.min(first + (block + 1) * STORED);
            let (mut head, mut states) = (Head::new(self.spec, Some(&start)), vec![start]);
            for t in tokens.clone() {
                head.step(&inputs.token(t, j));
                states.push(head.state.clone());
            }
            for t in tokens.clone().rev() {
                let of_token = [&states[t - tokens.start], &states[t - tokens.start + 1]].map(Vec::as_slice);
                let d_o = &d_o[t * self.spec.value_width() + j * self.spec.value_dim..][..self.spec.value_dim];
                self.step_back(&inputs.token(t, j), of_token, d_o, [t - first, of_group]);
            }
        }
    }

    /// Runs a token backward. `states` are the states before and after the token, and `place` the token in the segment and the head in the group.
    fn step_back<S: Float<Real = R>>(
        &mut self,
        token: &Token<S>,
        [before, after]: [&[R]; 2],
        d_o: &[S],
        [at, of_group]: [usize; 2],
    ) {
        let (DeltaSpec { key_dim, value_dim, .. }, group) = (*self.spec, self.spec.group());
        let Token { q, k, v, decay, beta } = token;
        let d_o: Vec<R> = d_o.iter().map(|d| d.load()).collect();
        let ds = &mut self.dstate[of_group * key_dim * value_dim..][..key_dim * value_dim];
        let (dq, dk) = (&mut self.dq[at * key_dim..][..key_dim], &mut self.dk[at * key_dim..][..key_dim]);
        let decayed: Vec<R> = before.iter().map(|s| *s * *decay).collect();
        let mut difference = vec![R::of(0.0); value_dim];
        project(&decayed, &k.values, &mut difference);
        difference.iter_mut().zip(*v).for_each(|(d, v)| *d = v.load() - *d);
        let dot = |a: &[R], b: &[R]| a.iter().zip(b).map(|(a, b)| *a * *b).sum::<R>();
        for (i, ds) in ds.chunks_exact_mut(value_dim).enumerate() {
            dq[i] += dot(&after[i * value_dim..][..value_dim], &d_o);
            ds.iter_mut().zip(&d_o).for_each(|(ds, d_o)| *ds += q.values[i] * *d_o);
        }
        let mut dd = vec![R::of(0.0); value_dim];
        project(ds, &k.values, &mut dd);
        self.dbeta[at * group + of_group] = dot(&dd, &difference);
        let dv: Vec<R> = dd.iter().map(|dd| *beta * *dd).collect();
        let d: Vec<R> = difference.iter().map(|difference| *beta * *difference).collect();
        let mut dg = R::of(0.0);
        for (i, ds) in ds.chunks_exact_mut(value_dim).enumerate() {
            let decayed = &decayed[i * value_dim..][..value_dim];
            dk[i] += dot(ds, &d) - dot(decayed, &dv);
            ds.iter_mut().zip(&dv).for_each(|(ds, dv)| *ds = *ds - k.values[i] * *dv);
            dg += dot(ds, decayed);
            ds.iter_mut().for_each(|ds| *ds = *ds * *decay);
        }
        self.dg[at * group + of_group] = dg;
        self.dv[(at * group + of_group) * value_dim..][..value_dim].copy_from_slice(&dv);
    }

    /// Writes the gradients of the segment's rows.
    fn write<S: Float<Real = R>>(&self, to: &mut DeltaGradient) {
        let (spec, h, first) = (self.spec, self.h, self.rows.start);
        let (dim, group) = (spec.key_dim, spec.group());
        let of_values = [2 * spec.key_width() + h * group * spec.value_dim, group * spec.value_dim];
        let parts = [(&self.dq, [h * dim, dim]), (&self.dk, [spec.key_width() + h * dim, dim]), (&self.dv, of_values)];
        for (rows, [column, count]) in parts {
            let rows: Vec<S> = rows.iter().map(|&d| S::store(d)).collect();
            scatter(&rows, first, [spec.qkv_width(), column, count], to.qkv.host_mut());
        }
        for (rows, gate) in [(&self.dg, &mut to.gates.g), (&self.dbeta, &mut to.gates.beta)] {
            scatter(rows, first, [spec.value_heads, h * group, group], gate.host_mut());
        }
    }
}
