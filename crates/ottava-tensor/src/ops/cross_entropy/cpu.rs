use super::IGNORE_INDEX;
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use rayon::prelude::*;

/// `soft_cap · tanh(logit / soft_cap)`, or the logit without a cap.
fn capped<R: Real>(logit: R, soft_cap: Option<R>) -> R {
    soft_cap.map_or(logit, |cap| cap * (logit / cap).tanh())
}

pub(super) fn cap_logits(logits: &mut Tensor, soft_cap: f64) {
    with_float!(logits.dtype(), S => {
        let cap = Some(<S as Float>::Real::of(soft_cap));
        logits.host_mut::<S>().par_iter_mut().for_each(|logit| *logit = S::store(capped(logit.load(), cap)));
    });
}

pub(super) fn cross_entropy(logits: &Tensor, targets: &Tensor, soft_cap: Option<f64>, losses: &mut Tensor) {
    let vocabulary = logits.shape()[1];
    with_float!(logits.dtype(), S => {
        let cap = soft_cap.map(<S as Float>::Real::of);
        let rows = logits.host::<S>().par_chunks(vocabulary).zip(targets.host::<i32>());
        losses.host_mut::<<S as Float>::Real>().par_iter_mut().zip(rows).for_each(|(loss, (logits, &target))| {
            *loss = match target {
                IGNORE_INDEX => Default::default(),
                target => log_sum_exp(logits, cap) - capped(logits[target as usize].load(), cap),
            };
        });
    });
}

pub(super) fn cross_entropy_gradient(
    logits: &mut Tensor,
    targets: &Tensor,
    scale: &Tensor,
    soft_cap: Option<f64>,
    losses: &mut Tensor,
) {
    let vocabulary = logits.shape()[1];
    with_float!(logits.dtype(), S => {
        let (scale, cap) = (scale.host::<<S as Float>::Real>()[0], soft_cap.map(<S as Float>::Real::of));
        let rows = logits.host_mut::<S>().par_chunks_mut(vocabulary).zip(targets.host::<i32>());
        losses.host_mut::<<S as Float>::Real>().par_iter_mut().zip(rows).for_each(|(loss, (logits, &target))| {
            *loss = row_gradient(logits, target, scale, cap);
        });
    });
}

fn row_gradient<S: Float>(logits: &mut [S], target: i32, scale: S::Real, cap: Option<S::Real>) -> S::Real {
    if target == IGNORE_INDEX {
        logits.fill(S::store(S::Real::default()));
        return S::Real::default();
    }
    let (lse, target) = (log_sum_exp(logits, cap), target as usize);
    let loss = lse - capped(logits[target].load(), cap);
    for (v, logit) in logits.iter_mut().enumerate() {
        let onehot = S::Real::of(f64::from(v == target));
        let value = capped(logit.load(), cap);
        let gradient = ((value - lse).exp() - onehot) * scale;
        *logit = S::store(match cap {
            Some(cap) => gradient * (S::Real::of(1.0) - value / cap * (value / cap)),
            None => gradient,
        });
    }
    loss
}

fn log_sum_exp<S: Float>(logits: &[S], cap: Option<S::Real>) -> S::Real {
    // The comparison keeps NaN, on which the trainer stops.
    let values = logits.iter().map(|l| capped(l.load(), cap));
    let largest = values.clone().reduce(|a, b| if b > a { b } else { a }).expect("a vocabulary");
    // F64: a sum over a long vocabulary loses digits in F32.
    let sum: f64 = values.map(|value| (value - largest).exp().to_f64()).sum();
    largest + S::Real::of(sum).ln()
}
