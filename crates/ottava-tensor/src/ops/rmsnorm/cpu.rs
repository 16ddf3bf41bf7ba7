use super::{NormKind, NormWeights};
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use crate::ops::parallel_rows::ParallelRows;
use rayon::prelude::*;

/// The number of rows per partial sum of the weight gradient. Partial sums are added in order, so the result does not depend on the number of
/// threads.
const ROWS: usize = 64;

pub(super) fn norm(x: &Tensor, weights: NormWeights, eps: f64, y: &mut Tensor, statistics: &mut Tensor) {
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let (weight, bias) = (weights.weight.host::<S>(), weights.bias.map(Tensor::host::<S>));
        let width = weight.len().max(1);
        let rows = y.host_mut::<S>().par_rows_mut(width).zip(x.host::<S>().par_rows(width));
        let eps = R::of(eps);
        match weights.kind {
            kind @ (NormKind::Rms | NormKind::RmsPlusOne) => {
                rows.zip(statistics.host_mut::<R>()).for_each(|((y, x), rstd)| *rstd = row(x, weight, kind, eps, y));
            }
            NormKind::Layer => {
                let (rstd, mean) = statistics.host_mut::<R>().split_at_mut(x.shape()[0]);
                rows.zip(rstd).zip(mean).for_each(|(((y, x), rstd), mean)| {
                    (*rstd, *mean) = layer_row(x, weight, bias, eps, y);
                });
            }
        }
    });
}

/// Returns `Σ x²` of a row.
pub(in crate::ops) fn square_sum<S: Float>(x: &[S]) -> S::Real {
    x.iter().map(|&x| x.load() * x.load()).sum::<S::Real>()
}

/// Returns `1 / sqrt(mean(x²) + eps)` from the sum of the squares of `n` elements.
pub(in crate::ops) fn rstd_of<R: Real>(square_sum: R, n: usize, eps: R) -> R {
    R::of(1.0) / (square_sum / R::of(n as f64) + eps).sqrt()
}

/// Returns `1 / sqrt(mean(x²) + eps)` of a row.
pub(in crate::ops) fn row_rstd<S: Float>(x: &[S], eps: S::Real) -> S::Real {
    rstd_of(square_sum(x), x.len(), eps)
}

/// Normalises a row, and returns its [`row_rstd`].
pub(in crate::ops) fn row<S: Float>(x: &[S], weight: &[S], kind: NormKind, eps: S::Real, y: &mut [S]) -> S::Real {
    let rstd = row_rstd(x, eps);
    normalised(x, weight, kind, rstd, y);
    rstd
}

/// Computes `y = x · rstd · weight`.
pub(in crate::ops) fn normalised<S: Float>(x: &[S], weight: &[S], kind: NormKind, rstd: S::Real, y: &mut [S]) {
    for ((y, &x), &w) in y.iter_mut().zip(x).zip(weight) {
        *y = S::store(x.load() * rstd * kind.gain(w.load()));
    }
}

/// Normalises a row about its mean. Returns the reciprocal of its standard deviation, and the mean.
pub(in crate::ops) fn layer_row<S: Float>(
    x: &[S],
    weight: &[S],
    bias: Option<&[S]>,
    eps: S::Real,
    y: &mut [S],
) -> (S::Real, S::Real) {
    let (rstd, mean) = layer_statistics(x, eps);
    for i in 0..x.len() {
        let normed = (x[i].load() - mean) * rstd * weight[i].load();
        y[i] = S::store(bias.map_or(normed, |bias| normed + bias[i].load()));
    }
    (rstd, mean)
}

/// Returns `1 / sqrt(variance(x) + eps)` and the mean of a row.
pub(in crate::ops) fn layer_statistics<S: Float>(x: &[S], eps: S::Real) -> (S::Real, S::Real) {
    let n = S::Real::of(x.len() as f64);
    let mean = x.iter().map(|&x| x.load()).sum::<S::Real>() / n;
    let variance = x.iter().map(|&x| (x.load() - mean) * (x.load() - mean)).sum::<S::Real>() / n;
    (S::Real::of(1.0) / (variance + eps).sqrt(), mean)
}

