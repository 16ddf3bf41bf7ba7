use crate::Tensor;
use crate::element::{Float, Real, with_float};
use crate::ops::parallel_rows::ParallelRows;
use crate::ops::rmsnorm::cpu::{add_partial_sums, row_rstd};
use crate::ops::swiglu::cpu::silu_and_slope;
use rayon::prelude::*;

/// The number of rows per partial sum of the weight gradient. Partial sums are added in order, so the result does not depend on the number of
/// threads.
const ROWS: usize = 64;

pub(super) fn gated_norm(x: &Tensor, z: &Tensor, weight: &Tensor, eps: f64, y: &mut Tensor) {
    with_float!(x.dtype(), S => {
        let (weight, eps) = (weight.host::<S>(), <S as Float>::Real::of(eps));
        let dim = weight.len();
        let heads = y.host_mut::<S>().par_rows_mut(dim).zip(x.host::<S>().par_rows(dim)).zip(z.host::<S>().par_rows(dim));
        heads.for_each(|((y, x), z)| {
            let rstd = row_rstd(x, eps);
            for (i, y) in y.iter_mut().enumerate() {
                *y = S::store(x[i].load() * rstd * weight[i].load() * silu_and_slope(z[i].load()).0);
            }
        });
    });
}

pub(super) fn gated_norm_backward(
    [dy, x, z]: [&Tensor; 3],
    weight: &Tensor,
    eps: f64,
    [dx, dz]: [&mut Tensor; 2],
    dweight: &mut Tensor,
) {
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let (weight, eps) = (weight.host::<S>(), R::of(eps));
        let dim = weight.len();
        let block = ROWS * x.shape()[1].max(1);
        let blocks = dx.host_mut::<S>().par_rows_mut(block).zip(dz.host_mut::<S>().par_rows_mut(block));
        let inputs = dy.host::<S>().par_rows(block).zip(x.host::<S>().par_rows(block)).zip(z.host::<S>().par_rows(block));
        let partial: Vec<Vec<R>> = blocks.zip(inputs).map(|((dx, dz), ((dy, x), z))| {
            let mut sums = vec![R::of(0.0); dim];
            let heads = dx.chunks_mut(dim).zip(dz.chunks_mut(dim)).zip(dy.chunks(dim).zip(x.chunks(dim)).zip(z.chunks(dim)));
            for ((dx, dz), ((dy, x), z)) in heads {
                head_backward([dy, x, z], weight, row_rstd(x, eps), [dx, dz], &mut sums);
            }
            sums
        }).collect();
        add_partial_sums(dweight.host_mut::<R>(), partial.iter().map(Vec::as_slice));
    });
}

fn head_backward<S: Float>(
    [dy, x, z]: [&[S]; 3],
    weight: &[S],
    rstd: S::Real,
    [dx, dz]: [&mut [S]; 2],
    dweight: &mut [S::Real],
) {
    let gates: Vec<_> = z.iter().map(|z| silu_and_slope(z.load())).collect();
    let n = |i: usize| x[i].load() * rstd;
    let u = |i: usize| dy[i].load() * weight[i].load() * gates[i].0;
    let mean = (0..x.len()).map(|i| u(i) * n(i)).sum::<S::Real>() / S::Real::of(x.len() as f64);
    for i in 0..x.len() {
        dx[i] = S::store(rstd * (u(i) - n(i) * mean));
        dz[i] = S::store(dy[i].load() * n(i) * weight[i].load() * gates[i].1);
        dweight[i] += dy[i].load() * n(i) * gates[i].0;
    }
}
