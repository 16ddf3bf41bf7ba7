mod backward;
mod head;

pub(super) use backward::{gated_delta_rule_backward, scratch_of_backward};

use super::{DeltaGates, DeltaSpec, SegmentStates, Segments};
use crate::element::{Float, Real, with_float};
use crate::ops::real_type;
use crate::ops::segments::{scatter, tasks};
use crate::{Result, Tensor};
use head::{Head, Token};
use rayon::prelude::*;

/// The inputs of all tokens.
struct Inputs<'a, S: Float> {
    qkv: &'a [S],
    g: &'a [S::Real],
    beta: &'a [S::Real],
    spec: &'a DeltaSpec,
}

impl<'a, S: Float> Inputs<'a, S> {
    fn new([qkv, g, beta]: [&'a Tensor; 3], spec: &'a DeltaSpec) -> Inputs<'a, S> {
        Inputs { qkv: qkv.host(), g: g.host(), beta: beta.host(), spec }
    }

    /// Returns the query of row `t` and key head `h`, as projected.
    fn query(&self, t: usize, h: usize) -> &'a [S] {
        &self.qkv[t * self.spec.qkv_width() + h * self.spec.key_dim..][..self.spec.key_dim]
    }

    /// Returns the key of row `t` and key head `h`, as projected.
    fn key(&self, t: usize, h: usize) -> &'a [S] {
        &self.qkv[t * self.spec.qkv_width() + self.spec.key_width() + h * self.spec.key_dim..][..self.spec.key_dim]
    }

    /// Returns the value of row `t` and value head `j`.
    fn value(&self, t: usize, j: usize) -> &'a [S] {
        &self.qkv[t * self.spec.qkv_width() + 2 * self.spec.key_width() + j * self.spec.value_dim..]
            [..self.spec.value_dim]
    }

    /// Returns the inputs of row `t` for value head `j`.
    fn token(&self, t: usize, j: usize) -> Token<'a, S> {
        let h = j / self.spec.group();
        let [decay, beta] = [self.g, self.beta].map(|gate| gate[t * self.spec.value_heads + j]);
        Token::new(self.query(t, h), self.key(t, h), self.value(t, j), decay.exp(), beta)
    }
}

/// Returns the scratch bytes of forward: a copy of the output, and states, one for each segment and head if they are kept, or one for each thread.
pub(super) fn scratch(o: &Tensor, spec: &DeltaSpec, segments: &Segments, keeps: bool) -> usize {
    let heads = if keeps { segments.count() * spec.value_heads } else { rayon::current_num_threads() };
    o.bytes() + heads * spec.key_dim * spec.value_dim * real_type(o.dtype()).size()
}

pub(super) fn gated_delta_rule(
    qkv: &Tensor,
    gates: &DeltaGates,
    spec: &DeltaSpec,
    segments: Segments,
    mut states: Option<SegmentStates>,
    o: &mut Tensor,
) -> Result<()> {
    let ranges = segments.ranges("gated_delta_rule", qkv.shape()[0])?;
    let slots = states.as_ref().map(|states| states.of("gated_delta_rule", &ranges)).transpose()?;
    let heads = spec.value_heads;
    let tasks: Vec<[usize; 2]> = tasks(&ranges, heads);
    with_float!(qkv.dtype(), S => {
        type R = <S as Float>::Real;
        let inputs = Inputs::<S>::new([qkv, &gates.g, &gates.beta], spec);
        let size = spec.key_dim * spec.value_dim;
        let at = |slot: usize, head: usize| (slot * heads + head) * size..(slot * heads + head + 1) * size;
        let before = |segment: usize, head: usize| {
            let (states, (slot, is_read)) = (states.as_ref()?, slots.as_ref()?[segment]?);
            is_read.then(|| &states.values.host::<R>()[at(slot, head)])
        };
        let run = |&[segment, head]: &[usize; 2]| {
            let mut state = Head::new(spec, before(segment, head));
            let mut rows = Vec::with_capacity(ranges[segment].len() * spec.value_dim);
            for t in ranges[segment].clone() {
                rows.extend(state.step(&inputs.token(t, head)).iter().map(|&o| S::store(o)));
            }
            (rows, slots.is_some().then(|| state.into_state()))
        };
        let results: Vec<_> = tasks.par_iter().map(run).collect();
        o.host_mut::<S>().fill(S::store(R::of(0.0)));
        for (&[segment, head], (rows, state)) in tasks.iter().zip(results) {
            scatter(&rows, ranges[segment].start, [spec.value_width(), head * spec.value_dim, spec.value_dim], o.host_mut());
            let slot = slots.as_ref().and_then(|slots| slots[segment]);
            if let (Some(states), Some((slot, _)), Some(state)) = (&mut states, slot, state) {
                states.values.host_mut::<R>()[at(slot, head)].copy_from_slice(&state);
            }
        }
    });
    Ok(())
}
