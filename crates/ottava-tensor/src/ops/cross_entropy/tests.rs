use super::*;
use crate::Device;
use crate::testing::{Tolerance, assert_close, integers, normals, parity, parity_of_values, values};

/// The tolerance of losses and gradients in F64. They sum a few exponentials and differ by some units of 2⁻⁵³ of values up to 10.
const ROUNDING: f64 = 1e-12;

/// Returns a scale of the loss for these logits.
fn scale(logits: &Tensor, value: f64) -> Tensor {
    let value = Tensor::from_slice(&Device::Cpu, &[1], &[value]).unwrap();
    crate::ops::cast(&value, real_type(logits.dtype())).unwrap().to_device(logits.device()).unwrap()
}

const PLAIN: CrossEntropy = CrossEntropy { soft_cap: None, label_smoothing: 0.0 };
const SMOOTHED: CrossEntropy = CrossEntropy { label_smoothing: 0.1, ..PLAIN };

const fn capped(soft_cap: f64) -> CrossEntropy {
    CrossEntropy { soft_cap: Some(soft_cap), ..PLAIN }
}

/// Returns the losses of logits without padding.
fn cross_entropy(logits: &Tensor, targets: &Tensor, how: CrossEntropy) -> Result<Tensor> {
    super::cross_entropy(logits, logits.shape()[1], targets, how)
}

/// Returns the losses of logits without padding, and replaces the logits by their gradient.
fn cross_entropy_gradient(logits: &mut Tensor, targets: &Tensor, scale: &Tensor, how: CrossEntropy) -> Result<Tensor> {
    let vocabulary = logits.shape()[1];
    super::cross_entropy_gradient(logits, vocabulary, targets, scale, how)
}

/// Losses have the same bits as without padding, and on a GPU also as without the gradient. The padding does not change.
#[test]
fn padding_is_neither_read_nor_written() {
    for (t, v, pitch) in [(5, 7, 9), (33, 1001, 1008), (3, 50_257, 50_304)] {
        for (dtype, how) in
            [(DType::F32, PLAIN), (DType::BF16, PLAIN), (DType::BF16, capped(1.0)), (DType::F32, SMOOTHED)]
        {
            let logits = normals("logits", &[t, v], dtype);
            let mut padded = vec![7.0; t * pitch];
            for (row, values) in padded.chunks_mut(pitch).zip(values(&logits).chunks(v)) {
                row[..v].copy_from_slice(values);
            }
            let padded = Tensor::from_slice(&Device::Cpu, &[t, pitch], &padded).unwrap();
            let padded = crate::ops::cast(&padded, dtype).unwrap();
            let steps = if dtype == DType::F32 { 32.0 } else { 1.0 };
            let inputs = [padded, logits, integers("targets", t, v)];
            parity_of_values(&inputs, Tolerance::Steps(dtype, steps), |x| {
                let (mut gradient, mut expected) = (x[0].duplicate()?, x[1].duplicate()?);
                let scale = &scale(&x[0], 0.25);
                let losses = super::cross_entropy_gradient(&mut gradient, v, &x[2], scale, how)?;
                let of_expected = cross_entropy_gradient(&mut expected, &x[2], scale, how)?;
                let loss = super::cross_entropy(&x[0], v, &x[2], how)?;
                assert_close("losses", &of_expected, &losses, Tolerance::Exact);
                assert_close("loss", &cross_entropy(&x[1], &x[2], how)?, &loss, Tolerance::Exact);
                if matches!(x[0].device(), Device::Cuda(_)) {
                    assert_close("loss without gradient", &losses, &loss, Tolerance::Exact);
                }
                for (row, expected) in values(&gradient).chunks(pitch).zip(values(&expected).chunks(v)) {
                    assert!(row[v..].iter().all(|padding| *padding == 7.0), "{:?}", &row[v..]);
                    let is_cpu = matches!(x[0].device(), Device::Cpu);
                    assert!(!is_cpu || row[..v] == *expected, "gradients of {v} tokens");
                }
                Ok(vec![loss, losses, gradient])
            });
        }
    }
    let logits = Tensor::zeros(&Device::Cpu, &[2, 8], DType::F32).unwrap();
    let error = super::cross_entropy(&logits, 9, &integers("targets", 2, 8), PLAIN).unwrap_err().to_string();
    assert!(error.contains("logits of 9 tokens in 8 columns"), "{error}");
}

