use super::*;
use crate::ops::{MomentumStep, WeightCopy, cast, scaled, split};
use crate::testing::{Tolerance, assert_close, normals, parity, values};
use crate::{Device, ScaledTensor};

const HOW: MomentumStep =
    MomentumStep { learning_rate: 0.02, beta1: 0.9, beta2: 0.99, step: 3, max_norm: 1.0, gradient_scale: 1.0 };

/// The storage format of weights.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Weights {
    /// F32 master weights, with a stored copy of this type.
    Master(Option<DType>),
    Scaled(Option<DType>),
    Split,
    Stochastic,
}

const WEIGHTS: [Weights; 8] = [
    Weights::Master(None),
    Weights::Master(Some(DType::F16)),
    Weights::Master(Some(DType::BF16)),
    Weights::Scaled(None),
    Weights::Scaled(Some(DType::F16)),
    Weights::Scaled(Some(DType::BF16)),
    Weights::Split,
    Weights::Stochastic,
];

/// Moves weights along a direction in two steps. Returns all stored tensors of the weights, and the amaxes.
fn steps(start: &Tensor, direction: &Tensor, norm: &Tensor, stored: Weights) -> Vec<Tensor> {
    let device = start.device();
    let mut master = start.duplicate().unwrap();
    let ScaledTensor { values, scale_inv } = scaled(start, DType::F16).unwrap();
    let mut half = ScaledTensor { values, scale_inv };
    let (mut upper, mut rest) = split(start).unwrap();
    let mut copy = match stored {
        Weights::Master(Some(dtype)) | Weights::Scaled(Some(dtype)) => cast(start, dtype).unwrap(),
        _ => cast(start, DType::BF16).unwrap(),
    };
    let mut amaxes = Tensor::zeros(device, &[2], DType::F32).unwrap();
    for step in 1..=2 {
        let mut scalars = MomentumScalars::new(device).unwrap();
        scalars.set(&MomentumStep { step, ..HOW }).unwrap();
        amaxes.fill_zero().unwrap();
        for pass in [descend_amax, descend] {
            let weight = match stored {
                Weights::Master(Some(_)) => {
                    UpdatedWeight::Master { master: &mut master, copy: WeightCopy::Stored(&mut copy) }
                }
                Weights::Master(None) => {
                    UpdatedWeight::Master { master: &mut master, copy: WeightCopy::OnDemand(DType::F32) }
                }
                Weights::Scaled(Some(_)) => {
                    UpdatedWeight::Scaled { master: &mut half, copy: WeightCopy::Stored(&mut copy) }
                }
                Weights::Scaled(None) => {
                    UpdatedWeight::Scaled { master: &mut half, copy: WeightCopy::OnDemand(DType::BF16) }
                }
                Weights::Split => UpdatedWeight::Split { weight: &mut upper, rest: &mut rest },
                Weights::Stochastic => UpdatedWeight::Stochastic { weight: &mut copy },
            };
            let amaxes = Some(&mut amaxes);
            let parameter = DescendParameter { weight, direction, weight_decay: 0.1, seed: 9, offset: 128, amaxes };
            pass(parameter, norm, &scalars).unwrap();
        }
    }
    vec![master, half.values, half.scale_inv, upper, rest, copy, amaxes]
}

fn inputs(n: usize, norm: f32) -> [Tensor; 3] {
    let direction = normals("direction", &[n], DType::BF16);
    [normals("weights", &[n], DType::F32), direction, Tensor::from_slice(&Device::Cpu, &[1], &[norm]).unwrap()]
}

#[test]
fn descend_agrees_across_devices() {
    for n in [1, 7, 257, 16_385, 70_003] {
        for stored in WEIGHTS {
            parity(&inputs(n, 2.0), Tolerance::Exact, |x| Ok(steps(&x[0], &x[1], &x[2], stored)));
        }
    }
}

/// Compares with the definition in F64. All 32-bit formats give the same master weights.
#[test]
fn descend_is_its_formula() {
    let [start, direction, norm] = inputs(300, 2.0);
    let master = steps(&start, &direction, &norm, Weights::Master(None)).swap_remove(0);
    for ((w, d), got) in values(&start).into_iter().zip(values(&direction)).zip(values(&master)) {
        let keep = 1.0 - 0.02 * 0.1;
        let expected = (w * keep - 0.02 * d) * keep - 0.02 * d;
        assert!(
            (got - expected).abs() <= 4.0 * DType::F32.epsilon() * expected.abs().max(w.abs()),
            "{got}, {expected}"
        );
    }
    let split_weights = steps(&start, &direction, &norm, Weights::Split);
    let (upper, rest) = split(&master).unwrap();
    assert_close("weight", &split_weights[3], &upper, Tolerance::Exact);
    assert_close("rest", &split_weights[4], &rest, Tolerance::Exact);
    let with_copy = steps(&start, &direction, &norm, Weights::Master(Some(DType::BF16)));
    assert_close("copy", &with_copy[5], &cast(&master, DType::BF16).unwrap(), Tolerance::Exact);
}

#[test]
fn scaled_weights_are_stored_with_the_scale_of_their_amax() {
    let [start, direction, norm] = inputs(3000, 2.0);
    let seen = steps(&start, &direction, &norm, Weights::Scaled(None));
    // The largest value reaches half of the largest finite value of F16, but no value is infinite.
    let largest = values(&seen[1]).into_iter().fold(0f64, |largest, x| largest.max(x.abs()));
    assert!((32_752.0..=65_504.0).contains(&largest), "{largest}");
    let amaxes = values(&seen[6]);
    assert_eq!(amaxes[1], 0.0, "that of the momentum");
    assert!((largest * values(&seen[2])[0] / amaxes[0] - 1.0).abs() < 1e-3, "{amaxes:?}");
}

#[test]
fn stochastic_rounding_keeps_the_mean() {
    let n = 50_000;
    let start = Tensor::from_slice(&Device::Cpu, &[n], &vec![1f32; n]).unwrap();
    let direction = cast(&start, DType::BF16).unwrap();
    let norm = Tensor::from_slice(&Device::Cpu, &[1], &[1f32]).unwrap();
    let seen = values(&steps(&start, &direction, &norm, Weights::Stochastic)[5]);
    let mean = seen.iter().sum::<f64>() / n as f64;
    let keep = 1.0 - 0.02 * 0.1;
    // Here a rounding step is 2^-8. The mean of 50,000 roundings is within five standard deviations.
    let expected = (keep - 0.02) * keep - 0.02;
    assert!((mean - expected).abs() < 5.0 * 2f64.powi(-9) / (n as f64).sqrt(), "{mean}, expected {expected}");
}

#[test]
fn a_norm_that_is_not_finite_changes_nothing() {
    for bad in [f32::NAN, f32::INFINITY] {
        for stored in WEIGHTS {
            parity(&inputs(300, bad), Tolerance::Exact, |x| {
                let seen = steps(&x[0], &x[1], &x[2], stored);
                assert_close("master", &seen[0], &x[0], Tolerance::Exact);
                assert_close("scaled", &seen[1], &scaled(&x[0], DType::F16)?.values, Tolerance::Exact);
                assert_close("upper", &seen[3], &split(&x[0])?.0, Tolerance::Exact);
                assert_close(
                    "copy",
                    &cast(&seen[5], DType::BF16)?,
                    &cast(&cast(&x[0], seen[5].dtype())?, DType::BF16)?,
                    Tolerance::Exact,
                );
                Ok(seen)
            });
        }
    }
}
