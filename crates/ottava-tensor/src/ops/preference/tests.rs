use super::*;
use crate::Device;
use crate::testing::{Tolerance, normals, parity, values};

/// The tolerance of losses in F64. They are logarithms and exponentials of a few terms and differ by some units of 2⁻⁵³ of values near 1.
const ROUNDING: f64 = 1e-12;

/// The losses of pairs. The last losses read all pairs of a call.
const PAIRS: [PreferenceLoss; 21] = [
    PreferenceLoss::Sigmoid { label_smoothing: 0.0 },
    PreferenceLoss::Sigmoid { label_smoothing: 0.1 },
    PreferenceLoss::Robust { label_smoothing: 0.2 },
    PreferenceLoss::Hinge,
    PreferenceLoss::Ipo,
    PreferenceLoss::BradleyTerry { centering: 0.3 },
    PreferenceLoss::SigmoidNorm,
    PreferenceLoss::ExoPair { label_smoothing: 0.01 },
    PreferenceLoss::NcaPair,
    PreferenceLoss::BcoPair,
    PreferenceLoss::SppoHard,
    PreferenceLoss::ApoZero,
    PreferenceLoss::ApoDown,
    PreferenceLoss::Discopop { tau: 0.5 },
    PreferenceLoss::Aot { label_smoothing: 0.1 },
    PreferenceLoss::AotUnpaired { label_smoothing: 0.0 },
    PreferenceLoss::Aot { label_smoothing: 0.0 },
    PreferenceLoss::Sft,
    PreferenceLoss::Simpo { gamma: 0.6, label_smoothing: 0.0 },
    PreferenceLoss::Simpo { gamma: 0.6, label_smoothing: 0.1 },
    PreferenceLoss::OddsRatio,
];

const LABELS: [PreferenceLoss; 2] = [
    PreferenceLoss::Kto { desirable_weight: 1.5, undesirable_weight: 0.5 },
    PreferenceLoss::ApoZeroUnpaired { desirable_weight: 1.5, undesirable_weight: 0.5 },
];

fn every() -> impl Iterator<Item = PreferenceLoss> {
    PAIRS.into_iter().chain(LABELS)
}

/// Computes a single loss.
fn preference_loss(
    loss: PreferenceLoss,
    beta: f64,
    policy: &Tensor,
    targets: &PreferenceTargets,
    scale: &Tensor,
    tokens: usize,
) -> Result<(Tensor, Tensor)> {
    super::preference_loss(&[PreferenceTerm { loss, weight: 1.0 }], beta, policy, targets, scale, tokens)
}

/// Returns log-probabilities near the log-probabilities of the reference, where the loss is sensitive.
fn inputs(sequences: usize, dtype: DType) -> [Tensor; 2] {
    [normals("policy", &[sequences], dtype), normals("reference", &[sequences], dtype)]
}

fn targets(like: &Tensor, reference: &Tensor) -> PreferenceTargets {
    let tensor = |values: Vec<f64>| {
        let values = Tensor::from_slice(&Device::Cpu, &[values.len()], &values).unwrap();
        crate::ops::cast(&values, like.dtype()).unwrap().to_device(like.device()).unwrap()
    };
    let each = |of: &dyn Fn(usize) -> f64| tensor((0..like.len()).map(of).collect());
    let (lengths, labels) = (each(&|s| 3.0 + s as f64), each(&|s| f64::from(s % 3 == 0)));
    PreferenceTargets { reference: reference.clone(), lengths, labels, kl: tensor(vec![0.3]) }
}

fn one(like: &Tensor) -> Tensor {
    let one = Tensor::from_slice(&Device::Cpu, &[1], &[0.25]).unwrap();
    crate::ops::cast(&one, like.dtype()).unwrap().to_device(like.device()).unwrap()
}