#[test]
fn cross_entropy_agrees_across_devices() {
    for (t, v) in [(1, 2), (5, 7), (33, 1000), (9, 5003), (4, 20_000), (2, 32_000), (3, 151_936)] {
        for dtype in [DType::F32, DType::BF16] {
            let inputs = [normals("logits", &[t, v], dtype), integers("targets", t, v)];
            // Sums run in another order, and exponentials are approximate. The loss is F32 on both devices.
            let steps = if dtype == DType::F32 { 32.0 } else { 1.0 };
            for how in [PLAIN, SMOOTHED, CrossEntropy { label_smoothing: 0.2, ..capped(1.5) }] {
                parity(&inputs, Tolerance::Steps(dtype, steps), |x| {
                    let mut gradient = x[0].duplicate()?;
                    let losses = cross_entropy_gradient(&mut gradient, &x[1], &scale(&x[0], 0.25), how)?;
                    Ok(vec![cross_entropy(&x[0], &x[1], how)?, losses, gradient])
                });
            }
        }
    }
}

#[test]
fn equal_logits_give_the_log_of_the_vocabulary() {
    let mut logits = Tensor::zeros(&Device::Cpu, &[2, 5], DType::F64).unwrap();
    let targets = Tensor::from_slice(&Device::Cpu, &[2], &[3, IGNORE_INDEX]).unwrap();
    let ten = scale(&logits, 10.0);
    let losses = cross_entropy_gradient(&mut logits, &targets, &ten, PLAIN).unwrap();
    assert!((values(&losses)[0] - 5f64.ln()).abs() < ROUNDING && values(&losses)[1] == 0.0);
    let expected = [2.0, 2.0, 2.0, -8.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    for (got, expected) in values(&logits).iter().zip(expected) {
        assert!((got - expected).abs() < ROUNDING, "{got} instead of {expected}");
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
        parity_of_values(&[logits, targets], Tolerance::Steps(DType::F32, 32.0), |x| {
            let mut gradient = x[0].duplicate()?;
            let losses = cross_entropy_gradient(&mut gradient, &x[1], &scale(&x[0], 0.25), PLAIN)?;
            assert!(values(&losses)[1].is_nan() && values(&losses)[2] == 0.0);
            Ok(vec![losses.rows(2, 4)?, gradient.rows(2, 4)?, gradient.rows(0, 1)?])
        });
    }
}

#[test]
fn a_nan_among_the_logits_reaches_the_loss() {
    let logits = Tensor::from_slice(&Device::Cpu, &[1, 3], &[1f32, f32::NAN, 2.0]).unwrap();
    let targets = Tensor::from_slice(&Device::Cpu, &[1], &[0]).unwrap();
    parity_of_values(&[logits.clone(), targets.clone()], Tolerance::Exact, |x| {
        assert!(values(&cross_entropy(&x[0], &x[1], PLAIN)?)[0].is_nan());
        Ok(vec![])
    });
}

/// Many logits exceed the cap of 1, so the cap changes most logits considerably.
#[test]
fn capped_cross_entropy_agrees_across_devices() {
    for (t, v) in [(1, 2), (5, 7), (33, 1000), (9, 5003), (4, 20_000), (3, 151_936)] {
        for dtype in [DType::F32, DType::BF16] {
            let inputs = [normals("logits", &[t, v], dtype), integers("targets", t, v)];
            // The tolerance without a cap, and a few steps of F32 for the hyperbolic tangent.
            let steps = if dtype == DType::F32 { 64.0 } else { 1.0 };
            parity(&inputs, Tolerance::Steps(dtype, steps), |x| {
                let (mut gradient, mut bent) = (x[0].duplicate()?, x[0].duplicate()?);
                let losses = cross_entropy_gradient(&mut gradient, &x[1], &scale(&x[0], 0.25), capped(1.0))?;
                cap_logits(&mut bent, 1.0)?;
                Ok(vec![cross_entropy(&x[0], &x[1], capped(1.0))?, losses, gradient, bent])
            });
        }
    }
}

#[test]
fn the_loss_with_a_cap_is_that_of_capped_logits() {
    let (logits, targets) = (normals("logits", &[5, 7], DType::F64), integers("targets", 5, 7));
    let mut bent = logits.duplicate().unwrap();
    cap_logits(&mut bent, 0.7).unwrap();
    let at = |x: f64| 0.7 * (x / 0.7).tanh();
    // The test and the op compute one quotient, one `tanh` and one product of values below 0.7; up to one unit of 2⁻⁵³ was seen.
    assert!(values(&logits).into_iter().zip(values(&bent)).all(|(x, y)| (at(x) - y).abs() < 1e-15));
    let [direct, before] = [(&logits, capped(0.7)), (&bent, PLAIN)].map(|(x, how)| {
        let losses = cross_entropy(x, &targets, how).unwrap();
        values(&losses)
    });
    assert_eq!(direct, before);
}

/// Compares with central differences, with a scale that is not 1.
#[test]
fn the_gradient_with_a_cap_or_smoothing_is_that_of_the_loss() {
    for how in [capped(0.8), SMOOTHED, CrossEntropy { label_smoothing: 0.4, ..capped(0.8) }] {
        gradient_check(how);
    }
}

fn gradient_check(how: CrossEntropy) {
    let (t, v) = (3, 7);
    let (logits, targets) = (normals("logits", &[t, v], DType::F64), integers("targets", t, v));
    let mut gradient = logits.duplicate().unwrap();
    cross_entropy_gradient(&mut gradient, &targets, &scale(&logits, 1.7), how).unwrap();
    let start = values(&logits);
    let loss_at = |i: usize, moved: f64| -> f64 {
        let mut all = start.clone();
        all[i] += moved;
        let logits = Tensor::from_slice(&Device::Cpu, &[t, v], &all).unwrap();
        1.7 * values(&cross_entropy(&logits, &targets, how).unwrap()).iter().sum::<f64>()
    };
    for (i, gradient) in values(&gradient).into_iter().enumerate() {
        let difference = (loss_at(i, 1e-5) - loss_at(i, -1e-5)) / 2e-5;
        let error = (gradient - difference).abs();
        // The differences have two errors: 2e-11 times the third derivative, and 6e-12 from rounding the loss by 2⁻⁵³ (divided by 2e-5). Up to
        // 1.8e-10 was seen.
        assert!(error < 1e-9, "{how:?}: element {i} is {gradient}, differences make it {difference}");
    }
}

/// Compares with the mean loss in F64 that `LabelSmoother(epsilon=0.1)` of transformers computes from these logits.
#[test]
fn smoothed_losses_are_those_of_transformers() {
    let logits = [0.5, -1.0, 2.0, 0.25, 1.5, 0.0, -0.5, 3.0, 1.0, -2.0, 0.75, 0.125];
    let logits = Tensor::from_slice(&Device::Cpu, &[3, 4], &logits).unwrap();
    let targets = Tensor::from_slice(&Device::Cpu, &[3], &[0, IGNORE_INDEX, 3]).unwrap();
    let losses = values(&cross_entropy(&logits, &targets, SMOOTHED).unwrap());
    assert!(
        (losses.iter().sum::<f64>() / 2.0 - 1.787_529_943_796_604).abs() < ROUNDING && losses[1] == 0.0,
        "{losses:?}"
    );
}

#[test]
fn smoothing_that_is_no_share_is_an_error() {
    let (logits, targets) = (normals("logits", &[2, 3], DType::F32), integers("targets", 2, 3));
    for label_smoothing in [-0.1, 1.0, f64::NAN] {
        let error = cross_entropy(&logits, &targets, CrossEntropy { label_smoothing, ..PLAIN }).unwrap_err();
        assert!(error.to_string().contains("the label smoothing is"), "{error}");
    }
}

#[test]
fn a_cap_that_is_no_bound_is_an_error() {
    let mut logits = normals("logits", &[2, 3], DType::F32);
    for cap in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(cap_logits(&mut logits, cap).unwrap_err().to_string().contains("soft cap"), "{cap}");
    }
}

