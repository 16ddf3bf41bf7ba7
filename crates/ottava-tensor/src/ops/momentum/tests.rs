use super::*;
use crate::MemoryKind;
use crate::ops::{scaled, unscaled};
use crate::testing::{Tolerance, assert_close, normals, parity, values};

const HOW: MomentumStep =
    MomentumStep { learning_rate: 1e-3, beta1: 0.9, beta2: 0.99, step: 3, max_norm: 1.0, gradient_scale: 2.0 };

/// The storage format of the momentum.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stored {
    Plain(DType),
    Scaled,
    Expanded,
}

const STORED: [Stored; 4] = [Stored::Plain(DType::F32), Stored::Plain(DType::BF16), Stored::Scaled, Stored::Expanded];

fn zeros(device: &Device, shape: &[usize], stored: Stored) -> Momentum {
    match stored {
        Stored::Plain(dtype) => Momentum::Plain(Tensor::zeros(device, shape, dtype).unwrap()),
        Stored::Scaled => {
            Momentum::Scaled(ScaledTensor::zeros(device, shape, DType::E4M3, MemoryKind::Device).unwrap())
        }
        Stored::Expanded => Momentum::Expanded(ExpandedTensor::zeros(device, shape, MemoryKind::Device).unwrap()),
    }
}

fn tensors(momentum: &Momentum) -> Vec<Tensor> {
    match momentum {
        Momentum::Plain(m) => vec![m.clone()],
        Momentum::Scaled(m) => vec![m.values.clone(), m.scale_inv.clone()],
        Momentum::Expanded(m) => vec![m.codes.clone(), m.groups.clone()],
    }
}

/// Does `count` updates with the same gradient. Returns four results of the last update: the directions of both passes, the amaxes and the momentum.
fn steps(grad: Gradient, stored: Stored, rule: Direction, norm: &Tensor, count: u64) -> Vec<Tensor> {
    let (device, shape) = (norm.device(), grad.values().shape());
    let mut state = zeros(device, shape, stored);
    let mut seen = Vec::new();
    for step in 1..=count {
        // Drops the tensors of earlier steps, which are views of the momentum.
        seen.clear();
        let mut scalars = MomentumScalars::new(device).unwrap();
        scalars.set(&MomentumStep { step, ..HOW }).unwrap();
        let mut amaxes = Tensor::zeros(device, &[2], DType::F32).unwrap();
        let mut directions = [(); 2].map(|()| Tensor::zeros(device, shape, DType::BF16).unwrap());
        for (pass, direction) in [momentum_amax, momentum].into_iter().zip(&mut directions) {
            let amaxes = Some(&mut amaxes);
            let parameter = MomentumParameter { momentum: &mut state, grad, direction, seed: 7, offset: 256, amaxes };
            pass(parameter, rule, norm, &scalars).unwrap();
        }
        seen = directions.into_iter().chain([amaxes]).chain(tensors(&state)).collect();
    }
    seen
}

fn norm(value: f32) -> Tensor {
    Tensor::from_slice(&Device::Cpu, &[1], &[value]).unwrap()
}

const SHAPES: [[usize; 2]; 5] = [[1, 1], [1, 16_385], [3, 129], [5, 7], [2, 33_000]];

#[test]
fn momentum_agrees_across_devices() {
    for shape in SHAPES {
        let inputs = [normals("g", &shape, DType::F32), norm(3.7)];
        for stored in STORED {
            for rule in [Direction::Nesterov, Direction::Sign] {
                for dtype in [DType::F32, DType::BF16, DType::E4M3] {
                    parity(&inputs, Tolerance::Exact, |x| match dtype {
                        DType::E4M3 => Ok(steps(Gradient::Scaled(&scaled(&x[0], dtype)?), stored, rule, &x[1], 3)),
                        _ => Ok(steps(Gradient::Plain(&crate::ops::cast(&x[0], dtype)?), stored, rule, &x[1], 3)),
                    });
                }
            }
        }
    }
}

/// Compares with the definition in F64, without rounding of the stored momentum.
#[test]
fn momentum_is_its_formula() {
    let grad = normals("g", &[300], DType::F32);
    let clip = 1.0 / (3.0 / 2.0 + 1e-6) / 2.0;
    for rule in [Direction::Nesterov, Direction::Sign] {
        let seen = steps(Gradient::Plain(&grad), Stored::Plain(DType::F32), rule, &norm(3.0), 2);
        let [direction, m] = [&seen[1], &seen[3]].map(values);
        for (i, g) in values(&grad).into_iter().map(|g| g * clip).enumerate() {
            let before = 0.01 * g;
            let after = before + (g - before) * 0.01;
            let expected = match rule {
                Direction::Nesterov => after + (g - after) * 0.1,
                Direction::Sign => (before + (g - before) * 0.1).signum(),
            };
            assert!((m[i] - after).abs() <= 1e-6 * after.abs(), "{rule:?}: m[{i}] is {}, not {after}", m[i]);
            // The direction is rounded once, to BF16.
            let apart = (direction[i] - expected).abs();
            assert!(apart <= DType::BF16.epsilon() * expected.abs(), "{rule:?}: {} is not {expected}", direction[i]);
        }
    }
}

