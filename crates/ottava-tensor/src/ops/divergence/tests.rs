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

/// The `k` likeliest tokens of these logits `[T, Q]` at a temperature, with their log-probabilities, and the rest of each distribution.
fn top(teacher: &Tensor, vocabulary: usize, k: usize, temperature: f64) -> (Tensor, Tensor, Tensor) {
    let (tokens, pitch) = (teacher.shape()[0], teacher.shape()[1]);
    let (mut ids, mut log_probs, mut rest) = (Vec::new(), Vec::new(), Vec::new());
    for row in values(teacher).chunks(pitch) {
        let powers: Vec<f64> = row[..vocabulary].iter().map(|logit| (logit / temperature).exp()).collect();
        let sum: f64 = powers.iter().sum();
        let mut order: Vec<usize> = (0..vocabulary).collect();
        order.sort_by(|&a, &b| powers[b].total_cmp(&powers[a]));
        ids.extend(order[..k].iter().map(|&id| id as i32));
        log_probs.extend(order[..k].iter().map(|&id| (powers[id] / sum).ln()));
        rest.push((order[k..].iter().map(|&id| powers[id]).sum::<f64>() / sum).ln());
    }
    let ids = Tensor::from_slice(&Device::Cpu, &[tokens, k], &ids).unwrap();
    (ids, tensor(&log_probs, &[tokens, k]), tensor(&rest, &[tokens]))
}

/// The divergences and the gradient of `student`'s logits from the `k` likeliest tokens of `teacher`.
fn of_top(student: &Tensor, teacher: &Tensor, vocabulary: usize, k: usize, how: Divergence) -> (Vec<f64>, Vec<f64>) {
    let (ids, log_probs, rest) = top(teacher, vocabulary, k, how.temperature);
    let teacher = TopLogProbs { ids: &ids, log_probs: &log_probs, rest: &rest };
    let targets = Tensor::from_slice(&Device::Cpu, &[3], &[1, IGNORE_INDEX, 4]).unwrap();
    let mut student = student.duplicate().unwrap();
    let scale = tensor(&[0.25], &[1]);
    let found = divergence_gradient_of_top(&mut student, teacher, vocabulary, &targets, &scale, how).unwrap();
    (values(&found), values(&student))
}

#[test]
fn divergences_of_top_agree_across_devices() {
    for (tokens, vocabulary, k) in [(1, 1, 1), (3, 7, 2), (5, 1001, 64), (2, 50_257, 513), (2, 600, 600)] {
        let teacher = normals("teacher", &[tokens, vocabulary], DType::F64);
        let (ids, log_probs, rest) = top(&teacher, vocabulary, k, 0.9);
        let as_f32 = |tensor: &Tensor| crate::ops::cast(tensor, DType::F32).unwrap();
        for dtype in [DType::F32, DType::BF16] {
            for beta in BETAS {
                let how = Divergence { beta, temperature: 0.9 };
                let inputs = [
                    normals("student", &[tokens, vocabulary], dtype),
                    ids.duplicate().unwrap(),
                    as_f32(&log_probs),
                    as_f32(&rest),
                    integers("targets", tokens, vocabulary),
                ];
                // As for whole distributions.
                let tolerance = Tolerance::Steps(dtype, if dtype == DType::F32 { 4096.0 } else { 4.0 });
                parity(&inputs, tolerance, |x| {
                    let mut gradient = x[0].duplicate()?;
                    let teacher = TopLogProbs { ids: &x[1], log_probs: &x[2], rest: &x[3] };
                    let found =
                        divergence_gradient_of_top(&mut gradient, teacher, vocabulary, &x[4], &scale(&x[0]), how)?;
                    Ok(vec![crate::ops::cast(&found, dtype)?, gradient])
                });
            }
        }
    }
}

/// Against central differences in F64: tokens of the last bucket, an ignored token and padding are among the elements.
#[test]
fn gradients_of_top_are_those_of_divergences() {
    let (vocabulary, pitch) = (7, 8);
    let start = values(&normals("student", &[3, pitch], DType::F64));
    let teacher = normals("teacher", &[3, 9], DType::F64);
    for (beta, k) in BETAS.into_iter().flat_map(|beta| [1, 3, 6, 7].map(|k| (beta, k))) {
        let at = |logits: &[f64]| {
            let how = Divergence { beta, temperature: 0.7 };
            of_top(&tensor(logits, &[3, pitch]), &teacher, vocabulary, k, how)
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
            assert!((found - difference).abs() < 1e-9, "beta {beta}, k {k}, element {i}: {found} and {difference}");
        }
    }
}

