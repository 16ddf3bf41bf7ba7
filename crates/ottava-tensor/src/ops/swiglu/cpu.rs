use super::{Activation, Gelu};
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use rayon::prelude::*;

pub(super) fn activation(how: Activation, x: &Tensor, y: &mut Tensor) {
    let hidden = y.shape()[1].max(1);
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let rows = y.host_mut::<S>().par_chunks_mut(hidden).zip(x.host::<S>().par_chunks(how.inputs() * hidden));
        rows.for_each(|(y, x)| {
            let (gate, up) = x.split_at(hidden);
            for (i, y) in y.iter_mut().enumerate() {
                let value = match how {
                    Activation::SwiGlu => gate[i].load() * sigmoid(gate[i].load()),
                    Activation::GeGlu(gelu) | Activation::Gelu(gelu) => gelu_and_slope::<R>(gelu, gate[i].load()).0,
                };
                *y = S::store(up.get(i).map_or(value, |up| value * up.load()));
            }
        });
    });
}

pub(super) fn activation_backward(how: Activation, dy: &Tensor, x: &Tensor, dx: &mut Tensor) {
    let hidden = dy.shape()[1].max(1);
    let width = how.inputs() * hidden;
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let one = R::of(1.0);
        let rows = dx.host_mut::<S>().par_chunks_mut(width).zip(x.host::<S>().par_chunks(width));
        rows.zip(dy.host::<S>().par_chunks(hidden)).for_each(|((dx, x), dy)| {
            let ((gate, up), (dgate, dup)) = (x.split_at(hidden), dx.split_at_mut(hidden));
            for i in 0..hidden {
                let (g, dy) = (gate[i].load(), dy[i].load());
                let through = up.get(i).map_or(dy, |up| dy * up.load());
                let value = match how {
                    Activation::SwiGlu => {
                        let s = sigmoid(g);
                        dgate[i] = S::store(through * s * (one + g * (one - s)));
                        g * s
                    }
                    Activation::GeGlu(gelu) | Activation::Gelu(gelu) => {
                        let (value, slope) = gelu_and_slope::<R>(gelu, g);
                        dgate[i] = S::store(through * slope);
                        value
                    }
                };
                if let Some(dup) = dup.get_mut(i) {
                    *dup = S::store(dy * value);
                }
            }
        });
    });
}

fn sigmoid<R: Real>(x: R) -> R {
    R::of(1.0) / (R::of(1.0) + (-x).exp())
}

/// GELU and its derivative.
fn gelu_and_slope<R: Real>(gelu: Gelu, x: R) -> (R, R) {
    let one = R::of(1.0);
    match gelu {
        Gelu::Tanh => {
            // 2 · √(2/π)
            let (twice, cubic) = (R::of(std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::SQRT_2), R::of(0.044715));
            let s = sigmoid(twice * (x + cubic * x * x * x));
            (x * s, s + x * s * (one - s) * (twice * (one + R::of(3.0 * 0.044715) * x * x)))
        }
        Gelu::Exact => {
            let (half, root) = (R::of(0.5), std::f64::consts::FRAC_1_SQRT_2);
            let cdf = half * (one + (x * R::of(root)).erf());
            // 1 / √(2π)
            let density = R::of(0.5 * std::f64::consts::FRAC_2_SQRT_PI * root) * (-half * x * x).exp();
            (x * cdf, cdf + x * density)
        }
    }
}
