use super::GateFunction;
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use crate::ops::parallel_rows::{ParallelRows, TASK};
use crate::ops::swiglu::cpu::{sigmoid, silu_and_slope};
use rayon::prelude::*;

/// Returns the function of a gate and its derivative.
fn value_and_slope<R: Real>(how: GateFunction, gate: R) -> (R, R) {
    match how {
        GateFunction::Sigmoid => {
            let s = sigmoid(gate);
            (s, s * (R::of(1.0) - s))
        }
        GateFunction::Silu => silu_and_slope(gate),
    }
}

pub(super) fn output_gate(how: GateFunction, x: &Tensor, gate: &Tensor, y: &mut Tensor) {
    with_float!(x.dtype(), S => {
        let inputs = x.host::<S>().par_rows(TASK).zip(gate.host::<S>().par_rows(TASK));
        y.host_mut::<S>().par_rows_mut(TASK).zip(inputs).for_each(|(y, (x, gate))| {
            for (y, (x, gate)) in y.iter_mut().zip(x.iter().zip(gate)) {
                *y = S::store(x.load() * value_and_slope(how, gate.load()).0);
            }
        });
    });
}

pub(super) fn output_gate_backward(how: GateFunction, [dy, x, gate]: [&Tensor; 3], [dx, dgate]: [&mut Tensor; 2]) {
    with_float!(x.dtype(), S => {
        let inputs = dy.host::<S>().par_rows(TASK).zip(x.host::<S>().par_rows(TASK)).zip(gate.host::<S>().par_rows(TASK));
        let outputs = dx.host_mut::<S>().par_rows_mut(TASK).zip(dgate.host_mut::<S>().par_rows_mut(TASK));
        outputs.zip(inputs).for_each(|((dx, dgate), ((dy, x), gate))| {
            for i in 0..dy.len() {
                let (dy, (value, slope)) = (dy[i].load(), value_and_slope(how, gate[i].load()));
                dx[i] = S::store(dy * value);
                dgate[i] = S::store(dy * x[i].load() * slope);
            }
        });
    });
}
