use super::*;
use crate::Device;
use crate::ops::IGNORE_INDEX;
use crate::testing::{Tolerance, integers, normals, parity, values};

const BETAS: [f64; 4] = [0.0, 0.3, 0.5, 1.0];

fn tensor(values: &[f64], shape: &[usize]) -> Tensor {
    Tensor::from_slice(&Device::Cpu, shape, values).unwrap()
}

/// A scale of the loss for these logits.
fn scale(logits: &Tensor) -> Tensor {
    crate::ops::cast(&tensor(&[0.25], &[1]), real_type(logits.dtype())).unwrap().to_device(logits.device()).unwrap()
}

#[test]
fn divergences_agree_across_devices() {
    for (tokens, vocabulary, of_teacher) in [(1, 1, 1), (3, 7, 8), (5, 1001, 1001), (2, 50_257, 50_304)] {
        for dtype in [DType::F32, DType::BF16] {
            for beta in BETAS {
                let how = Divergence { beta, temperature: 0.9 };
                let inputs = [
                    normals("student", &[tokens, vocabulary], dtype),
                    normals("teacher", &[tokens, of_teacher], dtype),
                    integers("targets", tokens, vocabulary),
                ];
                // A divergence is a sum of differences, and the sum runs in another order; elements of a gradient near 0 are such differences too.
                let tolerance = Tolerance::Steps(dtype, if dtype == DType::F32 { 4096.0 } else { 4.0 });
                parity(&inputs, tolerance, |x| {
                    let mut gradient = x[0].duplicate()?;
                    let found = divergence_gradient(&mut gradient, &x[1], vocabulary, &x[2], &scale(&x[0]), how)?;
                    Ok(vec![crate::ops::cast(&found, dtype)?, gradient])
                });
            }
        }
    }
}

/// Against central differences in F64, with a scale that is not 1, an ignored token and padding.
#[test]
fn gradients_are_those_of_divergences() {
    let (tokens, vocabulary, pitch) = (3, 5, 6);
    let start = values(&normals("student", &[tokens, pitch], DType::F64));
    let teacher = normals("teacher", &[tokens, 7], DType::F64);
    let targets = Tensor::from_slice(&Device::Cpu, &[tokens], &[1, IGNORE_INDEX, 4]).unwrap();
    for beta in BETAS {
        for temperature in [1.0, 0.7] {
            let at = |logits: &[f64]| {
                let mut student = tensor(logits, &[tokens, pitch]);
                let (scale, how) = (tensor(&[0.25], &[1]), Divergence { beta, temperature });
                let found = divergence_gradient(&mut student, &teacher, vocabulary, &targets, &scale, how).unwrap();
                (values(&found), values(&student))
            };
            let (divergences, gradient) = at(&start);
            assert!(divergences[1] == 0.0 && divergences[0] > 0.0, "{divergences:?}");
            for (i, found) in gradient.into_iter().enumerate() {
                if i % pitch >= vocabulary {
                    assert_eq!(found, start[i], "padding");
                    continue;
                }
                let moved = |by: f64| -> f64 {
                    let mut logits = start.clone();
                    logits[i] += by;
                    0.25 * at(&logits).0.iter().sum::<f64>()
                };
                let difference = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                assert!((found - difference).abs() < 1e-9, "beta {beta}, element {i}: {found} and {difference}");
            }
        }
    }
}

/// The definition, from probabilities.
#[test]
fn divergences_are_those_of_their_formulas() {
    let (student, teacher) = ([0.2f64, 0.5, 0.3], [0.6f64, 0.1, 0.3]);
    let kl = |p: &[f64], q: &[f64]| -> f64 { p.iter().zip(q).map(|(p, q)| p * (p / q).ln()).sum() };
    let logits = |p: [f64; 3]| tensor(&p.map(|p| p.ln() + 3.0), &[1, 3]);
    let target = Tensor::from_slice(&Device::Cpu, &[1], &[0]).unwrap();
    let found = |student: [f64; 3], teacher: [f64; 3], beta| {
        let how = Divergence { beta, temperature: 1.0 };
        let mut student = logits(student);
        let found = divergence_gradient(&mut student, &logits(teacher), 3, &target, &tensor(&[1.0], &[1]), how);
        (values(&found.unwrap())[0], values(&student))
    };
    for beta in BETAS {
        let mixture: Vec<f64> = student.iter().zip(&teacher).map(|(s, t)| beta * t + (1.0 - beta) * s).collect();
        let expected = match beta {
            0.0 => kl(&teacher, &student),
            1.0 => kl(&student, &teacher),
            beta => beta * kl(&teacher, &mixture) + (1.0 - beta) * kl(&student, &mixture),
        };
        // Sums of three terms in F64.
        assert!((found(student, teacher, beta).0 - expected).abs() < 1e-12, "{beta}");
        let (divergence, gradient) = found(student, student, beta);
        assert!(divergence.abs() < 1e-12 && gradient.iter().all(|g| g.abs() < 1e-12), "{divergence}, {gradient:?}");
        // A token that one of them never draws: the forward divergence is finite only if it is the teacher.
        let (divergence, gradient) = found(student, [0.7, 0.0, 0.3], if beta == 1.0 { 0.9 } else { beta });
        assert!(divergence.is_finite() && gradient.iter().all(|g| g.is_finite()), "{beta}: {divergence}, {gradient:?}");
    }
}

#[test]
fn shapes_and_constants_out_of_range_are_errors() {
    let logits = || normals("logits", &[2, 5], DType::F32);
    let targets = Tensor::from_slice(&Device::Cpu, &[2], &[0, 1]).unwrap();
    let error = |vocabulary, beta, temperature| {
        let (mut student, scale) = (logits(), scale(&logits()));
        let how = Divergence { beta, temperature };
        divergence_gradient(&mut student, &logits(), vocabulary, &targets, &scale, how).unwrap_err().to_string()
    };
    assert!(error(6, 0.5, 1.0).contains("a vocabulary of 6 in 5 columns"));
    assert!(error(5, 1.5, 1.0).contains("beta is 1.5"));
    assert!(error(5, 0.5, 0.0).contains("the temperature 0"));
}
