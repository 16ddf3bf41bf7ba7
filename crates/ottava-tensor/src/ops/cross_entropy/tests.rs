use super::*;
use crate::testing::{Tolerance, integers, normals, parity, values};

/// A scale of the loss for these logits.
fn scale(logits: &Tensor, value: f64) -> Tensor {
    let value = Tensor::from_slice(&Device::Cpu, &[1], &[value]).unwrap();
    crate::ops::cast(&value, real_type(logits.dtype())).unwrap().to_device(logits.device()).unwrap()
}

#[test]
fn cross_entropy_agrees_across_devices() {
    for (t, v) in [(1, 2), (5, 7), (33, 1000), (9, 5003), (4, 20_000), (2, 32_000), (3, 151_936)] {
        for dtype in [DType::F32, DType::BF16] {
            let inputs = [normals("logits", &[t, v], dtype), integers("targets", t, v)];
            // Another order of sums and another exponential; the loss is F32 on both.
            let steps = if dtype == DType::F32 { 32.0 } else { 1.0 };
            parity(&inputs, Tolerance::Steps(dtype, steps), |x| {
                let mut gradient = x[0].duplicate()?;
                let losses = cross_entropy_gradient(&mut gradient, &x[1], &scale(&x[0], 0.25))?;
                Ok(vec![cross_entropy(&x[0], &x[1])?, losses, gradient])
            });
        }
    }
}

#[test]
fn equal_logits_give_the_log_of_the_vocabulary() {
    let mut logits = Tensor::zeros(&Device::Cpu, &[2, 5], DType::F64).unwrap();
    let targets = Tensor::from_slice(&Device::Cpu, &[2], &[3, IGNORE_INDEX]).unwrap();
    let ten = scale(&logits, 10.0);
    let losses = cross_entropy_gradient(&mut logits, &targets, &ten).unwrap();
    assert!((values(&losses)[0] - 5f64.ln()).abs() < 1e-12 && values(&losses)[1] == 0.0);
    let expected = [2.0, 2.0, 2.0, -8.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    for (got, expected) in values(&logits).iter().zip(expected) {
        assert!((got - expected).abs() < 1e-12, "{got} instead of {expected}");
    }
}

#[test]
fn ignored_targets_and_infinite_logits_match_the_cpu() {
    for v in [11, 16] {
        let mut logits = values(&normals("logits", &[4, v], DType::F32));
        logits[..8].fill(f64::NEG_INFINITY);
        logits[v..2 * v].fill(f64::NEG_INFINITY);
        let logits: Vec<f32> = logits.into_iter().map(|x| x as f32).collect();
        let logits = Tensor::from_slice(&Device::Cpu, &[4, v], &logits).unwrap();
        let targets = Tensor::from_slice(&Device::Cpu, &[4], &[9, 3, IGNORE_INDEX, 0]).unwrap();
        parity(&[logits, targets], Tolerance::Steps(DType::F32, 32.0), |x| {
            let mut gradient = x[0].duplicate()?;
            let losses = cross_entropy_gradient(&mut gradient, &x[1], &scale(&x[0], 0.25))?;
            assert!(values(&losses)[1].is_nan() && values(&losses)[2] == 0.0);
            Ok(vec![losses.rows(2, 4)?, gradient.rows(2, 4)?, gradient.rows(0, 1)?])
        });
    }
}

#[test]
fn a_nan_among_the_logits_reaches_the_loss() {
    let logits = Tensor::from_slice(&Device::Cpu, &[1, 3], &[1f32, f32::NAN, 2.0]).unwrap();
    let targets = Tensor::from_slice(&Device::Cpu, &[1], &[0]).unwrap();
    parity(&[logits.clone(), targets.clone()], Tolerance::Exact, |x| {
        assert!(values(&cross_entropy(&x[0], &x[1])?)[0].is_nan());
        Ok(vec![])
    });
}
