use crate::Tensor;
use crate::element::{Float, with_float};
use crate::ops::parallel_rows::TASK;
use rayon::prelude::*;

pub(super) fn add(a: &Tensor, b: &Tensor, y: &mut Tensor) {
    with_float!(a.dtype(), S => {
        let (a, b): (&[S], &[S]) = (a.host(), b.host());
        y.host_mut::<S>()
            .par_iter_mut()
            .with_min_len(TASK)
            .zip(a.par_iter().zip(b))
            .for_each(|(y, (a, b))| *y = S::store(a.load() + b.load()));
    });
}
