use super::*;
use crate::Device;
use crate::testing::{Tolerance, normals, parity, values};

const CLIP: PolicyBound = PolicyBound::Clip { low: 0.2, high: 0.28, most: f64::INFINITY };

/// Every bound and estimator, by tokens and by sequences.
fn every() -> Vec<PolicyLoss> {
    let dual = PolicyBound::Clip { low: 0.2, high: 0.2, most: 1.6 };
    let bounds = [CLIP, dual, PolicyBound::Weight { low: 1.0, high: 0.5 }, PolicyBound::None];
    let kls = [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3, KlEstimator::WeightedK3];
    let corrected = |of_sequence, is_mask| Some(Correction { of_sequence, is_mask, min: 0.5, max: 1.4 });
    let cases = [
        (false, 0.0, None),
        (false, 0.3, None),
        (true, 0.2, None),
        (false, 0.3, corrected(false, false)),
        (true, 0.0, corrected(false, true)),
        (false, 0.0, corrected(true, false)),
        (true, 0.2, corrected(true, true)),
    ];
    let all = bounds.into_iter().zip(kls).flat_map(|(bound, kl)| {
        cases.map(|(of_sequence, beta, correction)| PolicyLoss { bound, of_sequence, beta, kl, correction })
    });
    all.collect()
}

fn on(like: &Tensor, values: &[f64]) -> Tensor {
    let values = Tensor::from_slice(&Device::Cpu, &[values.len()], values).unwrap();
    crate::ops::cast(&values, like.dtype()).unwrap().to_device(like.device()).unwrap()
}

/// Three sequences of different lengths in so many tokens, and an empty one.
fn sequences(device: &Device, tokens: usize) -> Tensor {
    let starts = [0, tokens / 4, tokens / 4, tokens - 3, tokens].map(|at| at as i32);
    Tensor::from_slice(device, &[starts.len()], &starts).unwrap()
}

/// Targets of `losses` whose ratios are on both sides of all bounds; a few tokens are left out, by their target or their weight.
fn targets(losses: &Tensor) -> (Tensor, PolicyTargets) {
    let lp: Vec<f64> = values(losses).into_iter().map(|loss| -loss).collect();
    let each = |of: &dyn Fn(usize) -> f64| on(losses, &(0..lp.len()).map(of).collect::<Vec<_>>());
    let known = PolicyTargets {
        old: each(&|t| lp[t] + [0.1, -0.4, 0.5, -0.05, 0.9, -1.1][t % 6]),
        reference: each(&|t| lp[t] + [0.3, -0.6, 0.02][t % 3]),
        advantages: each(&|t| [1.3, 1.3, -0.7, 0.4, -1.9][t / 2 % 5]),
        corrections: each(&|t| [1.0, 0.5, 1.7][t % 3]),
        weights: each(&|t| if t % 7 == 3 { 0.0 } else { 0.5 + (t % 2) as f64 }),
        sequences: sequences(losses.device(), lp.len()),
    };
    let ids: Vec<i32> = (0..lp.len()).map(|t| if t % 5 == 4 { IGNORE_INDEX } else { t as i32 }).collect();
    (Tensor::from_slice(losses.device(), &[lp.len()], &ids).unwrap(), known)
}

#[test]
fn gpu_agrees_with_cpu() {
    for how in every() {
        // A unit of F32 for each of a few roundings of the result: all else runs in F64 on both.
        parity(&[normals("losses", &[24], DType::F32)], Tolerance::Steps(DType::F32, 4.0), |x| {
            let (ids, known) = targets(&x[0]);
            let (losses, factors) = policy_loss(&how, &x[0], &ids, &known, &on(&x[0], &[0.7]))?;
            Ok(vec![losses, factors])
        });
    }
}

#[test]
fn factors_are_the_gradient() {
    let losses = normals("losses", &[24], DType::F64);
    let (ids, known) = targets(&losses);
    for how in every() {
        let of = |losses: &Tensor| policy_loss(&how, losses, &ids, &known, &on(losses, &[0.7])).unwrap();
        let factors = values(&of(&losses).1);
        // A loss with a ratio that counts as constant has no gradient by differences.
        let is_constant = matches!(how.bound, PolicyBound::Weight { .. }) || how.correction.is_some();
        for t in (0..24).filter(|_| !is_constant) {
            let sum = |by: f64| {
                let mut moved = values(&losses);
                moved[t] += by;
                values(&of(&on(&losses, &moved)).0).iter().sum::<f64>()
            };
            let difference = 0.7 * (sum(1e-6) - sum(-1e-6)) / 2e-6;
            // A step of 1e-6 leaves 2^-53 / 1e-6 of a sum of a few units.
            assert!((factors[t] - difference).abs() < 1e-8, "{how:?}, token {t}: {}, {difference}", factors[t]);
        }
        assert!(
            factors.iter().enumerate().all(|(t, factor)| *factor == 0.0 || (t % 5 != 4 && t % 7 != 3)),
            "{factors:?}"
        );
    }
}

