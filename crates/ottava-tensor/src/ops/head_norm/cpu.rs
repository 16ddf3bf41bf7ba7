use super::{HeadNormLayout, HeadNormWeights};
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use crate::ops::NormKind;
use crate::ops::rmsnorm::cpu::{layer_row, layer_row_backward, layer_statistics, row, row_backward, row_rstd};
use rayon::prelude::*;
use std::ops::Range;

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
                    Some((weight, of)) => {
                        let weight = &weight.host()[of];
                        match layout.kind {
                            kind @ (NormKind::Rms | NormKind::RmsPlusOne) => {
                                row(x, weight, kind, eps, y);
                            }
                            NormKind::Layer => {
                                layer_row(x, weight, None, eps, y);
                            }
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
                let mut sums = layout.weights().map(|len| vec![R::default(); len]);
                let mut dbias = vec![R::default(); dim];
                for (h, ((dx, x), dy)) in dx.chunks_mut(dim).zip(x.chunks(dim)).zip(dy.chunks(dim)).enumerate() {
                    let h = h % layout.all();
                    match weight_of(h, weights, layout) {
                        Some((weight, of)) => {
                            let sums = &mut sums[usize::from(h >= layout.heads)][of.clone()];
                            let weight = &weight.host()[of];
                            match layout.kind {
                                kind @ (NormKind::Rms | NormKind::RmsPlusOne) => {
                                    row_backward(dy, x, (kind, weight), row_rstd(x, eps), dx, sums);
                                }
                                NormKind::Layer => {
                                    let statistics = layer_statistics(x, eps);
                                    layer_row_backward(dy, x, weight, statistics, dx, sums, &mut dbias);
                                }
                            }
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

/// The weight of head `h` of a row, and its elements there; `None` for value heads.
fn weight_of<'a>(h: usize, weights: HeadNormWeights<'a>, layout: HeadNormLayout) -> Option<(&'a Tensor, Range<usize>)> {
    let (weight, h) = match h {
        h if h < layout.heads => (weights.q, h),
        h if h < layout.heads + layout.kv_heads => (weights.k, h - layout.heads),
        _ => return None,
    };
    let start = if layout.kind == NormKind::Layer { h * layout.head_dim } else { 0 };
    Some((weight, start..start + layout.head_dim))
}
