use crate::Tensor;
use crate::element::{Float, Real, with_float};
use rayon::prelude::*;

pub(super) fn compute(w: &Tensor, scaled: Option<(&Tensor, &Tensor)>, result: &mut Tensor) {
    let columns = w.shape()[1].max(1);
    with_float!(w.dtype(), S => {
        let (w, change) = (w.host::<S>(), scaled.map(|(change, _)| change.host::<S>()));
        let magnitude = scaled.map(|(_, magnitude)| magnitude.host::<<S as Float>::Real>());
        result.host_mut::<<S as Float>::Real>().par_iter_mut().enumerate().for_each(|(r, result)| {
            let row = |x: &'_ [S]| -> Vec<<S as Float>::Real> {
                x[r * columns..].iter().take(columns).map(|x| x.load()).collect()
            };
            let (w, change) = (row(w), change.map(row));
            let value = |c: usize| w[c] + change.as_ref().map_or(Real::of(0.0), |change| change[c]);
            let zero = <S as Float>::Real::of(0.0);
            let norm = (0..w.len()).map(|c| value(c) * value(c)).sum::<<S as Float>::Real>().sqrt();
            *result = match magnitude {
                None => norm,
                Some(_) if norm == zero => zero,
                Some(magnitude) => magnitude[r] / norm,
            };
        });
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