pub(super) fn norm_backward(
    dy: &Tensor,
    x: &Tensor,
    weights: NormWeights,
    statistics: &Tensor,
    dx: &mut Tensor,
    dweight: &mut Tensor,
    dbias: Option<&mut Tensor>,
) {
    let tokens = x.shape()[0];
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let (kind, weight) = (weights.kind, weights.weight.host::<S>());
        let width = weight.len().max(1);
        let block = width * ROWS;
        let (rstd, mean) = statistics.host::<R>().split_at(tokens);
        let partial: Vec<[Vec<R>; 2]> = dx
            .host_mut::<S>()
            .par_rows_mut(block)
            .zip(x.host::<S>().par_rows(block))
            .zip(dy.host::<S>().par_rows(block))
            .enumerate()
            .map(|(i, ((dx, x), dy))| {
                let mut sums = [vec![R::default(); width], vec![R::default(); width]];
                let [dweight, dbias] = &mut sums;
                let rows = dx.chunks_mut(width).zip(x.chunks(width)).zip(dy.chunks(width)).zip(i * ROWS..);
                for (((dx, x), dy), t) in rows {
                    match mean.get(t) {
                        None => row_backward(dy, x, (kind, weight), rstd[t], dx, dweight),
                        Some(&mean) => layer_row_backward(dy, x, weight, (rstd[t], mean), dx, dweight, dbias),
                    }
                }
                sums
            })
            .collect();
        for (i, sum) in [Some(dweight), dbias].into_iter().enumerate() {
            let Some(sum) = sum else { continue };
            add_partial_sums(sum.host_mut::<R>(), partial.iter().map(|partial| partial[i].as_slice()));
        }
    });
}

/// Adds partial sums to `sum`, in their order.
pub(in crate::ops) fn add_partial_sums<'a, R: Real>(sum: &mut [R], partial: impl Iterator<Item = &'a [R]>) {
    for partial in partial {
        for (sum, part) in sum.iter_mut().zip(partial) {
            *sum += *part;
        }
    }
}

/// Computes the gradients of [`row_backward`] for a LayerNorm with `(rstd, mean)`, and adds to the gradient of the bias.
pub(in crate::ops) fn layer_row_backward<S: Float>(
    dy: &[S],
    x: &[S],
    weight: &[S],
    (rstd, mean): (S::Real, S::Real),
    dx: &mut [S],
    dweight: &mut [S::Real],
    dbias: &mut [S::Real],
) {
    let n = S::Real::of(x.len() as f64);
    let (mut projection, mut shift) = (S::Real::default(), S::Real::default());
    for i in 0..x.len() {
        let g = dy[i].load() * weight[i].load();
        projection += g * ((x[i].load() - mean) * rstd);
        shift += g;
    }
    let (projection, shift) = (projection / n, shift / n);
    for i in 0..x.len() {
        let (dy, normed) = (dy[i].load(), (x[i].load() - mean) * rstd);
        dx[i] = S::store(rstd * (dy * weight[i].load() - normed * projection - shift));
        dweight[i] += dy * normed;
        dbias[i] += dy;
    }
}

/// Writes the gradient by a row, and adds to the gradient of the weight.
pub(in crate::ops) fn row_backward<S: Float>(
    dy: &[S],
    x: &[S],
    weight: (NormKind, &[S]),
    rstd: S::Real,
    dx: &mut [S],
    dweight: &mut [S::Real],
) {
    let projection = dot(dy, x, weight, rstd) / S::Real::of(x.len() as f64);
    gradient_of_row(dy, x, weight, (rstd, projection), dx, dweight);
}

/// Returns `Σ dy · weight · x · rstd` of a row.
pub(in crate::ops) fn dot<S: Float>(dy: &[S], x: &[S], (kind, weight): (NormKind, &[S]), rstd: S::Real) -> S::Real {
    (dy.iter().zip(x).zip(weight))
        .map(|((&dy, &x), &w)| dy.load() * kind.gain(w.load()) * (x.load() * rstd))
        .sum::<S::Real>()
}

/// Computes the gradients of [`row_backward`] from the mean of the products of [`dot`].
pub(in crate::ops) fn gradient_of_row<S: Float>(
    dy: &[S],
    x: &[S],
    (kind, weight): (NormKind, &[S]),
    (rstd, projection): (S::Real, S::Real),
    dx: &mut [S],
    dweight: &mut [S::Real],
) {
    for i in 0..x.len() {
        let (dy, normed) = (dy[i].load(), x[i].load() * rstd);
        dx[i] = S::store(rstd * (dy * kind.gain(weight[i].load()) - normed * projection));
        dweight[i] += dy * normed;
    }
}