#[test]
fn preference_losses_agree_across_devices() {
    for (sequences, tokens) in [(2, 1), (6, 7), (10, 257), (64, 33)] {
        for loss in every() {
            // Exponentials and logarithms differ by a few steps. If a loss is a difference of terms, it differs by more.
            let is_difference = matches!(loss, PreferenceLoss::ExoPair { .. } | PreferenceLoss::Discopop { .. });
            let steps = if is_difference { 256.0 } else { 32.0 };
            parity(&inputs(sequences, DType::F32), Tolerance::Steps(DType::F32, steps), |x| {
                let (losses, factors) =
                    preference_loss(loss, 0.5, &x[0], &targets(&x[0], &x[1]), &one(&x[0]), sequences * tokens)?;
                Ok(vec![losses, factors])
            });
        }
    }
}

/// The sum is double on both devices, in another order, and is rounded once.
#[test]
fn log_probabilities_of_sequences_agree_across_devices() {
    for (sequences, tokens) in [(1, 1), (3, 7), (2, 257), (5, 4099)] {
        let losses = [normals("losses", &[sequences * tokens], DType::F32)];
        parity(&losses, Tolerance::Steps(DType::F32, 1.0), |x| Ok(vec![sequence_log_probs(&x[0], sequences)?]));
    }
}

/// Compares with central differences, with a scale that is not 1.
#[test]
fn factors_are_the_gradient_of_the_loss() {
    let sequences = 6;
    let [policy, reference] = inputs(sequences, DType::F64);
    for loss in every() {
        // Odds need log-probabilities below 0.
        let below = if loss == PreferenceLoss::OddsRatio { 20.0 } else { 0.0 };
        let start: Vec<f64> = values(&policy).into_iter().map(|value| value - below).collect();
        let at = |policy: &[f64]| {
            let policy = Tensor::from_slice(&Device::Cpu, &[sequences], policy).unwrap();
            preference_loss(loss, 0.7, &policy, &targets(&policy, &reference), &one(&policy), 2 * sequences).unwrap()
        };
        let total = |s: usize, moved: f64| -> f64 {
            let mut all = start.clone();
            all[s] += moved;
            0.25 * values(&at(&all).0).iter().sum::<f64>()
        };
        for (token, factor) in values(&at(&start).1).into_iter().enumerate() {
            let s = token / 2;
            // The loss of a token is its negative log-probability.
            let difference = -(total(s, 1e-5) - total(s, -1e-5)) / 2e-5;
            assert!((factor - difference).abs() < 1e-9, "{loss:?}, token {token}: {factor} and {difference}");
        }
    }
}

#[test]
fn a_policy_that_is_the_reference_loses_ln_2() {
    let [policy, _] = inputs(2, DType::F64);
    let found =
        |loss| values(&preference_loss(loss, 0.1, &policy, &targets(&policy, &policy), &one(&policy), 2).unwrap().0);
    let near = |losses: Vec<f64>, expected: [f64; 2]| {
        assert!(losses.iter().zip(expected).all(|(a, b)| (a - b).abs() < ROUNDING), "{losses:?} and {expected:?}");
    };
    near(found(PAIRS[0]), [2f64.ln(), 0.0]);
    near(found(PAIRS[1]), [2f64.ln(), 0.0]);
    near(found(PreferenceLoss::Hinge), [1.0, 0.0]);
    near(found(PreferenceLoss::Ipo), [25.0, 0.0]);
    let both: f64 = values(&policy).iter().sum();
    near(found(PreferenceLoss::BradleyTerry { centering: 0.3 }), [2f64.ln() + 0.3 * both * both, 0.0]);
    // Values far from 0 do not overflow.
    let far = Tensor::from_slice(&Device::Cpu, &[2], &[-1e6, 1e6]).unwrap();
    for loss in every() {
        let (losses, factors) = preference_loss(loss, 0.1, &far, &targets(&far, &policy), &one(&policy), 2).unwrap();
        assert!(values(&losses).into_iter().chain(values(&factors)).all(f64::is_finite), "{loss:?}");
    }
    let (losses, factors) = preference_loss(PAIRS[0], 0.1, &far, &targets(&far, &policy), &one(&policy), 2).unwrap();
    assert!((values(&losses)[0] - 2e5).abs() < 1.0, "{:?}", values(&losses));
    assert!(values(&factors).iter().all(|factor| (factor.abs() - 0.025).abs() < ROUNDING));
}

