use super::{ConvWeights, SegmentStates, Segments};
use crate::element::{Float, Real, with_float};
use crate::ops::parallel_rows::ParallelRows;
use crate::ops::real_type;
use crate::ops::rmsnorm::cpu::add_partial_sums;
use crate::ops::swiglu::cpu::silu_and_slope;
use crate::{Result, Tensor};
use rayon::prelude::*;
use std::ops::Range;

/// The number of rows per partial sum of the gradients of parameters. Partial sums are added in order, so the result does not depend on the number of
/// threads.
const ROWS: usize = 64;

/// Convolution of rows of `width` channels.
struct Conv<'a, S: Float> {
    x: &'a [S],
    weight: &'a [S],
    bias: Option<&'a [S]>,
    width: usize,
    taps: usize,
    /// A row of zeros.
    zeros: Vec<S>,
    /// The first row of each row's segment. `None` for padding.
    first: Vec<Option<usize>>,
}

impl<'a, S: Float> Conv<'a, S> {
    fn new(x: &'a Tensor, weights: ConvWeights<'a>, ranges: &[Range<usize>]) -> Conv<'a, S> {
        let (width, taps) = (x.shape()[1], weights.weight.shape()[2]);
        let mut first = vec![None; x.shape()[0]];
        for range in ranges {
            first[range.clone()].fill(Some(range.start));
        }
        let (weight, bias) = (weights.weight.host(), weights.bias.map(Tensor::host));
        Conv { x: x.host(), weight, bias, width, taps, zeros: vec![S::store(S::Real::of(0.0)); width], first }
    }

    /// Returns the row of `x` that tap `i` of row `t` reads, in the segment that begins at row `first` after the inputs `before`.
    fn input<'b>(&'b self, t: usize, i: usize, first: usize, before: Option<&'b [S]>) -> &'b [S] {
        let (behind, width) = (self.taps - 1 - i, self.width);
        match (t - first).checked_sub(behind) {
            Some(_) => &self.x[(t - behind) * width..][..width],
            // The state has the last `taps - 1` inputs, oldest first.
            None => before.map_or(&self.zeros, |before| &before[(t - first + i) * width..][..width]),
        }
    }

    /// Computes the sums of row `t`, before SiLU.
    fn sums(&self, t: usize, first: usize, before: Option<&[S]>, p: &mut [S::Real]) {
        match self.bias {
            Some(bias) => p.iter_mut().zip(bias).for_each(|(p, bias)| *p = bias.load()),
            None => p.fill(S::Real::of(0.0)),
        }
        for i in 0..self.taps {
            let x = self.input(t, i, first, before);
            for (c, (p, x)) in p.iter_mut().zip(x).enumerate() {
                *p += self.weight[c * self.taps + i].load() * x.load();
            }
        }
    }

    /// Returns the gradient by the sums of row `t`.
    fn dsums(&self, t: usize, first: usize, dy: &[S]) -> Vec<S::Real> {
        let mut p = vec![S::Real::of(0.0); self.width];
        self.sums(t, first, None, &mut p);
        p.iter().zip(dy).map(|(&p, dy)| dy.load() * silu_and_slope(p).1).collect()
    }

    /// Returns the last `taps - 1` inputs up to the end of the segment `range` after the inputs `before`.
    fn state_after(&self, range: &Range<usize>, before: Option<&[S]>) -> Vec<S> {
        let of = |i: usize| self.input(range.end, i, range.start, before).iter().copied();
        (0..self.taps - 1).flat_map(of).collect()
    }
}

