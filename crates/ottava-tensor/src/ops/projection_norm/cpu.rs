use super::{HeadNormWeights, ProjectionNormLayout, ProjectionSums};
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use crate::ops::parallel_rows::ParallelRows;
use crate::ops::rmsnorm::cpu::{add_partial_sums, dot, gradient_of_row, normalised, rstd_of, square_sum};
use rayon::prelude::*;
use std::ops::Range;

/// The number of rows per partial sum of the weight gradients. Partial sums are added in order, so the result does not depend on the number of
/// threads.
const ROWS: usize = 64;

/// Returns the columns of queries and the columns of keys.
fn parts(layout: ProjectionNormLayout) -> [Range<usize>; 2] {
    [0..layout.queries, layout.queries..layout.queries + layout.keys]
}

fn width(layout: ProjectionNormLayout) -> usize {
    (layout.queries + 2 * layout.keys).max(1)
}

/// Returns the `rstd` of queries or keys. Each rank has `n` of their elements.
fn rstd<R: Real>(square: R, n: usize, layout: ProjectionNormLayout) -> R {
    rstd_of(square, n * layout.ranks, R::of(layout.eps))
}

pub(super) fn projection_squares(x: &Tensor, layout: ProjectionNormLayout, squares: &mut Tensor) {
    with_float!(x.dtype(), S => {
        let rows = x.host::<S>().par_rows(width(layout));
        squares.host_mut::<<S as Float>::Real>().par_chunks_mut(2).zip(rows).for_each(|(squares, x)| {
            for (square, part) in squares.iter_mut().zip(parts(layout)) {
                *square = square_sum(&x[part]);
            }
        });
    });
}

pub(super) fn projection_norm(
    x: &Tensor,
    weights: HeadNormWeights,
    layout: ProjectionNormLayout,
    squares: &Tensor,
    y: &mut Tensor,
) {
    with_float!(x.dtype(), S => {
        let weights = [weights.q.host::<S>(), weights.k.host::<S>()];
        let rows = y.host_mut::<S>().par_rows_mut(width(layout)).zip(x.host::<S>().par_rows(width(layout)));
        rows.zip(squares.host::<<S as Float>::Real>().par_chunks(2)).for_each(|((y, x), squares)| {
            for ((part, weight), &square) in parts(layout).into_iter().zip(weights).zip(squares) {
                let rstd = rstd(square, part.len(), layout);
                normalised(&x[part.clone()], weight, layout.kind, rstd, &mut y[part]);
            }
            let values = layout.queries + layout.keys..;
            y[values.clone()].copy_from_slice(&x[values]);
        });
    });
}

pub(super) fn projection_dots(
    [dy, x]: [&Tensor; 2],
    weights: HeadNormWeights,
    layout: ProjectionNormLayout,
    squares: &Tensor,
    dots: &mut Tensor,
) {
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let weights = [weights.q.host::<S>(), weights.k.host::<S>()];
        let rows = dy.host::<S>().par_rows(width(layout)).zip(x.host::<S>().par_rows(width(layout)));
        let sums = dots.host_mut::<R>().par_chunks_mut(2).zip(squares.host::<R>().par_chunks(2));
        sums.zip(rows).for_each(|((dots, squares), (dy, x))| {
            for (which, part) in parts(layout).into_iter().enumerate() {
                let rstd = rstd(squares[which], part.len(), layout);
                dots[which] = dot(&dy[part.clone()], &x[part], (layout.kind, weights[which]), rstd);
            }
        });
    });
}

pub(super) fn projection_norm_backward(
    [dy, x]: [&Tensor; 2],
    weights: HeadNormWeights,
    layout: ProjectionNormLayout,
    sums: ProjectionSums,
    dx: &mut Tensor,
    dweights: [&mut Tensor; 2],
) {
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let weights = [weights.q.host::<S>(), weights.k.host::<S>()];
        let (squares, dots) = (sums.squares.host::<R>(), sums.dots.host::<R>());
        let width = width(layout);
        let block = width * ROWS;
        let partial: Vec<[Vec<R>; 2]> = dx
            .host_mut::<S>()
            .par_rows_mut(block)
            .zip(x.host::<S>().par_rows(block))
            .zip(dy.host::<S>().par_rows(block))
            .enumerate()
            .map(|(i, ((dx, x), dy))| {
                let mut sums = parts(layout).map(|part| vec![R::default(); part.len()]);
                let rows = dx.chunks_mut(width).zip(x.chunks(width)).zip(dy.chunks(width)).zip(i * ROWS..);
                for (((dx, x), dy), t) in rows {
                    for (which, part) in parts(layout).into_iter().enumerate() {
                        let rstd = rstd(squares[2 * t + which], part.len(), layout);
                        let projection = dots[2 * t + which] / R::of((part.len() * layout.ranks) as f64);
                        let (dy, x, dx) = (&dy[part.clone()], &x[part.clone()], &mut dx[part]);
                        gradient_of_row(dy, x, (layout.kind, weights[which]), (rstd, projection), dx, &mut sums[which]);
                    }
                    let values = layout.queries + layout.keys..;
                    dx[values.clone()].copy_from_slice(&dy[values]);
                }
                sums
            })
            .collect();
        for (which, dweight) in dweights.into_iter().enumerate() {
            add_partial_sums(dweight.host_mut::<R>(), partial.iter().map(|partial| partial[which].as_slice()));
        }
    });
}
