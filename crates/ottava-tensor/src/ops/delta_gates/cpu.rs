use super::{DeltaGates, GateGradient, GateInput};
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use crate::ops::rmsnorm::cpu::add_partial_sums;
use crate::ops::swiglu::cpu::sigmoid;

/// The number of rows per partial sum of the gradients of parameters. Partial sums are added in order.
const ROWS: usize = 64;

/// Returns `ln(1 + exp(x))` without overflow. `ln(1 + e)` of a small `e` is corrected for the rounding of `1 + e`.
pub(in crate::ops) fn softplus<R: Real>(x: R) -> R {
    let (zero, one) = (R::of(0.0), R::of(1.0));
    let (larger, e) = if x > zero { (x, (-x).exp()) } else { (zero, x.exp()) };
    let sum = one + e;
    larger + if sum == one { e } else { sum.ln() * e / (sum - one) }
}

pub(super) fn delta_gates(input: GateInput, gates: &mut DeltaGates) {
    let heads = input.a_log.len().max(1);
    with_float!(input.b.dtype(), S => {
        type R = <S as Float>::Real;
        let (a_log, dt_bias) = (input.a_log.host::<R>(), input.dt_bias.host::<R>());
        for (i, (g, a)) in gates.g.host_mut::<R>().iter_mut().zip(input.a.host::<S>()).enumerate() {
            *g = -(a_log[i % heads].exp() * softplus(a.load() + dt_bias[i % heads]));
        }
        for (beta, b) in gates.beta.host_mut::<R>().iter_mut().zip(input.b.host::<S>()) {
            *beta = sigmoid(b.load());
        }
    });
}

pub(super) fn delta_gates_backward(
    d: &DeltaGates,
    input: GateInput,
    gates: &DeltaGates,
    gradient: &mut GateGradient,
    [da_log, ddt_bias]: [&mut Tensor; 2],
) {
    let heads = input.a_log.len().max(1);
    with_float!(input.b.dtype(), S => {
        type R = <S as Float>::Real;
        let one = R::of(1.0);
        let (a_log, dt_bias) = (input.a_log.host::<R>(), input.dt_bias.host::<R>());
        let (dg, dbeta) = (d.g.host::<R>(), d.beta.host::<R>());
        for (i, (db, beta)) in gradient.b.host_mut::<S>().iter_mut().zip(gates.beta.host::<R>()).enumerate() {
            *db = S::store(dbeta[i] * *beta * (one - *beta));
        }
        let (a, g, of_a) = (input.a.host::<S>(), gates.g.host::<R>(), gradient.a.host_mut::<S>());
        for first in (0..a.len()).step_by(ROWS * heads) {
            let mut partial = [vec![R::of(0.0); heads], vec![R::of(0.0); heads]];
            for i in first..a.len().min(first + ROWS * heads) {
                let head = i % heads;
                let da = -(dg[i] * a_log[head].exp() * sigmoid(a[i].load() + dt_bias[head]));
                of_a[i] = S::store(da);
                partial[0][head] += dg[i] * g[i];
                partial[1][head] += da;
            }
            add_partial_sums(da_log.host_mut::<R>(), std::iter::once(partial[0].as_slice()));
            add_partial_sums(ddt_bias.host_mut::<R>(), std::iter::once(partial[1].as_slice()));
        }
    });
}
