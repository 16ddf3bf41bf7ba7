use crate::Tensor;
use crate::element::{Float, Real, with_float};
use crate::ops::parallel_rows::{ParallelRows, TASK};
use crate::ops::swiglu::cpu::sigmoid;
use rayon::prelude::*;

pub(super) fn output_gate(x: &Tensor, gate: &Tensor, y: &mut Tensor) {
    with_float!(x.dtype(), S => {
        let inputs = x.host::<S>().par_rows(TASK).zip(gate.host::<S>().par_rows(TASK));
        y.host_mut::<S>().par_rows_mut(TASK).zip(inputs).for_each(|(y, (x, gate))| {
            for (y, (x, gate)) in y.iter_mut().zip(x.iter().zip(gate)) {
                *y = S::store(x.load() * sigmoid(gate.load()));
            }
        });
    });
}

pub(super) fn output_gate_backward([dy, x, gate]: [&Tensor; 3], [dx, dgate]: [&mut Tensor; 2]) {
    with_float!(x.dtype(), S => {
        let one = <S as Float>::Real::of(1.0);
        let inputs = dy.host::<S>().par_rows(TASK).zip(x.host::<S>().par_rows(TASK)).zip(gate.host::<S>().par_rows(TASK));
        let outputs = dx.host_mut::<S>().par_rows_mut(TASK).zip(dgate.host_mut::<S>().par_rows_mut(TASK));
        outputs.zip(inputs).for_each(|((dx, dgate), ((dy, x), gate))| {
            for i in 0..dy.len() {
                let (dy, s) = (dy[i].load(), sigmoid(gate[i].load()));
                dx[i] = S::store(dy * s);
                dgate[i] = S::store(dy * x[i].load() * s * (one - s));
            }
        });
    });
}