/// The merged losses and the gradients of the parts of a vocabulary equal the losses and gradients of the whole vocabulary.
#[test]
fn parts_of_a_vocabulary_have_the_losses_and_gradients_of_the_whole() {
    for (tokens, vocabulary, parts) in [(5, 6, 3), (33, 1000, 2), (9, 5002, 2), (40, 32_000, 4)] {
        for (dtype, how) in [
            (DType::F64, PLAIN),
            (DType::F32, PLAIN),
            (DType::F32, capped(2.0)),
            (DType::BF16, PLAIN),
            (DType::F64, CrossEntropy { label_smoothing: 0.3, ..capped(2.0) }),
            (DType::F32, SMOOTHED),
            (DType::BF16, SMOOTHED),
        ] {
            let mut targets = integers("targets", tokens, vocabulary).to_vec::<i32>().unwrap();
            targets[1] = IGNORE_INDEX;
            let targets = Tensor::from_slice(&Device::Cpu, &[tokens], &targets).unwrap();
            let inputs = [normals("logits", &[tokens, vocabulary], dtype), targets];
            let columns = vocabulary / parts;
            let place = |part: usize| VocabularyPart { first: part * columns, vocabulary };
            // The sums run in another order, and the exponentials of a GPU are approximate.
            let tolerance = Tolerance::Steps(dtype, if dtype == DType::BF16 { 1.0 } else { 64.0 });
            let compute = |x: &[Tensor]| {
                let device = x[0].device();
                let mut gradient = x[0].duplicate()?;
                let scale = scale(&x[0], 0.25);
                let losses = cross_entropy_gradient(&mut gradient, &x[1], &scale, how)?;
                let whole = values(&gradient);
                let part = |part: usize| {
                    let all = values(&x[0]);
                    let rows = all.chunks_exact(vocabulary).flat_map(|row| &row[part * columns..(part + 1) * columns]);
                    let rows: Vec<f64> = rows.copied().collect();
                    let part = Tensor::from_slice(&Device::Cpu, &[tokens, columns], &rows).unwrap();
                    crate::ops::cast(&part, dtype).unwrap().to_device(device).unwrap()
                };
                let mut partial = Tensor::zeros(device, &[parts, tokens, 2], real_type(dtype))?;
                for i in 0..parts {
                    partial.copy_from(i, &partial_losses(&part(i), &x[1], place(i), how)?.reshape(&[1, tokens, 2])?)?;
                }
                let (merged, lse) = merge_losses(&partial, &x[1])?;
                assert_close("losses", &losses, &merged, Tolerance::Steps(real_type(dtype), 64.0));
                for i in 0..parts {
                    let mut logits = part(i);
                    partial_gradient(&mut logits, &x[1], place(i), &lse, &scale, how)?;
                    let expected = whole.chunks_exact(vocabulary).flat_map(|row| &row[i * columns..(i + 1) * columns]);
                    let expected: Vec<f64> = expected.copied().collect();
                    let expected = Tensor::from_slice(&Device::Cpu, &[tokens, columns], &expected).unwrap();
                    assert_close("gradient", &crate::ops::cast(&expected, dtype)?, &logits, tolerance);
                }
                Ok(vec![merged, lse])
            };
            match dtype {
                DType::F64 => drop(compute(&inputs).unwrap()),
                _ => parity(&inputs, Tolerance::Steps(real_type(dtype), 64.0), compute),
            }
        }
    }
}

