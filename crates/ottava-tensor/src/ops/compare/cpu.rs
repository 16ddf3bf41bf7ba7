use super::SUMS;
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use rayon::prelude::*;

/// Elements of a chunk. Chunks are added in order, independent of the number of threads.
const CHUNK: usize = 1 << 14;

pub(super) fn compare(x: &Tensor, reference: &Tensor) -> [f64; SUMS] {
    with_float!(x.dtype(), X => sums(x.host::<X>(), reference.host::<X>()))
}

fn sums<X: Float>(x: &[X], reference: &[X]) -> [f64; SUMS] {
    let of_chunk = |(x, reference): (&[X], &[X])| {
        let mut all = [0f64; SUMS];
        for (x, r) in x.iter().zip(reference) {
            let (x, r) = (x.load().to_f64(), r.load().to_f64());
            for (sum, term) in all.iter_mut().zip([x * x, r * r, x * r, (x - r) * (x - r)]) {
                *sum += term;
            }
        }
        all
    };
    let chunks: Vec<_> = x.par_chunks(CHUNK).zip(reference.par_chunks(CHUNK)).map(of_chunk).collect();
    chunks.into_iter().fold([0.0; SUMS], |a, b| std::array::from_fn(|i| a[i] + b[i]))
}
