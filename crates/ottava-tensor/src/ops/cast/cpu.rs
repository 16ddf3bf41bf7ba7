use crate::Tensor;
use crate::element::{Float, Real, with_float};
use crate::ops::parallel_rows::TASK;
use rayon::prelude::*;

pub(super) fn cast(x: &Tensor, y: &mut Tensor, first: usize) {
    let n = x.len();
    with_float!(x.dtype(), A => with_float!(y.dtype(), B => convert::<A, B>(x.host(), &mut y.host_mut()[first..first + n])));
}

fn convert<A: Float, B: Float>(x: &[A], y: &mut [B]) {
    // F64 represents every value of the other types, so each value is rounded only once.
    y.par_iter_mut().with_min_len(TASK).zip(x).for_each(|(y, &x)| *y = B::store(B::Real::of(x.load().to_f64())));
}
