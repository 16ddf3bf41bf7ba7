use super::*;
use crate::testing::{assert_gradient, dot, normals, values};
use crate::{DType, Device};

fn inputs(tokens: usize, heads: usize) -> [Tensor; 4] {
    let matrix = |name| normals(name, &[tokens, heads], DType::F64);
    let vector = |name| normals(name, &[heads], DType::F64);
    [matrix("b"), matrix("a"), vector("a_log"), vector("dt_bias")]
}

fn gates_of([b, a, a_log, dt_bias]: [&Tensor; 4]) -> DeltaGates {
    delta_gates(GateInput { b, a, a_log, dt_bias }).unwrap()
}

#[test]
fn gates_are_a_decay_and_a_share() {
    let [b, _, a_log, dt_bias] = inputs(5, 2);
    // Softplus neither overflows nor vanishes.
    let a = [0.0, 1.0, -1.0, 700.0, 900.0, -30.0, -36.0, -600.0, 20.5, -1e-9];
    let a = Tensor::from_slice(&Device::Cpu, &[5, 2], &a).unwrap();
    let gates = gates_of([&b, &a, &a_log, &dt_bias]);
    let [a, b, a_log, dt_bias, g, beta] = [&a, &b, &a_log, &dt_bias, &gates.g, &gates.beta].map(values);
    for (i, a) in a.into_iter().enumerate() {
        let x = a + dt_bias[i % 2];
        let softplus = if x > 500.0 { x } else { x.exp().ln_1p() };
        let expected = -a_log[i % 2].exp() * softplus;
        assert!((g[i] - expected).abs() <= 1e-14 * expected.abs(), "g of {x}: {} {expected}", g[i]);
        assert!((beta[i] - 1.0 / (1.0 + (-b[i]).exp())).abs() < 1e-15);
    }
}

#[test]
fn backward_is_the_gradient() {
    // More rows than a partial sum has.
    let [b, a, a_log, dt_bias] = inputs(70, 3);
    let [dg, dbeta] = ["dg", "dbeta"].map(|name| normals(name, &[70, 3], DType::F64));
    let d = DeltaGates { g: dg, beta: dbeta };
    let loss = |of: [&Tensor; 4]| {
        let gates = gates_of(of);
        dot(&values(&gates.g), &values(&d.g)) + dot(&values(&gates.beta), &values(&d.beta))
    };
    let zeros = || Tensor::zeros(&Device::Cpu, &[3], DType::F64).unwrap();
    let (mut da_log, mut ddt_bias) = (zeros(), zeros());
    let input = GateInput { b: &b, a: &a, a_log: &a_log, dt_bias: &dt_bias };
    let of = delta_gates_backward(&d, input, &delta_gates(input).unwrap(), &mut da_log, &mut ddt_bias).unwrap();
    assert_gradient("b", &b, &of.b, |b| loss([b, &a, &a_log, &dt_bias]));
    assert_gradient("a", &a, &of.a, |a| loss([&b, a, &a_log, &dt_bias]));
    assert_gradient("a_log", &a_log, &da_log, |a_log| loss([&b, &a, a_log, &dt_bias]));
    assert_gradient("dt_bias", &dt_bias, &ddt_bias, |dt_bias| loss([&b, &a, &a_log, dt_bias]));
}

#[test]
fn misfits_are_errors() {
    let [b, a, a_log, _] = inputs(4, 3);
    let wrong = normals("dt_bias", &[2], DType::F64);
    assert!(delta_gates(GateInput { b: &b, a: &a, a_log: &a_log, dt_bias: &wrong }).is_err());
    let narrow = normals("dt_bias", &[3], DType::BF16);
    assert!(delta_gates(GateInput { b: &b, a: &a, a_log: &a_log, dt_bias: &narrow }).is_err());
}