pub(super) fn causal_conv(
    x: &Tensor,
    weights: ConvWeights,
    segments: Segments,
    mut states: Option<SegmentStates>,
    y: &mut Tensor,
) -> Result<()> {
    let ranges = segments.ranges("causal_conv", x.shape()[0])?;
    let slots = states.as_ref().map(|states| states.of("causal_conv", &ranges)).transpose()?;
    with_float!(x.dtype(), S => {
        let conv = Conv::<S>::new(x, weights, &ranges);
        let size = (conv.taps - 1) * conv.width;
        let mut before: Vec<Option<Vec<S>>> = vec![None; x.shape()[0]];
        let mut after: Vec<(usize, Vec<S>)> = Vec::new();
        if let (Some(states), Some(slots)) = (&states, &slots) {
            for (range, slot) in ranges.iter().zip(slots) {
                let Some((slot, is_read)) = *slot else { continue };
                let state = is_read.then(|| states.values.host::<S>()[slot * size..][..size].to_vec());
                after.push((slot, conv.state_after(range, state.as_deref())));
                before[range.start] = state;
            }
        }
        y.host_mut::<S>().par_rows_mut(conv.width).enumerate().for_each(|(t, y)| {
            let Some(first) = conv.first[t] else { return y.fill(conv.zeros[0]) };
            let mut p = vec![<S as Float>::Real::of(0.0); conv.width];
            conv.sums(t, first, before[first].as_deref(), &mut p);
            y.iter_mut().zip(p).for_each(|(y, p)| *y = S::store(silu_and_slope(p).0));
        });
        if let Some(states) = &mut states {
            for (slot, state) in after {
                states.values.host_mut::<S>()[slot * size..][..size].copy_from_slice(&state);
            }
        }
    });
    Ok(())
}

/// Returns the scratch bytes of backward: the gradient by the sums, and the partial sums of the gradients of parameters.
pub(super) fn scratch_of_backward(x: &Tensor, taps: usize) -> usize {
    let [rows, width] = [x.shape()[0], x.shape()[1]];
    (rows * width + rows.div_ceil(ROWS) * width * (taps + 1)) * real_type(x.dtype()).size()
}

pub(super) fn causal_conv_backward(
    dy: &Tensor,
    x: &Tensor,
    weights: ConvWeights,
    segments: Segments,
    dx: &mut Tensor,
    dweight: &mut Tensor,
    dbias: Option<&mut Tensor>,
) -> Result<()> {
    let ranges = segments.ranges("causal_conv_backward", x.shape()[0])?;
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let conv = Conv::<S>::new(x, weights, &ranges);
        let Conv { width, taps, .. } = conv;
        let mut dp = vec![R::of(0.0); x.len()];
        dp.par_rows_mut(width).zip(dy.host::<S>().par_rows(width)).enumerate().for_each(|(t, (dp, dy))| {
            if let Some(first) = conv.first[t] {
                dp.copy_from_slice(&conv.dsums(t, first, dy));
            }
        });
        dx.host_mut::<S>().par_rows_mut(width).enumerate().for_each(|(s, dx)| {
            let mut sum = vec![R::of(0.0); width];
            for i in 0..taps {
                let t = s + taps - 1 - i;
                if conv.first[s].is_some() && conv.first.get(t) == Some(&conv.first[s]) {
                    let of_row = sum.iter_mut().zip(&dp[t * width..][..width]).enumerate();
                    of_row.for_each(|(c, (sum, dp))| *sum += conv.weight[c * taps + i].load() * *dp);
                }
            }
            dx.iter_mut().zip(sum).for_each(|(dx, sum)| *dx = S::store(sum));
        });
        let partial: Vec<[Vec<R>; 2]> = dp.par_chunks(ROWS * width.max(1)).enumerate().map(|(chunk, dp)| {
            let (mut dweight, mut dbias) = (vec![R::of(0.0); width * taps], vec![R::of(0.0); width]);
            for (t, dp) in (chunk * ROWS..).zip(dp.chunks(width)) {
                let Some(first) = conv.first[t] else { continue };
                for i in 0..taps {
                    let of_row = conv.input(t, i, first, None).iter().zip(dp).enumerate();
                    of_row.for_each(|(c, (x, dp))| dweight[c * taps + i] += *dp * x.load());
                }
                dbias.iter_mut().zip(dp).for_each(|(dbias, dp)| *dbias += *dp);
            }
            [dweight, dbias]
        }).collect();
        for (which, sum) in [Some(dweight), dbias].into_iter().enumerate() {
            let Some(sum) = sum else { continue };
            add_partial_sums(sum.host_mut::<R>(), partial.iter().map(|partial| partial[which].as_slice()));
        }
    });
    Ok(())
}