#[test]
fn sequences_of_unequal_length_are_an_error() {
    let [policy, reference] = inputs(3, DType::F32);
    let odd = preference_loss(PAIRS[0], 0.1, &policy, &targets(&policy, &reference), &one(&policy), 6);
    assert!(odd.unwrap_err().to_string().contains("a loss has 2 sequences"));
    assert!(sequence_log_probs(&policy, 2).unwrap_err().to_string().contains("3 losses cannot be divided into 2"));
}

/// A weighted sum has the weighted losses and factors of its terms, on every device.
#[test]
fn a_weighted_sum_adds_losses_and_factors() {
    let terms = [(PAIRS[1], 0.8), (PreferenceLoss::BcoPair, 0.2), (PreferenceLoss::Sft, 1.5)];
    let terms = terms.map(|(loss, weight)| PreferenceTerm { loss, weight });
    parity(&inputs(6, DType::F32), Tolerance::Steps(DType::F32, 64.0), |x| {
        let targets = targets(&x[0], &x[1]);
        let (losses, factors) = super::preference_loss(&terms, 0.5, &x[0], &targets, &one(&x[0]), 18)?;
        let mut sums = [vec![0.0; 6], vec![0.0; 18]];
        for PreferenceTerm { loss, weight } in terms {
            let (losses, factors) = preference_loss(loss, 0.5, &x[0], &targets, &one(&x[0]), 18)?;
            for (sum, found) in sums.iter_mut().zip([losses, factors]) {
                sum.iter_mut().zip(values(&found)).for_each(|(sum, found)| *sum += weight * found);
            }
        }
        for (sum, found) in sums.iter().zip([&losses, &factors]) {
            // Three terms in F32 are rounded by 2⁻²⁴ each, and again when they are added; up to 4e-8 was seen on the CPU.
            let near = |(a, b): (&f64, f64)| (a - b).abs() < 1e-5;
            assert!(sum.iter().zip(values(found)).all(near), "{sum:?} and {:?}", values(found));
        }
        Ok(vec![losses, factors])
    });
    let [policy, reference] = inputs(2, DType::F32);
    let mixed = [PAIRS[0], LABELS[0]].map(|loss| PreferenceTerm { loss, weight: 1.0 });
    for terms in [&mixed[..], &[]] {
        let error = super::preference_loss(terms, 0.1, &policy, &targets(&policy, &reference), &one(&policy), 2);
        assert!(error.unwrap_err().to_string().contains("no losses of sequences of one kind"));
    }
}

/// The margins of AOT are matched by rank, so the order of the reference's pairs does not matter.
#[test]
fn ranked_losses_do_not_depend_on_the_order_of_the_other_side() {
    let tensor = |values: &[f64]| Tensor::from_slice(&Device::Cpu, &[values.len()], values).unwrap();
    let policy = tensor(&[-1.0, -3.0, -5.0, -4.5, -2.0, -2.0]);
    let loss = |reference: &[f64]| {
        let (losses, factors) =
            preference_loss(PAIRS[14], 0.5, &policy, &targets(&policy, &tensor(reference)), &one(&policy), 6).unwrap();
        [values(&losses), values(&factors)]
    };
    let all = loss(&[-1.0, -4.0, -3.0, -1.0, -2.0, -2.5]);
    assert_eq!(all, loss(&[-2.0, -2.5, -1.0, -4.0, -3.0, -1.0]));
    // The margins 2, -0.5 and 0 of the policy are matched with 3, -2 and 0.5 of the reference.
    let expected = |margin: f64| 0.9 * (1.0 + (-0.5 * margin).exp()).ln() + 0.1 * (1.0 + (0.5 * margin).exp()).ln();
    for (pair, margin) in [2.0 - 3.0, -0.5 + 2.0, 0.0 - 0.5].into_iter().enumerate() {
        assert!((all[0][2 * pair] - expected(margin)).abs() < ROUNDING, "{:?}", all[0]);
    }
}
