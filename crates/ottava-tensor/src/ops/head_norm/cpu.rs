use super::{HeadNormLayout, HeadNormWeights};
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use crate::ops::NormKind;
use crate::ops::parallel_rows::ParallelRows;
use crate::ops::rmsnorm::cpu::{
    add_partial_sums, layer_row, layer_row_backward, layer_statistics, row, row_backward, row_rstd,
};
use rayon::prelude::*;
use std::ops::Range;

/// The number of rows per partial sum of the weight gradients. Partial sums are added in order, so the result does not depend on the number of
/// threads.
const ROWS: usize = 64;

pub(super) fn head_norm(x: &Tensor, weights: HeadNormWeights, layout: HeadNormLayout, eps: f64, y: &mut Tensor) {
    let (parts, width) = (parts(layout), x.shape()[1].max(1));
    with_float!(x.dtype(), S => {
        let eps = <S as Float>::Real::of(eps);
        let rows = y.host_mut::<S>().par_rows_mut(width).zip(x.host::<S>().par_rows(width));
        rows.for_each(|(y, x)| {
            for Part { columns, weight } in &parts {
                let (y, x) = (&mut y[columns.clone()], &x[columns.clone()]);
                match weight {
                    Some((which, of)) => {
                        let weight = &[weights.q, weights.k][*which].host()[of.clone()];
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
    let (parts, width) = (parts(layout), x.shape()[1].max(1));
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let eps = R::of(eps);
        let block = width * ROWS;
        let partial: Vec<[Vec<R>; 2]> = dx
            .host_mut::<S>()
            .par_rows_mut(block)
            .zip(x.host::<S>().par_rows(block))
            .zip(dy.host::<S>().par_rows(block))
            .map(|((dx, x), dy)| {
                let mut sums = layout.weights().map(|len| vec![R::default(); len]);
                let mut dbias = vec![R::default(); layout.head_dim];
                let rows = dx.chunks_mut(width).zip(x.chunks(width)).zip(dy.chunks(width));
                for ((dx, x), dy) in rows {
                    for Part { columns, weight } in &parts {
                        let (dx, x, dy) = (&mut dx[columns.clone()], &x[columns.clone()], &dy[columns.clone()]);
                        let Some((which, of)) = weight else {
                            dx.copy_from_slice(dy);
                            continue;
                        };
                        let weight = &[weights.q, weights.k][*which].host()[of.clone()];
                        let sums = &mut sums[*which][of.clone()];
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
                }
                sums
            })
            .collect();
        for (which, dweight) in dweights.into_iter().enumerate() {
            add_partial_sums(dweight.host_mut::<R>(), partial.iter().map(|partial| partial[which].as_slice()));
        }
    });
}

/// Columns of a row that are normalised together or copied.
struct Part {
    columns: Range<usize>,
    /// The weight (0 for queries, 1 for keys) and its elements; `None` for values.
    weight: Option<(usize, Range<usize>)>,
}

/// Returns the parts of a row.
fn parts(layout: HeadNormLayout) -> Vec<Part> {
    let dim = layout.head_dim;
    let [queries, keys] = layout.projections();
    let starts = [0, queries, queries + keys];
    let mut parts = Vec::new();
    for (which, width) in [queries, keys].into_iter().enumerate() {
        for at in (0..width).step_by(dim.max(1)) {
            let first = if layout.weights()[which] == dim { 0 } else { at };
            let columns = starts[which] + at..starts[which] + at + dim;
            parts.push(Part { columns, weight: Some((which, first..first + dim)) });
        }
    }
    parts.push(Part { columns: starts[2]..starts[2] + keys, weight: None });
    parts
}
