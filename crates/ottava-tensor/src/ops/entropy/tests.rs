use super::*;
use crate::Device;
use crate::testing::{Tolerance, integers, normals, parity, values};

fn tensor(values: &[f64], shape: &[usize]) -> Tensor {
    Tensor::from_slice(&Device::Cpu, shape, values).unwrap()
}

fn like(logits: &Tensor, values: &[f64]) -> Tensor {
    let values = tensor(values, &[values.len()]);
    crate::ops::cast(&values, real_type(logits.dtype())).unwrap().to_device(logits.device()).unwrap()
}

/// Factors and weights of tokens, a scale and a coefficient, all different.
fn gradient(logits: &mut Tensor, vocabulary: usize, targets: &Tensor) -> Result<Tensor> {
    let tokens = logits.shape()[0];
    let each = |of: fn(usize) -> f64| like(logits, &(0..tokens).map(of).collect::<Vec<_>>());
    let (factors, weights) = (each(|t| [0.3, -0.8, 0.0][t % 3]), each(|t| [1.0, 0.5][t % 2]));
    let scale = like(logits, &[0.25]);
    let bonus = EntropyBonus { factors: &factors, weights: &weights, scale: &scale, coefficient: 0.6 };
    entropy_gradient(logits, vocabulary, targets, bonus)
}

#[test]
fn entropy_gradient_agrees_across_devices() {
    for (tokens, vocabulary) in [(1, 1), (3, 7), (5, 1001), (2, 50_257)] {
        for dtype in [DType::F32, DType::BF16] {
            let inputs = [normals("logits", &[tokens, vocabulary], dtype), integers("targets", tokens, vocabulary)];
            // The log-sum-exp and the entropy are sums in another order; elements of a gradient near 0 are differences.
            let tolerance = Tolerance::Steps(dtype, if dtype == DType::F32 { 4096.0 } else { 4.0 });
            parity(&inputs, tolerance, |x| {
                let mut logits = x[0].duplicate()?;
                let entropies = gradient(&mut logits, vocabulary, &x[1])?;
                Ok(vec![crate::ops::cast(&entropies, dtype)?, logits])
            });
        }
    }
}

/// Against central differences in F64 of the loss of the contract, with an ignored token and padding.
#[test]
fn gradients_are_those_of_cross_entropy_minus_entropy() {
    let (tokens, vocabulary, pitch) = (4, 5, 6);
    let start = values(&normals("logits", &[tokens, pitch], DType::F64));
    let targets = [1, IGNORE_INDEX, 4, 0];
    let loss = |logits: &[f64]| -> f64 {
        let of_token = |t: usize| {
            let row = &logits[t * pitch..][..vocabulary];
            let lse = row.iter().map(|logit| logit.exp()).sum::<f64>().ln();
            let entropy: f64 = row.iter().map(|logit| -(logit - lse).exp() * (logit - lse)).sum();
            let cross_entropy = lse - row[targets[t] as usize];
            [0.3, -0.8, 0.0][t % 3] * cross_entropy - 0.6 * 0.25 * [1.0, 0.5][t % 2] * entropy
        };
        (0..tokens).filter(|t| targets[*t] != IGNORE_INDEX).map(of_token).sum()
    };
    let mut logits = tensor(&start, &[tokens, pitch]);
    let targets = Tensor::from_slice(&Device::Cpu, &[tokens], &targets).unwrap();
    let entropies = values(&gradient(&mut logits, vocabulary, &targets).unwrap());
    assert!(entropies[1] == 0.0 && entropies[0] > 0.0, "{entropies:?}");
    for (i, found) in values(&logits).into_iter().enumerate() {
        if i % pitch >= vocabulary {
            assert_eq!(found, start[i], "padding");
            continue;
        }
        let moved = |by: f64| {
            let mut logits = start.clone();
            logits[i] += by;
            loss(&logits)
        };
        // A step of 1e-5 leaves 1e-10 of a third derivative of about 1.
        let difference = (moved(1e-5) - moved(-1e-5)) / 2e-5;
        assert!((found - difference).abs() < 1e-9, "element {i}: {found} and {difference}");
    }
}

/// A uniform distribution has the entropy ln V, a certain token has none, and probabilities that underflow leave the gradient finite.
#[test]
fn entropies_are_those_of_their_distributions() {
    let logits = [
        [2.0, 2.0, 2.0, 2.0],
        [0.0, -2000.0, -2000.0, -2000.0],
        [0.5f64.ln(), 0.25f64.ln(), 0.25f64.ln(), f64::NEG_INFINITY],
    ];
    let mut logits = tensor(&logits.concat(), &[3, 4]);
    let targets = Tensor::from_slice(&Device::Cpu, &[3], &[0, 0, 1]).unwrap();
    let entropies = values(&gradient(&mut logits, 4, &targets).unwrap());
    for (found, expected) in entropies.iter().zip([4f64.ln(), 0.0, 1.5 * 2f64.ln()]) {
        // Sums of four terms in F64.
        assert!((found - expected).abs() < 1e-12, "{found}, {expected}");
    }
    assert!(values(&logits).into_iter().all(f64::is_finite));
}

#[test]
fn shapes_and_constants_out_of_range_are_errors() {
    let mut logits = normals("logits", &[2, 5], DType::F32);
    let targets = Tensor::from_slice(&Device::Cpu, &[2], &[0, 1]).unwrap();
    let error = gradient(&mut logits, 6, &targets).unwrap_err().to_string();
    assert!(error.contains("a vocabulary of 6 in 5 columns"), "{error}");
    let (two, one) = (like(&logits, &[0.0; 2]), like(&logits, &[0.0]));
    let bonus = EntropyBonus { factors: &two, weights: &two, scale: &one, coefficient: f64::NAN };
    let error = entropy_gradient(&mut logits, 5, &targets, bonus).unwrap_err().to_string();
    assert!(error.contains("the coefficient is NaN"), "{error}");
    let error = entropy_gradient(&mut logits, 5, &targets, EntropyBonus { weights: &one, coefficient: 1.0, ..bonus });
    assert!(error.unwrap_err().to_string().contains("entropy_gradient: weights"));
}
