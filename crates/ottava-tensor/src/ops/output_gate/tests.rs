use super::*;
use crate::DType;
use crate::testing::{Tolerance, assert_gradient, dot, normals, parity, values};

#[test]
fn output_gate_agrees_across_devices() {
    for shape in [[1, 1], [5, 51], [17, 241], [70, 1000]] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let inputs = ["x", "gate", "dy"].map(|name| normals(name, &shape, dtype));
            // The exponentials of CPU and GPU differ in the last bits, and the difference of one and a sigmoid near one has few of its bits.
            let steps = if dtype == DType::F32 { 128.0 } else { 1.0 };
            for how in FUNCTIONS {
                parity(&inputs, Tolerance::Steps(dtype, steps), |t| {
                    let [dx, dgate] = output_gate_backward(how, &t[2], &t[0], &t[1])?;
                    Ok(vec![output_gate(how, &t[0], &t[1])?, dx, dgate])
                });
            }
        }
    }
}

const FUNCTIONS: [GateFunction; 2] = [GateFunction::Sigmoid, GateFunction::Silu];

#[test]
fn outputs_are_multiplied_by_functions_of_gates() {
    let [x, gate] = ["x", "gate"].map(|name| normals(name, &[7, 5], DType::F64));
    for how in FUNCTIONS {
        let y = values(&output_gate(how, &x, &gate).unwrap());
        for (y, (x, gate)) in y.into_iter().zip(values(&x).into_iter().zip(values(&gate))) {
            let factor = if how == GateFunction::Silu { gate } else { 1.0 };
            assert!((y - x * factor / (1.0 + (-gate).exp())).abs() < 1e-15, "{how:?}");
        }
    }
}

#[test]
fn backward_is_the_gradient() {
    let [x, gate, dy] = ["x", "gate", "dy"].map(|name| normals(name, &[7, 5], DType::F64));
    for how in FUNCTIONS {
        let loss = |x: &Tensor, gate: &Tensor| dot(&values(&output_gate(how, x, gate).unwrap()), &values(&dy));
        let [dx, dgate] = output_gate_backward(how, &dy, &x, &gate).unwrap();
        assert_gradient("x", &x, &dx, |x| loss(x, &gate));
        assert_gradient("gate", &gate, &dgate, |gate| loss(&x, gate));
    }
}

#[test]
fn misfits_are_errors() {
    let [x, gate] = [[7, 5], [7, 6]].map(|shape| normals("x", &shape, DType::F64));
    assert!(output_gate(GateFunction::Sigmoid, &x, &gate).is_err());
}