/// On the policy that drew, the loss of a token is minus its advantage, and the gradient is the one of `-A · lp` for each bound.
#[test]
fn on_policy_all_bounds_have_the_gradient_of_reinforce() {
    let losses = normals("losses", &[12], DType::F64);
    let (ids, known) = targets(&losses);
    let old: Vec<f64> = values(&losses).into_iter().map(|loss| -loss).collect();
    let known = PolicyTargets { old: on(&losses, &old), ..known };
    let factors = |bound| {
        let how = PolicyLoss { bound, of_sequence: false, beta: 0.0, kl: KlEstimator::K3, correction: None };
        values(&policy_loss(&how, &losses, &ids, &known, &on(&losses, &[1.0])).unwrap().1)
    };
    let plain = factors(PolicyBound::None);
    assert!(plain.iter().any(|factor| *factor != 0.0));
    for bound in [CLIP, PolicyBound::Weight { low: 1.0, high: 4.0 }] {
        let apart = factors(bound).iter().zip(&plain).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        // `e^0` is 1 exactly; three factors below 4 are multiplied in another order.
        assert!(apart < 1e-14, "{bound:?}: {apart:e}");
    }
}

/// With a correction, the step computes what it computes from given factors, if the policy of the draw is the policy of the step.
#[test]
fn a_corrected_loss_is_the_loss_with_given_factors() {
    let losses = normals("losses", &[24], DType::F64);
    let (ids, known) = targets(&losses);
    let (lp, drawn) = (on(&losses, &values(&losses).iter().map(|loss| -loss).collect::<Vec<_>>()), values(&known.old));
    let counts = |t: usize| values(&known.weights)[t] != 0.0 && ids.host::<i32>()[t] != IGNORE_INDEX;
    let mut seen = std::collections::BTreeSet::new();
    for how in every() {
        let Some(correction) = how.correction else { continue };
        let mut factors = vec![1.0; 24];
        for ends in known.sequences.host::<i32>().windows(2) {
            let tokens = || (ends[0] as usize..ends[1] as usize).filter(|&t| counts(t));
            let log = |t: usize| values(&lp)[t] - drawn[t];
            let of_all: f64 = tokens().map(log).sum();
            for t in tokens() {
                let ratio = if correction.of_sequence { of_all } else { log(t) }.exp();
                factors[t] = match (correction.is_mask, ratio < 0.5, ratio > 1.4) {
                    (false, _, true) => 1.4,
                    (true, true, _) | (true, _, true) => 0.0,
                    _ => ratio,
                };
                seen.insert((correction.is_mask, ratio < 0.5, ratio > 1.4));
            }
        }
        let given = PolicyTargets { old: lp.clone(), corrections: on(&losses, &factors), ..known.clone() };
        let plain = PolicyLoss { correction: None, ..how };
        let of = |how, known| policy_loss(how, &losses, &ids, known, &on(&losses, &[0.7])).unwrap();
        let ((corrected, slopes), (expected, expected_slopes)) = (of(&how, &known), of(&plain, &given));
        assert_eq!(values(&corrected), values(&expected), "{how:?}");
        assert_eq!(values(&slopes), values(&expected_slopes), "{how:?}");
    }
    assert_eq!(seen.len(), 6, "ratios within and beyond both bounds: {seen:?}");
}

/// Sequences beside each other have the losses and factors of each sequence alone.
#[test]
fn sequences_do_not_read_each_other() {
    let losses = normals("losses", &[24], DType::F64);
    let (ids, known) = targets(&losses);
    let scale = on(&losses, &[0.7]);
    let starts = known.sequences.host::<i32>().to_vec();
    for how in every() {
        let (together, factors) = policy_loss(&how, &losses, &ids, &known, &scale).unwrap();
        for ends in starts.windows(2).filter(|ends| ends[0] < ends[1]) {
            let [start, end] = [ends[0], ends[1]].map(|at| at as usize);
            let part = |of: &Tensor| on(&losses, &values(of)[start..end]);
            let ids = Tensor::from_slice(&Device::Cpu, &[end - start], &ids.host::<i32>()[start..end]).unwrap();
            let alone = PolicyTargets {
                old: part(&known.old),
                reference: part(&known.reference),
                advantages: part(&known.advantages),
                corrections: part(&known.corrections),
                weights: part(&known.weights),
                sequences: Tensor::from_slice(&Device::Cpu, &[2], &[0, (end - start) as i32]).unwrap(),
            };
            let (own, own_factors) = policy_loss(&how, &part(&losses), &ids, &alone, &scale).unwrap();
            assert_eq!(values(&own), values(&together)[start..end], "{how:?}, {start}");
            assert_eq!(values(&own_factors), values(&factors)[start..end], "{how:?}, {start}");
        }
    }
}

#[test]
fn far_ratios_stay_finite_and_no_sequence_is_an_error() {
    let losses = on(&normals("losses", &[1], DType::F64), &[1e6, -1e6, 0.0, 3.0]);
    let zeros = || on(&losses, &[0.0; 4]);
    let ones = on(&losses, &[1.0, -1.0, 1.0, -1.0]);
    let weights = on(&losses, &[1.0; 4]);
    let offsets = |starts: &[i32]| Tensor::from_slice(&Device::Cpu, &[starts.len()], starts).unwrap();
    let known = PolicyTargets {
        old: zeros(),
        reference: zeros(),
        advantages: ones,
        corrections: weights.clone(),
        weights,
        sequences: offsets(&[0, 2, 4]),
    };
    let ids = Tensor::from_slice(&Device::Cpu, &[4], &[1i32; 4]).unwrap();
    for how in every() {
        let (losses, factors) = policy_loss(&how, &losses, &ids, &known, &on(&losses, &[1.0])).unwrap();
        assert!(values(&losses).into_iter().chain(values(&factors)).all(f64::is_finite), "{how:?}");
    }
    let none = PolicyTargets { sequences: offsets(&[0]), ..known };
    let error = policy_loss(&every()[0], &losses, &ids, &none, &on(&losses, &[1.0])).unwrap_err();
    assert!(error.to_string().contains("1 offsets are no sequence"), "{error}");
}
