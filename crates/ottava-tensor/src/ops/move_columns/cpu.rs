use super::ColumnRuns;
use crate::Tensor;
use crate::element::{Float, with_float};
use crate::ops::parallel_rows::ParallelRows;
use rayon::prelude::*;

pub(super) fn move_columns(from: &Tensor, a: ColumnRuns, to: &mut Tensor, b: ColumnRuns, count: usize, width: usize) {
    let (of_from, of_to) = (from.shape()[1], to.shape()[1]);
    with_float!(from.dtype(), S => {
        let rows = to.host_mut::<S>().par_rows_mut(of_to).zip(from.host::<S>().par_rows(of_from));
        rows.for_each(|(to, from)| {
            for i in 0..count {
                to[b.first + i * b.step..][..width].copy_from_slice(&from[a.first + i * a.step..][..width]);
            }
        });
    });
}

pub(super) fn sum_columns(x: &Tensor, runs: ColumnRuns, count: usize, y: &mut Tensor) {
    let (columns, width) = (x.shape()[1], y.shape()[1]);
    with_float!(x.dtype(), S => {
        let rows = y.host_mut::<S>().par_rows_mut(width).zip(x.host::<S>().par_rows(columns));
        rows.for_each(|(y, x)| {
            for (c, y) in y.iter_mut().enumerate() {
                let mut sum = <S as Float>::Real::default();
                (0..count).for_each(|i| sum += x[runs.first + i * runs.step + c].load());
                *y = S::store(sum);
            }
        });
    });
}
