use crate::Tensor;
use crate::element::{Float, Real, with_float};
use crate::ops::parallel_rows::rows_per_task;
use rayon::prelude::*;

pub(super) fn squares(w: &Tensor, change: Option<&Tensor>, squares: &mut Tensor) {
    let columns = w.shape()[1];
    with_float!(w.dtype(), S => {
        type R<S> = <S as Float>::Real;
        let (w, change) = (w.host::<S>(), change.map(|change| change.host::<S>()));
        squares.host_mut::<R<S>>().par_iter_mut().with_min_len(rows_per_task(columns)).enumerate().for_each(|(r, square)| {
            let row = r * columns..(r + 1) * columns;
            let value = |i: usize| w[i].load() + change.map_or(Real::of(0.0), |change| change[i].load());
            *square = row.map(|i| value(i) * value(i)).sum::<R<S>>();
        });
    });
}

pub(super) fn finish(squares: &Tensor, magnitude: Option<&Tensor>, result: &mut Tensor) {
    with_float!(squares.dtype(), S => {
        type R<S> = <S as Float>::Real;
        let (squares, magnitude) = (squares.host::<R<S>>(), magnitude.map(|magnitude| magnitude.host::<R<S>>()));
        let zero = <R<S>>::of(0.0);
        for (r, (result, square)) in result.host_mut::<R<S>>().iter_mut().zip(squares).enumerate() {
            *result = match magnitude {
                None => square.sqrt(),
                Some(_) if *square == zero => zero,
                Some(magnitude) => magnitude[r] / square.sqrt(),
            };
        }
    });
}

pub(super) fn gradient(dy: &Tensor, x: &Tensor, magnitude: &Tensor, dmagnitude: &mut Tensor) {
    with_float!(dy.dtype(), S => {
        type R<S> = <S as Float>::Real;
        let (dy, x, magnitude) = (dy.host::<S>(), x.host::<S>(), magnitude.host::<R<S>>());
        let columns = magnitude.len().max(1);
        let zero = <R<S>>::of(0.0);
        let mut sums = vec![zero; magnitude.len()];
        for (dy, x) in dy.chunks_exact(columns).zip(x.chunks_exact(columns)) {
            for ((sum, dy), x) in sums.iter_mut().zip(dy).zip(x) {
                *sum += dy.load() * x.load();
            }
        }
        for ((gradient, sum), &magnitude) in dmagnitude.host_mut::<R<S>>().iter_mut().zip(sums).zip(magnitude) {
            if magnitude != zero {
                *gradient += sum / magnitude;
            }
        }
    });
}