/// More tokens give a larger divergence, and all tokens the divergence and the gradient of the whole distributions.
#[test]
fn divergences_of_top_grow_to_the_divergence() {
    let vocabulary = 40;
    let (student, teacher) =
        (normals("student", &[3, vocabulary], DType::F64), normals("teacher", &[3, vocabulary], DType::F64));
    let targets = Tensor::from_slice(&Device::Cpu, &[3], &[1, IGNORE_INDEX, 4]).unwrap();
    for beta in BETAS {
        let how = Divergence { beta, temperature: 0.9 };
        let mut gradient = student.duplicate().unwrap();
        let scale = tensor(&[0.25], &[1]);
        let whole = divergence_gradient(&mut gradient, &teacher, vocabulary, &targets, &scale, how).unwrap();
        let by_k: Vec<f64> = [1, 4, 16, 39].map(|k| of_top(&student, &teacher, vocabulary, k, how).0[0]).into();
        let whole = values(&whole);
        assert!(by_k.windows(2).all(|pair| pair[0] < pair[1]) && by_k[3] <= whole[0] + 1e-12, "{by_k:?}, {whole:?}");
        let (all, of_all) = of_top(&student, &teacher, vocabulary, vocabulary, how);
        // Both compute in F64.
        assert!(all.iter().zip(&whole).all(|(a, b)| (a - b).abs() < 1e-12), "{beta}: {all:?}, {whole:?}");
        let apart = of_all.iter().zip(values(&gradient)).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(apart < 1e-12, "{beta}: {apart}");
    }
}

/// The definition, from probabilities: of two tokens, and of the others together.
#[test]
fn divergences_of_top_are_those_of_their_formulas() {
    let (student, teacher) = ([0.2f64, 0.1, 0.3, 0.4], [0.6f64, 0.1, 0.25, 0.05]);
    let buckets = |p: [f64; 4]| [p[0], p[2], p[1] + p[3]];
    let kl = |p: &[f64], q: &[f64]| -> f64 { p.iter().zip(q).map(|(p, q)| p * (p / q).ln()).sum() };
    let (s, t) = (buckets(student), buckets(teacher));
    for beta in BETAS {
        let mixture: Vec<f64> = s.iter().zip(&t).map(|(s, t)| beta * t + (1.0 - beta) * s).collect();
        let expected = match beta {
            0.0 => kl(&t, &s),
            1.0 => kl(&s, &t),
            beta => beta * kl(&t, &mixture) + (1.0 - beta) * kl(&s, &mixture),
        };
        let logits = |p: [f64; 4]| tensor(&[p; 3].concat().iter().map(|p| p.ln() + 3.0).collect::<Vec<_>>(), &[3, 4]);
        let found = of_top(&logits(student), &logits(teacher), 4, 2, Divergence { beta, temperature: 1.0 }).0;
        // Sums of three terms in F64.
        assert!((found[0] - expected).abs() < 1e-12, "{beta}: {found:?}, {expected}");
    }
}

#[test]
fn more_tokens_than_the_vocabulary_are_an_error() {
    let (mut student, targets) = (normals("student", &[2, 5], DType::F32), integers("targets", 2, 5));
    let ids = Tensor::zeros(&Device::Cpu, &[2, 6], DType::I32).unwrap();
    let (log_probs, rest) = (normals("log_probs", &[2, 6], DType::F32), normals("rest", &[2], DType::F32));
    let teacher = TopLogProbs { ids: &ids, log_probs: &log_probs, rest: &rest };
    let (scale, how) = (scale(&student), Divergence { beta: 0.5, temperature: 1.0 });
    let error = divergence_gradient_of_top(&mut student, teacher, 5, &targets, &scale, how).unwrap_err().to_string();
    assert!(error.contains("6 likeliest tokens of a vocabulary of 5"), "{error}");
}
