use crate::Tensor;
use rayon::prelude::*;

const CHUNK: usize = 1 << 14;

pub(super) fn global_norm(tensors: &[&Tensor], norm: &mut Tensor) {
    let sum: f64 = tensors.iter().map(|t| sum_of_squares(t.host())).sum();
    norm.host_mut()[0] = sum.sqrt() as f32;
}

/// Chunks are summed in order, so the result does not depend on the number of threads.
fn sum_of_squares(x: &[f32]) -> f64 {
    let chunk = |x: &[f32]| x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>();
    x.par_chunks(CHUNK).map(chunk).collect::<Vec<_>>().into_iter().sum()
}
