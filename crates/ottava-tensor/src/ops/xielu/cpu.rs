use super::{XIELU_BETA, XIELU_EPS, XieluAlphas};
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use crate::ops::parallel_rows::{ParallelRows, TASK};
use crate::ops::swiglu::cpu::sigmoid;
use rayon::prelude::*;

/// Returns `ln(1 + e^a)`.
fn softplus<R: Real>(a: R) -> R {
    let zero = R::default();
    let (larger, distance) = if a > zero { (a, -a) } else { (zero, a) };
    larger + (R::of(1.0) + distance.exp()).ln()
}

/// Returns the factors of positive inputs and of the other inputs.
fn factors<R: Real>([positive, negative]: [R; 2]) -> [R; 2] {
    [softplus(positive), R::of(XIELU_BETA) + softplus(negative)]
}

fn read<S: Float>(alphas: XieluAlphas) -> [S::Real; 2] {
    [alphas.positive, alphas.negative].map(|alpha| alpha.host::<S>()[0].load())
}

/// Returns the term that the factor of inputs that are not positive multiplies.
fn term<R: Real>(x: R) -> R {
    let eps = R::of(XIELU_EPS);
    (if x < eps { x } else { eps }).exp_m1() - x
}

pub(super) fn xielu(x: &Tensor, alphas: XieluAlphas, y: &mut Tensor) {
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let ([p, n], beta) = (factors(read::<S>(alphas)), R::of(XIELU_BETA));
        y.host_mut::<S>().par_rows_mut(TASK).zip(x.host::<S>().par_rows(TASK)).for_each(|(y, x)| {
            for (y, x) in y.iter_mut().zip(x) {
                let x = x.load();
                let curved = if x > R::default() { p * x * x } else { n * term(x) };
                *y = S::store(curved + beta * x);
            }
        });
    });
}

pub(super) fn xielu_backward(
    dy: &Tensor,
    x: &Tensor,
    alphas: XieluAlphas,
    dx: &mut Tensor,
    [dpositive, dnegative]: [&mut Tensor; 2],
) {
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let (own, zero, beta) = (read::<S>(alphas), R::default(), R::of(XIELU_BETA));
        let ([p, n], one, eps) = (factors(own), R::of(1.0), R::of(XIELU_EPS));
        let inputs = dy.host::<S>().par_rows(TASK).zip(x.host::<S>().par_rows(TASK));
        let of_task = |(dx, (dy, x)): (&mut [S], (&[S], &[S]))| {
            let mut sums = [zero; 2];
            for (dx, (dy, x)) in dx.iter_mut().zip(dy.iter().zip(x)) {
                let (dy, x) = (dy.load(), x.load());
                let slope = if x > zero {
                    sums[0] += dy * x * x;
                    (p + p) * x
                } else {
                    sums[1] += dy * term(x);
                    n * if x < eps { x.exp_m1() } else { -one }
                };
                *dx = S::store(dy * (slope + beta));
            }
            sums
        };
        let sums: Vec<[R; 2]> = dx.host_mut::<S>().par_rows_mut(TASK).zip(inputs).map(of_task).collect();
        for (which, gradient) in [dpositive, dnegative].into_iter().enumerate() {
            let sum: R = sums.iter().map(|sums| sums[which]).sum();
            gradient.host_mut::<R>()[0] += sigmoid(own[which]) * sum;
        }
    });
}
