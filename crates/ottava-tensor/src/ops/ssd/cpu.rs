mod backward;
mod head;

pub(super) use backward::{scratch_of_backward, ssd_backward};

use super::{SegmentStates, Segments, SsdInput, SsdSpec};
use crate::element::{Float, Real, with_float};
use crate::ops::real_type;
use crate::ops::segments::{scatter, tasks};
use crate::{Result, Tensor};
use head::{Head, Token};
use rayon::prelude::*;

/// The inputs of all tokens.
struct Inputs<'a, S: Float> {
    xbc: &'a [S],
    dt: &'a [S],
    /// The negative rate of decay of each head.
    a: Vec<S::Real>,
    dt_bias: &'a [S::Real],
    d: &'a [S::Real],
    spec: &'a SsdSpec,
}

impl<'a, S: Float> Inputs<'a, S> {
    fn new(input: SsdInput<'a>, spec: &'a SsdSpec) -> Inputs<'a, S> {
        let SsdInput { xbc, dt, a_log, dt_bias, d } = input;
        let a = a_log.host::<S::Real>().iter().map(|a_log| -a_log.exp()).collect();
        Inputs { xbc: xbc.host(), dt: dt.host(), a, dt_bias: dt_bias.host(), d: d.host(), spec }
    }

    /// Returns the inputs of row `t` for head `h`.
    fn token(&self, t: usize, h: usize) -> Token<'a, S> {
        let SsdSpec { heads, head_dim, state_dim, .. } = *self.spec;
        let row = &self.xbc[t * self.spec.xbc_width()..][..self.spec.xbc_width()];
        let of_group = self.spec.width() + h / self.spec.group() * state_dim;
        let [b, c] = [of_group, of_group + self.spec.group_width()].map(|first| &row[first..][..state_dim]);
        let raw = self.dt[t * heads + h].load() + self.dt_bias[h];
        Token::new([&row[h * head_dim..][..head_dim], b, c], raw, self.a[h], self.d[h], self.spec.dt_limits)
    }
}

/// Returns the scratch bytes of forward: a copy of the output, and states, one for each segment and head if they are kept, or one for each thread.
pub(super) fn scratch(y: &Tensor, spec: &SsdSpec, segments: &Segments, keeps: bool) -> usize {
    let heads = if keeps { segments.count() * spec.heads } else { rayon::current_num_threads() };
    y.bytes() + heads * spec.head_dim * spec.state_dim * real_type(y.dtype()).size()
}

pub(super) fn ssd(
    input: SsdInput,
    spec: &SsdSpec,
    segments: Segments,
    mut states: Option<SegmentStates>,
    y: &mut Tensor,
) -> Result<()> {
    let ranges = segments.ranges("ssd", y.shape()[0])?;
    let slots = states.as_ref().map(|states| states.of("ssd", &ranges)).transpose()?;
    let (heads, dim) = (spec.heads, spec.head_dim);
    let tasks = tasks(&ranges, heads);
    with_float!(y.dtype(), S => {
        type R = <S as Float>::Real;
        let inputs = Inputs::<S>::new(input, spec);
        let size = dim * spec.state_dim;
        let at = |slot: usize, head: usize| (slot * heads + head) * size..(slot * heads + head + 1) * size;
        let before = |segment: usize, head: usize| {
            let (states, (slot, is_read)) = (states.as_ref()?, slots.as_ref()?[segment]?);
            is_read.then(|| &states.values.host::<R>()[at(slot, head)])
        };
        let run = |&[segment, head]: &[usize; 2]| {
            let mut state = Head::new(spec, before(segment, head));
            let mut rows = Vec::with_capacity(ranges[segment].len() * dim);
            for t in ranges[segment].clone() {
                rows.extend(state.step(&inputs.token(t, head)).iter().map(|&y| S::store(y)));
            }
            (rows, slots.is_some().then(|| state.into_state()))
        };
        let results: Vec<_> = tasks.par_iter().map(run).collect();
        y.host_mut::<S>().fill(S::store(R::of(0.0)));
        for (&[segment, head], (rows, state)) in tasks.iter().zip(results) {
            scatter(&rows, ranges[segment].start, [spec.width(), head * dim, dim], y.host_mut());
            let slot = slots.as_ref().and_then(|slots| slots[segment]);
            if let (Some(states), Some((slot, _)), Some(state)) = (&mut states, slot, state) {
                states.values.host_mut::<R>()[at(slot, head)].copy_from_slice(&state);
            }
        }
    });
    Ok(())
}
