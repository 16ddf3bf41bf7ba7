use super::{swiglu, swiglu_backward, swiglu_backward_to, swiglu_to};
use crate::ops::destination::tests::{destinations, hostile};
use crate::testing::{Tolerance, normals, parity, values};
use crate::{DType, Device, Tensor};

#[test]
fn swiglu_agrees_across_devices() {
    for (t, f) in [(1, 1), (3, 7), (65, 301), (5, 2056)] {
        for dtype in [DType::F32, DType::BF16] {
            let inputs = [normals("x", &[t, 2 * f], dtype), normals("dy", &[t, f], dtype)];
            // The exponentials of the two libraries differ in the last bit.
            let steps = if dtype == DType::F32 { 8.0 } else { 1.0 };
            parity(&inputs, Tolerance::Steps(dtype, steps), |x| {
                Ok(vec![swiglu(&x[0])?, swiglu_backward(&x[1], &x[0])?])
            });
        }
    }
}

#[test]
fn gates_come_before_ups() {
    let x = Tensor::from_slice(&Device::Cpu, &[1, 4], &[0f64, 2.0, 5.0, 7.0]).unwrap();
    let expected = 2.0 / (1.0 + (-2f64).exp()) * 7.0;
    let y = values(&swiglu(&x).unwrap());
    assert!(y[0] == 0.0 && (y[1] - expected).abs() < 1e-12, "{y:?}");
}

#[test]
fn swiglu_writes_to_every_destination() {
    for (t, f) in [(1, 1), (3, 7), (17, 48), (129, 144), (130, 301), (257, 264)] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let inputs = [hostile("x", &[t, 2 * f], dtype), hostile("dy", &[t, f], dtype)];
            destinations(&inputs, |x, output| swiglu_to(&x[0], output));
            destinations(&inputs, |x, output| swiglu_backward_to(&x[1], &x[0], output));
        }
    }
}
