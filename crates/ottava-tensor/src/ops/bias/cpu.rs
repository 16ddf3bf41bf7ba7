use crate::Tensor;
use crate::element::{Float, with_float};
use crate::ops::Groups;
use crate::ops::parallel_rows::ParallelRows;
use rayon::prelude::*;

pub(super) fn add_bias(x: &mut Tensor, bias: &Tensor) {
    with_float!(bias.dtype(), S => {
        let bias: &[S] = bias.host();
        x.host_mut::<S>().par_rows_mut(bias.len().max(1)).for_each(|row| {
            for (x, b) in row.iter_mut().zip(bias) {
                *x = S::store(x.load() + b.load());
            }
        });
    });
}

pub(super) fn bias_gradient(dy: &Tensor, dbias: &mut Tensor) {
    with_float!(dy.dtype(), S => {
        let columns = dbias.len();
        let dbias: &mut [<S as Float>::Real] = dbias.host_mut();
        for row in dy.host::<S>().chunks_exact(columns.max(1)) {
            for (sum, dy) in dbias.iter_mut().zip(row) {
                *sum += dy.load();
            }
        }
    });
}

/// Returns the rows of each group, in the order of groups.
fn rows_of(groups: &Groups) -> impl Iterator<Item = std::ops::Range<usize>> {
    let starts = groups.offsets.host::<i32>().iter().zip(groups.counts.host::<i32>());
    starts.map(|(&start, &count)| start as usize..(start + count) as usize)
}

pub(super) fn add_grouped_bias(x: &mut Tensor, bias: &Tensor, groups: &Groups) {
    let columns = bias.shape()[1];
    with_float!(bias.dtype(), S => {
        let (x, biases) = (x.host_mut::<S>(), bias.host::<S>());
        for (group, rows) in rows_of(groups).enumerate() {
            let bias = &biases[group * columns..][..columns];
            x[rows.start * columns..rows.end * columns].par_rows_mut(columns).for_each(|row| {
                row.iter_mut().zip(bias).for_each(|(x, b)| *x = S::store(x.load() + b.load()));
            });
        }
    });
}

pub(super) fn grouped_bias_gradient(dy: &Tensor, groups: &Groups, dbias: &mut Tensor) {
    let columns = dbias.shape()[1].max(1);
    with_float!(dy.dtype(), S => {
        let sums = dbias.host_mut::<<S as Float>::Real>().chunks_exact_mut(columns);
        for (sums, rows) in sums.zip(rows_of(groups)) {
            for row in dy.host::<S>()[rows.start * columns..rows.end * columns].chunks_exact(columns) {
                sums.iter_mut().zip(row).for_each(|(sum, dy)| *sum += dy.load());
            }
        }
    });
}

pub(super) fn grouped_bias_dots(dy: &Tensor, bias: &Tensor, groups: &Groups, dots: &mut Tensor) {
    let columns = bias.shape()[1].max(1);
    with_float!(dy.dtype(), S => {
        type R = <S as Float>::Real;
        let dots = dots.host_mut::<R>();
        for (bias, rows) in bias.host::<S>().chunks_exact(columns).zip(rows_of(groups)) {
            let dy = dy.host::<S>()[rows.start * columns..rows.end * columns].par_rows(columns);
            dots[rows].par_iter_mut().zip(dy).for_each(|(dot, dy)| {
                *dot += dy.iter().zip(bias).map(|(dy, b)| dy.load() * b.load()).sum::<R>();
            });
        }
    });
}
