use super::Factor;
use crate::element::{Float, Real, with_float};
use crate::ops::parallel_rows::ParallelRows;
use crate::{DType, Tensor};
use rayon::prelude::*;

pub(super) fn column_scales(x: &Tensor, scales: &mut Tensor) {
    let scales = scales.host_mut::<f32>();
    with_float!(x.dtype(), S => {
        for row in x.host::<S>().chunks_exact(scales.len().max(1)) {
            for (amax, x) in scales.iter_mut().zip(row) {
                // `max` ignores NaN.
                *amax = amax.max((x.load().to_f64() as f32).abs());
            }
        }
    });
    scales.iter_mut().for_each(|amax| *amax = scale(*amax));
}

/// Returns the largest power of two `s` with `s · amax <= 1`.
fn scale(amax: f32) -> f32 {
    if amax == 0.0 || amax.is_infinite() {
        return 1.0;
    }
    let bits = amax.to_bits();
    let is_power = bits.trailing_zeros() >= 23;
    let exponent = 127 - (bits >> 23) as i32 - i32::from(!is_power);
    f32::from_bits(((exponent.clamp(-126, 126) + 127) as u32) << 23)
}

pub(super) fn multiply(x: &Tensor, scales: &Tensor, factor: Factor, y: &mut Tensor) {
    with_float!(x.dtype(), S => {
        type R<S> = <S as Float>::Real;
        let scales: Vec<R<S>> = match scales.dtype() {
            DType::F64 => scales.host::<f64>().iter().map(|&scale| Real::of(scale)).collect(),
            _ => scales.host::<f32>().iter().map(|&scale| Real::of(f64::from(scale))).collect(),
        };
        let columns = scales.len().max(1);
        let rows = x.host::<S>().par_rows(columns);
        y.host_mut::<S>().par_rows_mut(columns).zip(rows).for_each(|(y, x)| {
            for ((y, x), scale) in y.iter_mut().zip(x).zip(&scales) {
                let factor = if factor == Factor::Scale { *scale } else { <R<S>>::of(1.0) / *scale };
                *y = S::store(x.load() * factor);
            }
        });
    });
}

pub(super) fn add_unscaled_columns(sum: &mut Tensor, x: &Tensor, scales: &Tensor) {
    let (x, scales): (&[f32], &[f32]) = (x.host(), scales.host());
    with_float!(sum.dtype(), S => {
        let columns = scales.len().max(1);
        sum.host_mut::<S>().par_rows_mut(columns).zip(x.par_rows(columns)).for_each(|(sum, x)| {
            for ((sum, x), scale) in sum.iter_mut().zip(x).zip(scales) {
                *sum = S::store(sum.load() + <S as Float>::Real::of(f64::from(x * (1.0 / scale))));
            }
        });
    });
}
