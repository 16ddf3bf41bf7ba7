use super::*;
use crate::testing::{Tolerance, assert_gradient, dot, normals, parity, values};
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
fn delta_gates_agree_across_devices() {
    for (tokens, heads) in [(1, 1), (7, 3), (70, 33), (300, 64)] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let matrix = |name, dtype| normals(name, &[tokens, heads], dtype);
            let vector = |name| normals(name, &[heads], DType::F32);
            let inputs = [
                matrix("b", dtype),
                matrix("a", dtype),
                vector("a_log"),
                vector("dt_bias"),
                matrix("dg", DType::F32),
                matrix("dbeta", DType::F32),
            ];
            let of = |t: &[Tensor]| -> Result<([Tensor; 4], [Tensor; 2])> {
                let input = GateInput { b: &t[0], a: &t[1], a_log: &t[2], dt_bias: &t[3] };
                let gates = delta_gates(input)?;
                let d = DeltaGates { g: t[4].duplicate()?, beta: t[5].duplicate()? };
                let zeros = || Tensor::zeros(t[0].device(), &[heads], DType::F32);
                let (mut da_log, mut ddt_bias) = (zeros()?, zeros()?);
                let gradient = delta_gates_backward(&d, input, &gates, &mut da_log, &mut ddt_bias)?;
                Ok(([gates.g, gates.beta, da_log, ddt_bias], [gradient.b, gradient.a]))
            };
            // The exponentials and logarithms of CPU and GPU differ in the last bits, and tokens are summed in another order.
            parity(&inputs, Tolerance::Steps(DType::F32, 64.0), |t| Ok(of(t)?.0.into()));
            // The difference of one and a sigmoid near one has few of the sigmoid's bits.
            let steps = if dtype == DType::F32 { 128.0 } else { 1.0 };
            parity(&inputs, Tolerance::Steps(dtype, steps), |t| Ok(of(t)?.1.into()));
        }
    }
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
