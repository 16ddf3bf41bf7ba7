use crate::DType;
use crate::element::Float;
use crate::fp8::E4M3;
use crate::ops::Gradient;
use half::bf16;
use rayon::prelude::*;

const CHUNK: usize = 1 << 14;

/// Returns the sum of squares of each gradient.
pub(super) fn sums_of_squares(gradients: &[Gradient]) -> Vec<f64> {
    gradients
        .iter()
        .map(|gradient| match gradient {
            Gradient::Plain(x) if x.dtype() == DType::F32 => sum_of_squares::<f32>(x.host(), 1.0),
            Gradient::Plain(x) => sum_of_squares::<bf16>(x.host(), 1.0),
            Gradient::Scaled(x) => sum_of_squares::<E4M3>(x.values.host(), x.scale_inv.host::<f32>()[0]),
        })
        .collect()
}

/// Chunks are summed in order, so the sum does not depend on the number of threads.
fn sum_of_squares<X: Float<Real = f32>>(x: &[X], scale: f32) -> f64 {
    let square = |x: &X| f64::from(x.load() * scale) * f64::from(x.load() * scale);
    let chunk = |x: &[X]| x.iter().map(square).sum::<f64>();
    x.par_chunks(CHUNK).map(chunk).collect::<Vec<_>>().into_iter().sum()
}
