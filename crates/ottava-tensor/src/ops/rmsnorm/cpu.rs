use crate::Tensor;
use crate::element::{Float, Real, with_float};
use rayon::prelude::*;

/// Rows per partial sum of the weight gradient. Partial sums are added in order, independent of the number of threads.
const ROWS: usize = 64;

pub(super) fn rmsnorm(x: &Tensor, weight: &Tensor, eps: f64, y: &mut Tensor, rstd: &mut Tensor) {
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let weight: &[S] = weight.host();
        let width = weight.len().max(1);
        let rows = y.host_mut::<S>().par_chunks_mut(width).zip(x.host::<S>().par_chunks(width));
        rows.zip(rstd.host_mut::<R>()).for_each(|((y, x), rstd)| *rstd = row(x, weight, R::of(eps), y));
    });
}

/// `1 / sqrt(mean(x²) + eps)` of a row.
pub(in crate::ops) fn row_rstd<S: Float>(x: &[S], eps: S::Real) -> S::Real {
    let mean_square = x.iter().map(|&x| x.load() * x.load()).sum::<S::Real>() / S::Real::of(x.len() as f64);
    S::Real::of(1.0) / (mean_square + eps).sqrt()
}

/// Normalises a row, and returns its [`row_rstd`].
pub(in crate::ops) fn row<S: Float>(x: &[S], weight: &[S], eps: S::Real, y: &mut [S]) -> S::Real {
    let rstd = row_rstd(x, eps);
    for ((y, &x), &w) in y.iter_mut().zip(x).zip(weight) {
        *y = S::store(x.load() * rstd * w.load());
    }
    rstd
}

pub(super) fn rmsnorm_backward(
    dy: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    rstd: &Tensor,
    dx: &mut Tensor,
    dweight: &mut Tensor,
) {
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let weight: &[S] = weight.host();
        let width = weight.len().max(1);
        let block = width * ROWS;
        let partial: Vec<Vec<R>> = dx
            .host_mut::<S>()
            .par_chunks_mut(block)
            .zip(x.host::<S>().par_chunks(block))
            .zip(dy.host::<S>().par_chunks(block))
            .zip(rstd.host::<R>().par_chunks(ROWS))
            .map(|(((dx, x), dy), rstd)| {
                let mut dweight = vec![R::default(); width];
                let rows = dx.chunks_mut(width).zip(x.chunks(width)).zip(dy.chunks(width)).zip(rstd);
                for (((dx, x), dy), &rstd) in rows {
                    row_backward(dy, x, weight, rstd, dx, &mut dweight);
                }
                dweight
            })
            .collect();
        for partial in partial {
            for (sum, part) in dweight.host_mut::<R>().iter_mut().zip(partial) {
                *sum += part;
            }
        }
    });
}

/// Writes the gradient by a row, and adds to that by the weight.
pub(in crate::ops) fn row_backward<S: Float>(
    dy: &[S],
    x: &[S],
    weight: &[S],
    rstd: S::Real,
    dx: &mut [S],
    dweight: &mut [S::Real],
) {
    let projection =
        (dy.iter().zip(x).zip(weight)).map(|((&dy, &x), &w)| dy.load() * w.load() * (x.load() * rstd)).sum::<S::Real>()
            / S::Real::of(x.len() as f64);
    for i in 0..x.len() {
        let (dy, normed) = (dy[i].load(), x[i].load() * rstd);
        dx[i] = S::store(rstd * (dy * weight[i].load() - normed * projection));
        dweight[i] += dy * normed;
    }
}
