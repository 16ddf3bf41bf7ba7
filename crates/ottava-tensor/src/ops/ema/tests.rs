use super::*;
use crate::ops::{WeightCopy, cast, scaled, split};
use crate::testing::{Tolerance, normals, parity, values};
use crate::{Device, ScaledTensor};

/// Averages the weights `start` in each storage format: first with a share of 1, then of three quarters after the weights were negated.
fn averages(start: &Tensor, norm: f32) -> Vec<Tensor> {
    let device = start.device();
    let one = |value: f32| Tensor::from_slice(device, &[1], &[value]).unwrap();
    let mut found = Vec::new();
    for format in 0..4 {
        let mut average = Tensor::zeros(device, start.shape(), DType::F32).unwrap();
        for (sign, share) in [(1.0, 1.0), (-1.0, 0.75), (1.0, 0.0)] {
            let signed: Vec<f32> = start.to_vec::<f32>().unwrap().into_iter().map(|x| sign * x).collect();
            let mut full = Tensor::from_slice(device, start.shape(), &signed).unwrap();
            let ScaledTensor { values, scale_inv } = scaled(&full, DType::F16).unwrap();
            let mut half = ScaledTensor { values, scale_inv };
            let (mut upper, mut rest) = split(&full).unwrap();
            let mut narrow = cast(&full, DType::BF16).unwrap();
            let copy = WeightCopy::OnDemand(DType::BF16);
            let weight = match format {
                0 => UpdatedWeight::Master { master: &mut full, copy },
                1 => UpdatedWeight::Scaled { master: &mut half, copy },
                2 => UpdatedWeight::Split { weight: &mut upper, rest: &mut rest },
                _ => UpdatedWeight::Stochastic { weight: &mut narrow },
            };
            ema(&mut average, weight, &one(share), &one(norm)).unwrap();
        }
        found.push(average);
    }
    found
}

#[test]
fn ema_agrees_across_devices() {
    for shape in [&[1][..], &[7, 11], &[129, 64]] {
        parity(&[normals("weights", shape, DType::F32)], Tolerance::Exact, |x| Ok(averages(&x[0], 1.0)));
    }
}

#[test]
fn averages_move_towards_the_weights_unless_the_norm_is_not_finite() {
    let start = Tensor::from_slice(&Device::Cpu, &[3], &[1.0f32, -2.0, 0.5]).unwrap();
    for average in averages(&start, 1.0) {
        // From w to w + 0.75 · (-w - w).
        assert_eq!(values(&average), [-0.5, 1.0, -0.25]);
    }
    for average in averages(&start, f32::NAN) {
        assert_eq!(values(&average), [0.0; 3]);
    }
}
