use super::{Activation, Gelu};
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use crate::ops::parallel_rows::ParallelRows;
use crate::wide::wide;
use rayon::prelude::*;

pub(super) fn activation(how: Activation, x: &Tensor, y: &mut Tensor) {
    let hidden = y.shape()[1].max(1);
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let rows = y.host_mut::<S>().par_rows_mut(hidden).zip(x.host::<S>().par_rows(how.inputs() * hidden));
        rows.for_each(|(y, x)| {
            let (gate, up) = x.split_at(hidden);
            match how {
                Activation::SwiGlu => swiglu(gate, up, y),
                Activation::ClampedSwiGlu => clamped_swiglu(gate, up, y),
                Activation::GeGlu(_) | Activation::Gelu(_) | Activation::Relu2 | Activation::Tanh => {
                    for (i, y) in y.iter_mut().enumerate() {
                        let value = value_and_slope::<R>(how, gate[i].load()).0;
                        *y = S::store(up.get(i).map_or(value, |up| value * up.load()));
                    }
                }
            }
        });
    });
}

wide! {
    fn swiglu[S: Float](gate: &[S], up: &[S], y: &mut [S]) {
        for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
            let gate = gate.load();
            *y = S::store(gate * sigmoid(gate) * up.load());
        }
    }

    fn swiglu_backward[S: Float](gate: &[S], up: &[S], dy: &[S], dgate: &mut [S], dup: &mut [S]) {
        let one = S::Real::of(1.0);
        for ((((gate, up), dy), dgate), dup) in gate.iter().zip(up).zip(dy).zip(dgate).zip(dup) {
            let (gate, dy) = (gate.load(), dy.load());
            let s = sigmoid(gate);
            *dgate = S::store(dy * up.load() * s * (one + gate * (one - s)));
            *dup = S::store(dy * (gate * s));
        }
    }

    fn clamped_swiglu[S: Float](gate: &[S], up: &[S], y: &mut [S]) {
        for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
            let (gate, up) = (Clamped::gate(gate.load()), Clamped::up(up.load()));
            *y = S::store(gate.swish() * (up.value + S::Real::of(1.0)));
        }
    }

    fn clamped_swiglu_backward[S: Float](gate: &[S], up: &[S], dy: &[S], dgate: &mut [S], dup: &mut [S]) {
        let (zero, one, factor) = (S::Real::default(), S::Real::of(1.0), S::Real::of(Activation::CLAMPED_FACTOR));
        for ((((gate, up), dy), dgate), dup) in gate.iter().zip(up).zip(dy).zip(dgate).zip(dup) {
            let (gate, up, dy) = (Clamped::gate(gate.load()), Clamped::up(up.load()), dy.load());
            let s = sigmoid(factor * gate.value);
            let through_gate = dy * (up.value + one) * s * (one + factor * gate.value * (one - s));
            *dgate = S::store(if gate.is_bounded { zero } else { through_gate });
            *dup = S::store(if up.is_bounded { zero } else { dy * gate.swish() });
        }
    }
}

/// A gate or `up` value of [`Activation::ClampedSwiGlu`], and whether it was replaced by a bound. A replaced value has no gradient.
struct Clamped<R> {
    value: R,
    is_bounded: bool,
}

impl<R: Real> Clamped<R> {
    #[inline(always)]
    fn gate(x: R) -> Clamped<R> {
        let limit = R::of(Activation::CLAMPED_LIMIT);
        // NaN stays NaN.
        Clamped { value: if x > limit { limit } else { x }, is_bounded: x > limit }
    }

    #[inline(always)]
    fn up(x: R) -> Clamped<R> {
        let (limit, least) = (R::of(Activation::CLAMPED_LIMIT), R::of(-Activation::CLAMPED_LIMIT));
        let value = if x > limit {
            limit
        } else if x < least {
            least
        } else {
            x
        };
        Clamped { value, is_bounded: x > limit || x < least }
    }

    /// Returns `x · sigmoid(1.702 · x)`.
    #[inline(always)]
    fn swish(&self) -> R {
        self.value * sigmoid(R::of(Activation::CLAMPED_FACTOR) * self.value)
    }
}

pub(super) fn activation_backward(how: Activation, dy: &Tensor, x: &Tensor, dx: &mut Tensor) {
    let hidden = dy.shape()[1].max(1);
    let width = how.inputs() * hidden;
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let rows = dx.host_mut::<S>().par_rows_mut(width).zip(x.host::<S>().par_rows(width));
        rows.zip(dy.host::<S>().par_rows(hidden)).for_each(|((dx, x), dy)| {
            let ((gate, up), (dgate, dup)) = (x.split_at(hidden), dx.split_at_mut(hidden));
            match how {
                Activation::SwiGlu => swiglu_backward(gate, up, dy, dgate, dup),
                Activation::ClampedSwiGlu => clamped_swiglu_backward(gate, up, dy, dgate, dup),
                Activation::GeGlu(_) | Activation::Gelu(_) | Activation::Relu2 | Activation::Tanh => {
                    for i in 0..hidden {
                        let dy = dy[i].load();
                        let through = up.get(i).map_or(dy, |up| dy * up.load());
                        let (value, slope) = value_and_slope::<R>(how, gate[i].load());
                        dgate[i] = S::store(through * slope);
                        if let Some(dup) = dup.get_mut(i) {
                            *dup = S::store(dy * value);
                        }
                    }
                }
            }
        });
    });
}

pub(super) fn activation_dots(how: Activation, dy: &Tensor, x: &Tensor, dots: &mut Tensor) {
    let hidden = dy.shape()[1].max(1);
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let rows = x.host::<S>().par_rows(how.inputs() * hidden).zip(dy.host::<S>().par_rows(hidden));
        dots.host_mut::<R>().par_iter_mut().zip(rows).for_each(|(dot, (x, dy))| {
            let (gate, up) = x.split_at(hidden);
            let term = |i: usize| {
                let gate = gate[i].load();
                let (value, up) = match how {
                    Activation::ClampedSwiGlu => {
                        (Clamped::gate(gate).swish(), Clamped::up(up[i].load()).value + R::of(1.0))
                    }
                    _ => (value_and_slope::<R>(how, gate).0, up.get(i).map_or(R::of(1.0), |up| up.load())),
                };
                dy[i].load() * (value * up)
            };
            *dot = (0..hidden).map(term).sum();
        });
    });
}

#[inline(always)]
pub(in crate::ops) fn sigmoid<R: Real>(x: R) -> R {
    R::of(1.0) / (R::of(1.0) + (-x).exp())
}

/// Returns `x · sigmoid(x)` and its derivative.
#[inline(always)]
pub(in crate::ops) fn silu_and_slope<R: Real>(x: R) -> (R, R) {
    let s = sigmoid(x);
    (x * s, s * (R::of(1.0) + x * (R::of(1.0) - s)))
}

/// Returns the function of the gate, or of the only input, and its derivative.
fn value_and_slope<R: Real>(how: Activation, x: R) -> (R, R) {
    match how {
        Activation::SwiGlu => silu_and_slope(x),
        Activation::ClampedSwiGlu => unreachable!("`up` of the clamped SwiGLU also has a function"),
        Activation::GeGlu(gelu) | Activation::Gelu(gelu) => gelu_and_slope(gelu, x),
        Activation::Relu2 => {
            // A comparison keeps NaN.
            let positive = if x < R::default() { R::default() } else { x };
            (positive * positive, positive + positive)
        }
        Activation::Tanh => {
            let y = x.tanh();
            (y, R::of(1.0) - y * y)
        }
    }
}

/// Returns GELU and its derivative.
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
