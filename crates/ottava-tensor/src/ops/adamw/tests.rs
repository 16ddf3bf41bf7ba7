use super::*;
use crate::ops::cast;
use crate::testing::{Tolerance, normals, parity, values};

const HOW: AdamW = AdamW { learning_rate: 1e-3, beta1: 0.9, beta2: 0.95, epsilon: 1e-8, step: 1, max_norm: 1.0 };

/// How the tensors of a parameter are stored; `None` for the weight means by chance.
#[derive(Clone, Copy)]
struct Stored {
    copy: Option<DType>,
    m: DType,
    v: DType,
    grad: DType,
}

const PLAIN: Stored = Stored { copy: Some(DType::BF16), m: DType::F32, v: DType::F32, grad: DType::F32 };

/// `count` updates of parameters with the weights and gradients in `inputs`, by turns, and the norm at the end.
fn steps(inputs: &[Tensor], count: u64, stored: Stored) -> Result<Vec<Tensor>> {
    let (norm, pairs) = inputs.split_last().expect("a norm");
    let device = norm.device();
    let mut tensors = Vec::new();
    for pair in pairs.chunks(2) {
        let shape = pair[0].shape();
        let zeros = |dtype| Tensor::zeros(device, shape, dtype);
        let weight = match stored.copy {
            Some(copy) => [pair[0].duplicate()?, zeros(copy)?],
            None => [zeros(DType::F32)?, cast(&pair[0], DType::BF16)?],
        };
        tensors.push((weight, zeros(stored.m)?, zeros(stored.v)?, cast(&pair[1], stored.grad)?));
    }
    for step in 1..=count {
        let mut parameters = Vec::new();
        for (i, (weight, m, v, grad)) in tensors.iter_mut().enumerate() {
            let [master, copy] = weight;
            let weight = match stored.copy {
                Some(_) => AdamWWeight::Master { master, copy: (i % 3 != 1).then_some(copy) },
                None => AdamWWeight::Stochastic { weight: copy, seed: i as u64 },
            };
            parameters.push(AdamWParameter { weight, m, v, grad, weight_decay: if i % 2 == 0 { 0.1 } else { 0.0 } });
        }
        adamw(&mut parameters, norm, &AdamW { step, ..HOW })?;
    }
    Ok(tensors.into_iter().flat_map(|([master, copy], m, v, _)| [master, m, v, copy]).collect())
}

fn inputs(sizes: &[usize], norm: f32) -> Vec<Tensor> {
    let pair = |&n: &usize| [normals("w", &[n], DType::F32), normals("g", &[n], DType::F32)];
    let norm = Tensor::from_slice(&Device::Cpu, &[1], &[norm]).unwrap();
    sizes.iter().flat_map(pair).chain([norm]).collect()
}

#[test]
fn adamw_agrees_across_devices() {
    for copy in [Some(DType::BF16), Some(DType::F16), None] {
        for m in [DType::F32, DType::BF16] {
            for (v, grad) in [DType::F32, DType::BF16].into_iter().flat_map(|v| [(v, DType::F32), (v, DType::BF16)]) {
                let inputs = inputs(&[1, 257, 10_000, 16_384, 16_385, 40_003], 3.7);
                parity(&inputs, Tolerance::Exact, |x| steps(x, 3, Stored { copy, m, v, grad }));
            }
        }
    }
}

#[test]
fn more_parameters_than_one_launch_takes() {
    let sizes: Vec<usize> = (0..130).map(|i| i * i % 97).collect();
    parity(&inputs(&sizes, 0.5), Tolerance::Exact, |x| steps(x, 2, PLAIN));
}

#[test]
fn chance_rounds_to_a_neighbour_and_on_average_not_at_all() {
    // A third of the way from 1 to the next BF16, reached in one step from 1 by decay alone.
    let n = 30_000;
    let mut weight = cast(&Tensor::from_slice(&Device::Cpu, &[n], &vec![1f32; n]).unwrap(), DType::BF16).unwrap();
    let zeros = || Tensor::zeros(&Device::Cpu, &[n], DType::F32).unwrap();
    let (mut m, mut v, grad) = (zeros(), zeros(), zeros());
    let weight_decay = -1.0 / 3.0 / 128.0 / HOW.learning_rate;
    let norm = Tensor::from_slice(&Device::Cpu, &[1], &[1f32]).unwrap();
    let parameter = AdamWParameter {
        weight: AdamWWeight::Stochastic { weight: &mut weight, seed: 1 },
        m: &mut m,
        v: &mut v,
        grad: &grad,
        weight_decay,
    };
    adamw(&mut [parameter], &norm, &HOW).unwrap();
    let up = values(&weight).iter().filter(|&&w| w == 1.0 + 1.0 / 128.0).count();
    assert!(values(&weight).iter().all(|&w| w == 1.0 || w == 1.0 + 1.0 / 128.0));
    // Four standard deviations.
    assert!((up as f64 / n as f64 - 1.0 / 3.0).abs() < 4.0 * (2.0 / 9.0 / n as f64).sqrt(), "{up} of {n}");
}

#[test]
fn ten_steps_follow_the_formula_in_f64() {
    let inputs = inputs(&[50], 4.0);
    let master = values(&steps(&inputs, 10, PLAIN).unwrap()[0]);
    for ((mut w, g), got) in values(&inputs[0]).into_iter().zip(values(&inputs[1])).zip(master) {
        let g = g / (4.0 + 1e-6);
        let (mut m, mut v) = (0.0, 0.0);
        for t in 1..=10 {
            w -= HOW.learning_rate * 0.1 * w;
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
        parity(&inputs(&[9], norm), Tolerance::Exact, |x| {
            let after = steps(x, 1, PLAIN)?;
            assert_eq!(values(&after[0]), values(&x[0]));
            assert!(values(&after[1]).iter().chain(&values(&after[2])).all(|&x| x == 0.0));
            Ok(after)
        });
    }
}