/// A factor per token scales the gradient of its row, for a whole vocabulary and for parts of a vocabulary.
#[test]
fn tokens_with_factors_of_their_own_have_the_gradients_of_single_rows() {
    let (t, v) = (5, 1003);
    let whole = VocabularyPart { first: 0, vocabulary: v };
    let weights: Vec<f32> = (0..t).map(|i| 0.5 - i as f32 * 0.3).collect();
    for (dtype, how) in [
        (DType::F32, PLAIN),
        (DType::F32, capped(1.0)),
        (DType::BF16, PLAIN),
        (DType::F32, SMOOTHED),
        (DType::F32, CrossEntropy { label_smoothing: 0.2, ..capped(1.0) }),
    ] {
        let weights = Tensor::from_slice(&Device::Cpu, &[t], &weights).unwrap();
        let inputs = [normals("logits", &[t, v], dtype), integers("targets", t, v), weights];
        let steps = if dtype == DType::F32 { 64.0 } else { 1.0 };
        parity(&inputs, Tolerance::Steps(dtype, steps), |x| {
            let [mut all, mut parts, mut single] = [x[0].duplicate()?, x[0].duplicate()?, x[0].duplicate()?];
            cross_entropy_gradient(&mut all, &x[1], &x[2], how)?;
            let partial = partial_losses(&x[0], &x[1], whole, how)?;
            let (_, lse) = merge_losses(&partial.reshape(&[1, t, 2])?, &x[1])?;
            partial_gradient(&mut parts, &x[1], whole, &lse, &x[2], how)?;
            for row in 0..t {
                let mut logits = x[0].rows(row, row + 1)?.duplicate()?;
                let (target, scale) = (x[1].rows(row, row + 1)?, x[2].rows(row, row + 1)?);
                cross_entropy_gradient(&mut logits, &target, &scale, how)?;
                single.copy_from(row, &logits)?;
            }
            assert_close("rows", &single, &all, Tolerance::Exact);
            assert_close("parts", &single, &parts, Tolerance::Steps(dtype, steps));
            Ok(vec![all])
        });
    }
    let mut logits = normals("logits", &[3, 4], DType::F32);
    let scale = Tensor::zeros(&Device::Cpu, &[2], DType::F32).unwrap();
    assert!(cross_entropy_gradient(&mut logits, &integers("targets", 3, 4), &scale, PLAIN).is_err());
}
