use super::{HeadNormLayout, HeadNormWeights};
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use rayon::prelude::*;

/// Rows per partial sum of the gradients of the weights. Partial sums are added in order, independent of the number of threads.
const ROWS: usize = 64;

pub(super) fn head_norm(x: &Tensor, weights: HeadNormWeights, layout: HeadNormLayout, eps: f64, y: &mut Tensor) {
    let (dim, width) = (layout.head_dim, x.shape()[1].max(1));
    with_float!(x.dtype(), S => {
        let eps = <S as Float>::Real::of(eps);
        let rows = y.host_mut::<S>().par_chunks_mut(width).zip(x.host::<S>().par_chunks(width));
        rows.for_each(|(y, x)| {
            for (h, (y, x)) in y.chunks_mut(dim).zip(x.chunks(dim)).enumerate() {
                match weight_of(h, weights, layout) {
                    Some(weight) => {
                        let rstd = rstd(x, eps);
                        for ((y, &x), &w) in y.iter_mut().zip(x).zip(weight.host::<S>()) {
                            *y = S::store(x.load() * rstd * w.load());
                        }
                    }
                    None => y.copy_from_slice(x),
                }
            }
        });
    });
}

pub(super) fn head_norm_backward(
    dy: &Tensor,
    x: &Tensor,
    weights: HeadNormWeights,
    layout: HeadNormLayout,
    eps: f64,
    dx: &mut Tensor,
    dweights: [&mut Tensor; 2],
) {
    let (dim, width) = (layout.head_dim, x.shape()[1].max(1));
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let eps = R::of(eps);
        let block = width * ROWS;
        let partial: Vec<[Vec<R>; 2]> = dx
            .host_mut::<S>()
            .par_chunks_mut(block)
            .zip(x.host::<S>().par_chunks(block))
            .zip(dy.host::<S>().par_chunks(block))
            .map(|((dx, x), dy)| {
                let mut sums = [vec![R::default(); dim], vec![R::default(); dim]];
                for (h, ((dx, x), dy)) in dx.chunks_mut(dim).zip(x.chunks(dim)).zip(dy.chunks(dim)).enumerate() {
                    let h = h % layout.all();
                    match weight_of(h, weights, layout) {
                        Some(weight) => {
                            let of_keys = usize::from(h >= layout.heads);
                            backward(dy, x, weight.host(), rstd(x, eps), dx, &mut sums[of_keys]);
                        }
                        None => dx.copy_from_slice(dy),
                    }
                }
                sums
            })
            .collect();
        for (which, dweight) in dweights.into_iter().enumerate() {
            for partial in &partial {
                for (sum, part) in dweight.host_mut::<R>().iter_mut().zip(&partial[which]) {
                    *sum += *part;
                }
            }
        }
    });
}

/// The weight of head `h` of a row; `None` for value heads.
fn weight_of<'a>(h: usize, weights: HeadNormWeights<'a>, layout: HeadNormLayout) -> Option<&'a Tensor> {
    match h {
        h if h < layout.heads => Some(weights.q),
        h if h < layout.heads + layout.kv_heads => Some(weights.k),
        _ => None,
    }
}

fn rstd<S: Float>(x: &[S], eps: S::Real) -> S::Real {
    let mean_square = x.iter().map(|&x| x.load() * x.load()).sum::<S::Real>() / S::Real::of(x.len() as f64);
    S::Real::of(1.0) / (mean_square + eps).sqrt()
}

fn backward<S: Float>(dy: &[S], x: &[S], weight: &[S], rstd: S::Real, dx: &mut [S], dweight: &mut [S::Real]) {
    let projection =
        (dy.iter().zip(x).zip(weight)).map(|((&dy, &x), &w)| dy.load() * w.load() * (x.load() * rstd)).sum::<S::Real>()
            / S::Real::of(x.len() as f64);
    for i in 0..x.len() {
        let (dy, normed) = (dy[i].load(), x[i].load() * rstd);
        dx[i] = S::store(rstd * (dy * weight[i].load() - normed * projection));
        dweight[i] += dy * normed;
    }
}
