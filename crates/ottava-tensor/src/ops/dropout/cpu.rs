use super::{DrawnColumns, TokenDraws, threshold};
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use crate::ops::parallel_rows::ParallelRows;
use crate::ops::random::hash;
use rayon::prelude::*;

pub(super) fn dropout(x: &Tensor, p: f64, draws: &TokenDraws, columns: DrawnColumns, y: &mut Tensor) {
    let threshold = threshold(p);
    with_float!(x.dtype(), S => {
        type R<S> = <S as Float>::Real;
        let factor: R<S> = Real::of(1.0 / (1.0 - p));
        each::<S>(x, draws, columns, y, |x, drawn| if drawn < threshold { Real::of(0.0) } else { x * factor });
    });
}

pub(super) fn add_noise(x: &Tensor, size: f32, draws: &TokenDraws, columns: DrawnColumns, y: &mut Tensor) {
    with_float!(x.dtype(), S => {
        type R<S> = <S as Float>::Real;
        let size: R<S> = Real::of(f64::from(size));
        each::<S>(x, draws, columns, y, |x, drawn| x + size * R::<S>::of(uniform(drawn)));
    });
}

/// Returns a number between -1 and 1, exact in F32: one of 2^24 midpoints.
fn uniform(drawn: u32) -> f64 {
    (f64::from(drawn >> 8) - 8_388_607.5) * (1.0 / 8_388_608.0)
}

/// Maps each element of `x` and its random number to an element of `y`.
fn each<S: Float>(
    x: &Tensor,
    draws: &TokenDraws,
    columns: DrawnColumns,
    y: &mut Tensor,
    map: impl Fn(S::Real, u32) -> S::Real + Sync,
) {
    let halves: &[i32] = draws.seed.host();
    let seed = u64::from(halves[0] as u32) | u64::from(halves[1] as u32) << 32;
    let width = x.shape()[1].max(1);
    let rows = x.host::<S>().par_rows(width).zip(draws.numbers.host::<i32>());
    y.host_mut::<S>().par_rows_mut(width).zip(rows).for_each(|(y, (x, &number))| {
        let of_row = hash(seed ^ columns.key ^ hash(u64::from(number as u32)));
        for (c, (y, x)) in y.iter_mut().zip(x).enumerate() {
            *y = S::store(map(x.load(), drawn(of_row, (columns.first + c) as u64)));
        }
    });
}

/// Returns the random number of a column. Each hash gives the numbers of two columns.
fn drawn(of_row: u64, column: u64) -> u32 {
    (hash(of_row ^ (column / 2)) >> (32 * (column % 2))) as u32
}
