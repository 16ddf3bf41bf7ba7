use super::IGNORE_INDEX;
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use rayon::prelude::*;

pub(super) fn cross_entropy(logits: &Tensor, targets: &Tensor, losses: &mut Tensor) {
    let vocabulary = logits.shape()[1];
    with_float!(logits.dtype(), S => {
        let rows = logits.host::<S>().par_chunks(vocabulary).zip(targets.host::<i32>());
        losses.host_mut::<<S as Float>::Real>().par_iter_mut().zip(rows).for_each(|(loss, (logits, &target))| {
            *loss = match target {
                IGNORE_INDEX => Default::default(),
                target => log_sum_exp(logits) - logits[target as usize].load(),
            };
        });
    });
}

pub(super) fn cross_entropy_gradient(logits: &mut Tensor, targets: &Tensor, scale: &Tensor, losses: &mut Tensor) {
    let vocabulary = logits.shape()[1];
    with_float!(logits.dtype(), S => {
        let scale = scale.host::<<S as Float>::Real>()[0];
        let rows = logits.host_mut::<S>().par_chunks_mut(vocabulary).zip(targets.host::<i32>());
        losses.host_mut::<<S as Float>::Real>().par_iter_mut().zip(rows).for_each(|(loss, (logits, &target))| {
            *loss = row_gradient(logits, target, scale);
        });
    });
}

fn row_gradient<S: Float>(logits: &mut [S], target: i32, scale: S::Real) -> S::Real {
    if target == IGNORE_INDEX {
        logits.fill(S::store(S::Real::default()));
        return S::Real::default();
    }
    let (lse, target) = (log_sum_exp(logits), target as usize);
    let loss = lse - logits[target].load();
    for (v, logit) in logits.iter_mut().enumerate() {
        let onehot = S::Real::of(f64::from(v == target));
        *logit = S::store(((logit.load() - lse).exp() - onehot) * scale);
    }
    loss
}

fn log_sum_exp<S: Float>(logits: &[S]) -> S::Real {
    // The comparison keeps NaN, on which the trainer stops.
    let largest = logits.iter().map(|l| l.load()).reduce(|a, b| if b > a { b } else { a }).expect("a vocabulary");
    // F64: a sum over a long vocabulary loses digits in F32.
    let sum: f64 = logits.iter().map(|l| (l.load() - largest).exp().to_f64()).sum();
    largest + S::Real::of(sum).ln()
}
