use super::{EntropyBonus, IGNORE_INDEX};
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use crate::ops::parallel_rows::ParallelRows;
use rayon::prelude::*;

pub(super) fn entropy_gradient(
    logits: &mut Tensor,
    vocabulary: usize,
    targets: &Tensor,
    EntropyBonus { factors, weights, scale, coefficient }: EntropyBonus,
    entropies: &mut Tensor,
) {
    let pitch = logits.shape()[1];
    with_float!(logits.dtype(), S => {
        type R<S> = <S as Float>::Real;
        let (factors, weights) = (factors.host::<R<S>>(), weights.host::<R<S>>());
        let bonus = R::<S>::of(coefficient) * scale.host::<R<S>>()[0];
        let rows = logits.host_mut::<S>().par_rows_mut(pitch).zip(targets.host::<i32>()).enumerate();
        entropies.host_mut::<R<S>>().par_iter_mut().zip(rows).for_each(|(entropy, (t, (row, &target)))| {
            let logits = &mut row[..vocabulary];
            *entropy = match target {
                IGNORE_INDEX => {
                    logits.fill(S::store(Default::default()));
                    Default::default()
                }
                target => replace(logits, target as usize, factors[t], bonus * weights[t]),
            };
        });
    });
}

/// Returns the entropy of a token, and replaces its logits by `factor · (p - onehot(target)) + bonus · p · (ln p + H)`.
fn replace<S: Float>(logits: &mut [S], target: usize, factor: S::Real, bonus: S::Real) -> S::Real {
    let values = || logits.iter().map(|logit| logit.load());
    // This comparison keeps NaN. The trainer stops on NaN.
    let largest = values().reduce(|a, b| if b > a { b } else { a }).expect("a vocabulary");
    // The sums are F64, because a sum over a long vocabulary loses digits in F32.
    let sum: f64 = values().map(|value| (value - largest).exp().to_f64()).sum();
    let lse = largest + S::Real::of(sum).ln();
    let weighted = |log: S::Real, by: S::Real| match log.exp() {
        p if p == S::Real::default() => p,
        p => p * by,
    };
    let entropy = S::Real::of(-values().map(|value| weighted(value - lse, value - lse).to_f64()).sum::<f64>());
    for (v, logit) in logits.iter_mut().enumerate() {
        let log = logit.load() - lse;
        let at_target = if v == target { S::Real::of(1.0) } else { S::Real::default() };
        *logit = S::store(factor * (log.exp() - at_target) + bonus * weighted(log, log + entropy));
    }
    entropy
}
