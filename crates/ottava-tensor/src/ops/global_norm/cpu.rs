use crate::element::Float;
use crate::{DType, Tensor};
use half::bf16;
use rayon::prelude::*;

const CHUNK: usize = 1 << 14;

pub(super) fn global_norm(tensors: &[&Tensor], norm: &mut Tensor) {
    let sum: f64 = tensors
        .iter()
        .map(|t| match t.dtype() {
            DType::F32 => sum_of_squares::<f32>(t.host()),
            _ => sum_of_squares::<bf16>(t.host()),
        })
        .sum();
    norm.host_mut()[0] = sum.sqrt() as f32;
}

/// Chunks are summed in order, so the result does not depend on the number of threads.
fn sum_of_squares<X: Float<Real = f32>>(x: &[X]) -> f64 {
    let chunk = |x: &[X]| x.iter().map(|x| f64::from(x.load()) * f64::from(x.load())).sum::<f64>();
    x.par_chunks(CHUNK).map(chunk).collect::<Vec<_>>().into_iter().sum()
}
