use super::SUMS;
use crate::element::{Float, Real, with_float};
use crate::fp8::{E4M3, E5M2};
use crate::ops::dequantize::Layout;
use crate::{DType, Tensor};
use half::bf16;
use rayon::prelude::*;

/// The number of elements per chunk of a row. Chunks are added in order, so sums do not depend on the number of threads.
const CHUNK: usize = 1 << 14;

pub(super) fn compare_rows(x: &Tensor, every: usize, reference: &Tensor) -> [f64; SUMS] {
    with_float!(x.dtype(), X => of_rows(x.host::<X>(), every, reference.host::<X>(), x.shape()[1]))
}

fn of_rows<X: Float>(x: &[X], every: usize, reference: &[X], columns: usize) -> [f64; SUMS] {
    let length = columns.clamp(1, CHUNK);
    let per_row = columns.div_ceil(length);
    let of_chunk = |chunk: usize| {
        let (row, start) = (chunk / per_row, chunk % per_row * length);
        let end = (start + length).min(columns);
        let x = &x[row * every * columns + start..row * every * columns + end];
        let pairs = x.iter().zip(&reference[row * columns + start..row * columns + end]);
        sum(pairs.map(|(x, r)| [x.load().to_f64(), r.load().to_f64()]))
    };
    total(reference.len() / columns.max(1) * per_row, of_chunk)
}

pub(super) fn compare_along(x: &Tensor, reference: &Tensor, direction: &Tensor) -> [f64; SUMS] {
    with_float!(x.dtype(), X => along(x.host::<X>(), reference.host::<X>(), direction.host::<X>(), x.shape()[1]))
}

fn along<X: Float>(x: &[X], reference: &[X], direction: &[X], columns: usize) -> [f64; SUMS] {
    let of_row = |row: usize| {
        let range = row * columns..(row + 1) * columns;
        let direction = &direction[range.clone()];
        let dot = |row: &[X]| row.iter().zip(direction).map(|(x, d)| x.load().to_f64() * d.load().to_f64()).sum();
        sum(std::iter::once([dot(&x[range.clone()]), dot(&reference[range])]))
    };
    total(x.len() / columns.max(1), of_row)
}

pub(super) fn compare_codes(
    codes: &Tensor,
    scale_inv: &Tensor,
    layout: &Layout,
    is_transposed: bool,
    matrix: &Tensor,
) -> [f64; SUMS] {
    match (codes.dtype(), matrix.dtype()) {
        (DType::E4M3, DType::F32) => of_codes::<E4M3, f32>(codes, scale_inv, layout, is_transposed, matrix),
        (DType::E4M3, _) => of_codes::<E4M3, bf16>(codes, scale_inv, layout, is_transposed, matrix),
        (_, DType::F32) => of_codes::<E5M2, f32>(codes, scale_inv, layout, is_transposed, matrix),
        (_, _) => of_codes::<E5M2, bf16>(codes, scale_inv, layout, is_transposed, matrix),
    }
}

fn of_codes<C: Float<Real = f32>, X: Float<Real = f32>>(
    codes: &Tensor,
    scale_inv: &Tensor,
    layout: &Layout,
    is_transposed: bool,
    matrix: &Tensor,
) -> [f64; SUMS] {
    let (codes, scales, x) = (codes.host::<C>(), scale_inv.host::<f32>(), matrix.host::<X>());
    // The distances in `matrix` from one column of the codes to the next, and from one row of the codes to the next.
    let [next, next_row] = if is_transposed { [layout.rows, 1] } else { [1, layout.columns] };
    let of_row = |row: usize| {
        let pairs = (0..layout.columns).map(|column| {
            let value = codes[row * layout.pitch + column].load() * scales[layout.scale_at(row, column)];
            [f64::from(value), f64::from(x[row * next_row + column * next].load())]
        });
        sum(pairs)
    };
    total(layout.rows, of_row)
}

fn sum(pairs: impl Iterator<Item = [f64; 2]>) -> [f64; SUMS] {
    let mut all = [0f64; SUMS];
    for [x, r] in pairs {
        for (sum, term) in all.iter_mut().zip([x * x, r * r, x * r, (x - r) * (x - r)]) {
            *sum += term;
        }
    }
    all
}

/// Adds the sums of all `parts` in their order.
fn total(parts: usize, of_part: impl Fn(usize) -> [f64; SUMS] + Sync + Send) -> [f64; SUMS] {
    let parts: Vec<_> = (0..parts).into_par_iter().map(of_part).collect();
    parts.into_iter().fold([0.0; SUMS], |a, b| std::array::from_fn(|i| a[i] + b[i]))
}
