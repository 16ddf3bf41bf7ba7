use super::{COEFFICIENTS, EPSILON};
use crate::Tensor;
use crate::ops::parallel_rows::ParallelRows;
use half::bf16;
use rayon::prelude::*;

/// The number of elements per task.
const CHUNK: usize = 1 << 14;

pub(super) fn normalize(x: &Tensor, norm: &Tensor, y: &mut Tensor) {
    let norm = norm.host::<f32>()[0].max(EPSILON);
    let pairs = y.host_mut::<bf16>().par_iter_mut().with_min_len(CHUNK).zip(x.host::<bf16>());
    pairs.for_each(|(y, x)| *y = bf16::from_f32(x.to_f32() / norm));
}

pub(super) fn polynomial(gram: &mut Tensor, square: &Tensor, factor: f32) {
    let n = square.shape()[0].max(1);
    let rows = gram.host_mut::<bf16>().par_rows_mut(n).zip(square.host::<f32>().par_rows(n));
    rows.enumerate().for_each(|(i, (gram, square))| {
        for (j, (gram, square)) in gram.iter_mut().zip(square).enumerate() {
            *gram = bf16::from_f32(factor * element(i == j, gram.to_f32(), *square));
        }
    });
}

fn element(is_diagonal: bool, gram: f32, square: f32) -> f32 {
    let [a, b, c] = COEFFICIENTS;
    let sum = b * gram + c * square;
    if is_diagonal { a + sum } else { sum }
}
