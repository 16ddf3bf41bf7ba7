use super::{GateOrder, GatedNorm};
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use crate::ops::parallel_rows::ParallelRows;
use crate::ops::rmsnorm::cpu::add_partial_sums;
use crate::ops::swiglu::cpu::silu_and_slope;
use rayon::prelude::*;

/// The number of rows per partial sum of the weight gradient. Partial sums are added in order, so the result does not depend on the number of
/// threads.
const ROWS: usize = 64;

/// A group of elements that are normalised together.
struct Group<R> {
    /// `silu(z)` and its derivative.
    gates: Vec<(R, R)>,
    /// The normalised elements, without their weights.
    n: Vec<R>,
    rstd: R,
}

impl<R: Real> Group<R> {
    fn new<S: Float<Real = R>>(x: &[S], z: &[S], how: GatedNorm) -> Group<R> {
        let gates: Vec<(R, R)> = z.iter().map(|z| silu_and_slope(z.load())).collect();
        let input = |(x, (gate, _)): (&S, &(R, R))| match how.order {
            GateOrder::AfterNorm => x.load(),
            GateOrder::BeforeNorm => x.load() * *gate,
        };
        let mut n: Vec<R> = x.iter().zip(&gates).map(input).collect();
        let mean = n.iter().map(|v| *v * *v).sum::<R>() / R::of(n.len() as f64);
        let rstd = R::of(1.0) / (mean + R::of(how.eps)).sqrt();
        n.iter_mut().for_each(|v| *v = *v * rstd);
        Group { gates, n, rstd }
    }
}

pub(super) fn gated_norm(x: &Tensor, z: &Tensor, weight: &Tensor, how: GatedNorm, y: &mut Tensor) {
    with_float!(x.dtype(), S => {
        let (weight, dim) = (weight.host::<S>(), how.size);
        let groups = y.host_mut::<S>().par_rows_mut(dim).zip(x.host::<S>().par_rows(dim)).zip(z.host::<S>().par_rows(dim));
        groups.enumerate().for_each(|(at, ((y, x), z))| {
            let (group, weight) = (Group::new(x, z, how), &weight[at * dim % weight.len()..]);
            for (i, y) in y.iter_mut().enumerate() {
                let normed = group.n[i] * weight[i].load();
                *y = S::store(match how.order {
                    GateOrder::AfterNorm => normed * group.gates[i].0,
                    GateOrder::BeforeNorm => normed,
                });
            }
        });
    });
}

pub(super) fn gated_norm_backward(
    [dy, x, z]: [&Tensor; 3],
    weight: &Tensor,
    how: GatedNorm,
    [dx, dz]: [&mut Tensor; 2],
    dweight: &mut Tensor,
) {
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let (weight, dim) = (weight.host::<S>(), how.size);
        let block = ROWS * x.shape()[1].max(1);
        let blocks = dx.host_mut::<S>().par_rows_mut(block).zip(dz.host_mut::<S>().par_rows_mut(block));
        let inputs = dy.host::<S>().par_rows(block).zip(x.host::<S>().par_rows(block)).zip(z.host::<S>().par_rows(block));
        let partial: Vec<Vec<R>> = blocks.zip(inputs).map(|((dx, dz), ((dy, x), z))| {
            let mut sums = vec![R::of(0.0); weight.len()];
            let groups = dx.chunks_mut(dim).zip(dz.chunks_mut(dim)).zip(dy.chunks(dim).zip(x.chunks(dim)).zip(z.chunks(dim)));
            for (at, ((dx, dz), ((dy, x), z))) in groups.enumerate() {
                let of_group = at * dim % weight.len();
                let (weight, sums) = (&weight[of_group..][..dim], &mut sums[of_group..][..dim]);
                group_backward([dy, x, z], weight, how, [dx, dz], sums);
            }
            sums
        }).collect();
        add_partial_sums(dweight.host_mut::<R>(), partial.iter().map(Vec::as_slice));
    });
}

fn group_backward<S: Float>(
    [dy, x, z]: [&[S]; 3],
    weight: &[S],
    how: GatedNorm,
    [dx, dz]: [&mut [S]; 2],
    dweight: &mut [S::Real],
) {
    let Group { gates, n, rstd } = Group::new(x, z, how);
    // The gradient by the normalised elements.
    let t = |i: usize| match how.order {
        GateOrder::AfterNorm => dy[i].load() * weight[i].load() * gates[i].0,
        GateOrder::BeforeNorm => dy[i].load() * weight[i].load(),
    };
    let mean = (0..x.len()).map(|i| t(i) * n[i]).sum::<S::Real>() / S::Real::of(x.len() as f64);
    for i in 0..x.len() {
        let (dv, (gate, slope), dn) = (rstd * (t(i) - n[i] * mean), gates[i], dy[i].load() * n[i]);
        let [of_x, of_z, of_weight] = match how.order {
            GateOrder::AfterNorm => [dv, dn * weight[i].load() * slope, dn * gate],
            GateOrder::BeforeNorm => [dv * gate, dv * x[i].load() * slope, dn],
        };
        (dx[i], dz[i]) = (S::store(of_x), S::store(of_z));
        dweight[i] += of_weight;
    }
}
