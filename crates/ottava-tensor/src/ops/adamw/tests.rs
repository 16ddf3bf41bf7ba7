use super::*;
use crate::testing::{Tolerance, normals, parity, values};

const HOW: AdamW =
    AdamW { learning_rate: 1e-3, beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, step: 1, max_norm: 1.0 };

fn steps(inputs: &[Tensor], count: u64, copy: DType) -> Result<Vec<Tensor>> {
    let device = inputs[0].device();
    let mut master = inputs[0].duplicate()?;
    let shape = master.shape().to_vec();
    let (mut m, mut v) = (Tensor::zeros(device, &shape, DType::F32)?, Tensor::zeros(device, &shape, DType::F32)?);
    let mut rounded = Tensor::zeros(device, &shape, copy)?;
    for step in 1..=count {
        let state = AdamWState { master: &mut master, m: &mut m, v: &mut v, copy: Some(&mut rounded) };
        adamw(state, &inputs[1], &inputs[2], &AdamW { step, ..HOW })?;
    }
    Ok(vec![master, m, v, rounded])
}

#[test]
fn adamw_agrees_across_devices() {
    let norm = Tensor::from_slice(&Device::Cpu, &[1], &[3.7f32]).unwrap();
    for n in [1, 257, 10_000] {
        for copy in [DType::BF16, DType::F16] {
            let inputs = [normals("w", &[n], DType::F32), normals("g", &[n], DType::F32), norm.clone()];
            parity(&inputs, Tolerance::Exact, |x| steps(x, 3, copy));
        }
    }
}

#[test]
fn ten_steps_follow_the_formula_in_f64() {
    let norm = Tensor::from_slice(&Device::Cpu, &[1], &[4f32]).unwrap();
    let inputs = [normals("w", &[50], DType::F32), normals("g", &[50], DType::F32), norm];
    let master = values(&steps(&inputs, 10, DType::BF16).unwrap()[0]);
    for ((mut w, g), got) in values(&inputs[0]).into_iter().zip(values(&inputs[1])).zip(master) {
        let g = g / (4.0 + 1e-6);
        let (mut m, mut v) = (0.0, 0.0);
        for t in 1..=10 {
            w -= HOW.learning_rate * HOW.weight_decay * w;
            m = HOW.beta1 * m + (1.0 - HOW.beta1) * g;
            v = HOW.beta2 * v + (1.0 - HOW.beta2) * g * g;
            let (m, v) = (m / (1.0 - HOW.beta1.powi(t)), v / (1.0 - HOW.beta2.powi(t)));
            w -= HOW.learning_rate * m / (v.sqrt() + HOW.epsilon);
        }
        assert!((w - got).abs() < 1e-5 * w.abs().max(1.0), "{w} in F64, {got} here");
    }
}

#[test]
fn a_norm_that_is_not_finite_writes_nothing() {
    for norm in [f32::NAN, f32::INFINITY] {
        let norm = Tensor::from_slice(&Device::Cpu, &[1], &[norm]).unwrap();
        let inputs = [normals("w", &[9], DType::F32), normals("g", &[9], DType::F32), norm];
        parity(&inputs, Tolerance::Exact, |x| {
            let after = steps(x, 1, DType::BF16)?;
            assert_eq!(values(&after[0]), values(&x[0]));
            assert!(values(&after[1]).iter().chain(&values(&after[2])).all(|&x| x == 0.0));
            Ok(after)
        });
    }
}