#[test]
fn the_sign_of_zero_is_zero() {
    let grad = Tensor::from_slice(&Device::Cpu, &[3], &[0.0f32, -0.0, -1e-30]).unwrap();
    let seen = steps(Gradient::Plain(&grad), Stored::Plain(DType::F32), Direction::Sign, &norm(0.5), 1);
    assert_eq!(values(&seen[1]), [0.0, 0.0, -1.0]);
}

/// The pass for the amax computes the same direction, and the amax bounds the stored momentum.
#[test]
fn the_first_pass_finds_the_amax_and_changes_nothing_else() {
    let grad = normals("g", &[2, 300], DType::F32);
    for rule in [Direction::Nesterov, Direction::Sign] {
        let seen = steps(Gradient::Plain(&grad), Stored::Scaled, rule, &norm(2.0), 3);
        assert_close("direction", &seen[0], &seen[1], Tolerance::Exact);
        let stored = ScaledTensor { values: seen[3].clone(), scale_inv: seen[4].clone() };
        let largest = values(&unscaled(&stored, DType::F32).unwrap()).into_iter().fold(0f64, |a, x| a.max(x.abs()));
        let amaxes = values(&seen[2]);
        assert_eq!(amaxes[0], 0.0, "that of the weights");
        // A cast to E4M3 moves the largest value by at most half a step, which is 1/16 of the value.
        assert!((largest / amaxes[1] - 1.0).abs() < 0.07, "{largest} is not {} in E4M3", amaxes[1]);
    }
}

/// Every element of a slice has the same bits as in the whole parameter.
#[test]
fn slices_have_the_bits_of_the_whole() {
    let grad = normals("g", &[1024], DType::F32);
    for (dtype, first) in [(DType::F32, 256), (DType::BF16, 384)] {
        let run = |grad: &Tensor, offset: usize| {
            let mut state = zeros(grad.device(), grad.shape(), Stored::Plain(dtype));
            let mut direction = Tensor::zeros(grad.device(), grad.shape(), DType::BF16).unwrap();
            let mut scalars = MomentumScalars::new(grad.device()).unwrap();
            scalars.set(&HOW).unwrap();
            let (momentum, grad, direction) = (&mut state, Gradient::Plain(grad), &mut direction);
            let parameter = MomentumParameter { momentum, grad, direction, seed: 7, offset, amaxes: None };
            super::momentum(parameter, Direction::Nesterov, &norm(2.0), &scalars).unwrap();
            tensors(&state).remove(0)
        };
        let whole = run(&grad, 0);
        for (start, end) in [(0, first), (first, 1024)] {
            let part = run(&grad.rows(start, end).unwrap().duplicate().unwrap(), start);
            assert_close("slice", &part, &whole.rows(start, end).unwrap(), Tolerance::Exact);
        }
    }
}

#[test]
fn a_norm_that_is_not_finite_changes_nothing() {
    for bad in [f32::NAN, f32::INFINITY] {
        let inputs = [normals("g", &[3, 128], DType::F32), norm(bad)];
        for stored in STORED {
            parity(&inputs, Tolerance::Exact, |x| {
                let seen = steps(Gradient::Plain(&x[0]), stored, Direction::Nesterov, &x[1], 1);
                let unchanged = tensors(&zeros(x[0].device(), x[0].shape(), stored));
                assert!(seen[..3].iter().flat_map(values).all(|value| value == 0.0), "{stored:?}");
                seen[3..].iter().zip(unchanged).for_each(|(m, zero)| assert_close("m", m, &zero, Tolerance::Exact));
                Ok(seen)
            });
        }
    }
}

#[test]
fn a_scaled_momentum_needs_amaxes() {
    let grad = normals("g", &[256], DType::F32);
    let mut state = zeros(&Device::Cpu, &[256], Stored::Scaled);
    let mut direction = Tensor::zeros(&Device::Cpu, &[256], DType::BF16).unwrap();
    let scalars = MomentumScalars::new(&Device::Cpu).unwrap();
    let parameter = MomentumParameter {
        momentum: &mut state,
        grad: Gradient::Plain(&grad),
        direction: &mut direction,
        seed: 0,
        offset: 0,
        amaxes: None,
    };
    let error = momentum(parameter, Direction::Sign, &norm(1.0), &scalars).unwrap_err().to_string();
    assert_eq!(error, "momentum: a tensor with one scale has no amax to compute it from");
}
