use super::{CrossEntropy, IGNORE_INDEX, VocabularyPart};
use crate::element::{Float, Real, with_float};
use crate::ops::parallel_rows::{ParallelRows, TASK};
use crate::wide::wide;
use crate::{DType, Tensor};
use rayon::prelude::*;

/// Returns `soft_cap · tanh(logit / soft_cap)`, or the logit without a cap.
fn capped<R: Real>(logit: R, soft_cap: Option<R>) -> R {
    soft_cap.map_or(logit, |cap| cap * (logit / cap).tanh())
}

pub(super) fn cap_logits(logits: &mut Tensor, soft_cap: f64) {
    with_float!(logits.dtype(), S => {
        let cap = Some(<S as Float>::Real::of(soft_cap));
        logits.host_mut::<S>().par_iter_mut().with_min_len(TASK).for_each(|logit| *logit = S::store(capped(logit.load(), cap)));
    });
}

/// The fields of [`CrossEntropy`] in the type of sums.
#[derive(Clone, Copy)]
struct Terms<R> {
    cap: Option<R>,
    /// The weight of the target's logit in the loss.
    on_target: R,
    /// The weight of every logit in the loss.
    on_all: R,
}

impl<R: Real> Terms<R> {
    fn new(how: CrossEntropy, vocabulary: usize) -> Terms<R> {
        let [on_target, on_all] = how.weights(vocabulary).map(R::of);
        Terms { cap: how.soft_cap.map(R::of), on_target, on_all }
    }

    /// Returns the sum of `logits` times their weights in the loss. `target` is the column of the target, if these logits include the target.
    fn weighted<S: Float<Real = R>>(self, logits: &[S], target: Option<usize>) -> R {
        let at_target = target.map_or_else(R::default, |target| capped(logits[target].load(), self.cap));
        if self.on_all == R::default() {
            return at_target;
        }
        let sum: f64 = logits.iter().map(|logit| capped(logit.load(), self.cap).to_f64()).sum();
        self.on_target * at_target + self.on_all * R::of(sum)
    }
}

pub(super) fn cross_entropy(
    logits: &Tensor,
    vocabulary: usize,
    targets: &Tensor,
    how: CrossEntropy,
    losses: &mut Tensor,
) {
    let pitch = logits.shape()[1];
    with_float!(logits.dtype(), S => {
        let terms = Terms::<<S as Float>::Real>::new(how, vocabulary);
        let rows = logits.host::<S>().par_rows(pitch).zip(targets.host::<i32>());
        losses.host_mut::<<S as Float>::Real>().par_iter_mut().zip(rows).for_each(|(loss, (row, &target))| {
            let logits = &row[..vocabulary];
            *loss = match target {
                IGNORE_INDEX => Default::default(),
                target => log_sum_exp(logits, terms.cap) - terms.weighted(logits, Some(target as usize)),
            };
        });
    });
}

pub(super) fn cross_entropy_gradient(
    logits: &mut Tensor,
    vocabulary: usize,
    targets: &Tensor,
    scale: &Tensor,
    how: CrossEntropy,
    losses: &mut Tensor,
) {
    let pitch = logits.shape()[1];
    with_float!(logits.dtype(), S => {
        let (scale, terms) = (scale.host::<<S as Float>::Real>(), Terms::new(how, vocabulary));
        let rows = logits.host_mut::<S>().par_rows_mut(pitch).zip(targets.host::<i32>()).enumerate();
        losses.host_mut::<<S as Float>::Real>().par_iter_mut().zip(rows).for_each(|(loss, (t, (row, &target)))| {
            *loss = row_gradient(&mut row[..vocabulary], target, of_token(scale, t), terms);
        });
    });
}

/// Returns the scale of a token. `scale` has one element for all tokens, or one per token.
fn of_token<R: Real>(scale: &[R], token: usize) -> R {
    if scale.len() == 1 { scale[0] } else { scale[token] }
}

fn row_gradient<S: Float>(logits: &mut [S], target: i32, scale: S::Real, terms: Terms<S::Real>) -> S::Real {
    if target == IGNORE_INDEX {
        logits.fill(S::store(S::Real::default()));
        return S::Real::default();
    }
    let (lse, target) = (log_sum_exp(logits, terms.cap), target as usize);
    let loss = lse - terms.weighted(logits, Some(target));
    replace_by_gradient(logits, Some(target), lse, scale, terms);
    loss
}

/// Replaces logits by `scale · (e^(logit - lse) - on_target · onehot(target) - on_all)`, times the slope of the cap.
fn replace_by_gradient<S: Float>(
    logits: &mut [S],
    target: Option<usize>,
    lse: S::Real,
    scale: S::Real,
    Terms { cap, on_target, on_all }: Terms<S::Real>,
) {
    let one = S::Real::of(1.0);
    let slope = |value| cap.map(|cap| one - value / cap * (value / cap));
    let at_target = target.map(|target| {
        let value = capped(logits[target].load(), cap);
        let gradient = ((value - lse).exp() - on_target - on_all) * scale;
        (target, S::store(slope(value).map_or(gradient, |slope| gradient * slope)))
    });
    match cap {
        None => softmax_gradient(logits, lse, on_all, scale),
        Some(_) => logits.iter_mut().for_each(|logit| {
            let value = capped(logit.load(), cap);
            let gradient = ((value - lse).exp() - on_all) * scale;
            *logit = S::store(slope(value).map_or(gradient, |slope| gradient * slope));
        }),
    }
    if let Some((target, gradient)) = at_target {
        logits[target] = gradient;
    }
}

wide! {
    /// Replaces logits by `scale · (e^(logit - lse) - on_all)`.
    fn softmax_gradient[S: Float](logits: &mut [S], lse: S::Real, on_all: S::Real, scale: S::Real) {
        for logit in logits {
            *logit = S::store(((logit.load() - lse).exp() - on_all) * scale);
        }
    }

    /// Computes `e^(logit - largest)`.
    fn exponentials[S: Float](logits: &[S], largest: S::Real, out: &mut [S::Real]) {
        for (out, logit) in out.iter_mut().zip(logits) {
            *out = (logit.load() - largest).exp();
        }
    }
}

/// Returns the column of a target in the logits of `columns` tokens from `first` on, or `None` if it is not among these tokens.
fn column_of(target: i32, first: usize, columns: usize) -> Option<usize> {
    (target as usize).checked_sub(first).filter(|column| *column < columns)
}

pub(super) fn partial_losses(
    logits: &Tensor,
    targets: &Tensor,
    part: VocabularyPart,
    how: CrossEntropy,
    partial: &mut Tensor,
) {
    let columns = logits.shape()[1];
    with_float!(logits.dtype(), S => {
        let terms = Terms::<<S as Float>::Real>::new(how, part.vocabulary);
        let rows = logits.host::<S>().par_rows(columns).zip(targets.host::<i32>());
        partial.host_mut::<<S as Float>::Real>().par_chunks_mut(2).zip(rows).for_each(|(partial, (logits, &target))| {
            let own = (target != IGNORE_INDEX).then(|| column_of(target, part.first, columns)).flatten();
            partial[0] = log_sum_exp(logits, terms.cap);
            partial[1] = terms.weighted(logits, own);
        });
    });
}

pub(super) fn merge_losses(partial: &Tensor, targets: &Tensor, losses: &mut Tensor, lse: &mut Tensor) {
    fn merge<R: Real>(partial: &[R], targets: &[i32], losses: &mut [R], lse: &mut [R]) {
        let tokens = targets.len();
        for (t, &target) in targets.iter().enumerate() {
            let of_part = partial[2 * t..].chunks(2).step_by(tokens);
            let largest = of_part.clone().map(|part| part[0]).reduce(|a, b| if b > a { b } else { a }).expect("a part");
            let sum: f64 = of_part.clone().map(|part| (part[0] - largest).exp().to_f64()).sum();
            lse[t] = largest + R::of(sum).ln();
            let weighted: f64 = of_part.map(|part| part[1].to_f64()).sum();
            losses[t] = if target == IGNORE_INDEX { R::default() } else { lse[t] - R::of(weighted) };
        }
    }
    match partial.dtype() {
        DType::F64 => merge::<f64>(partial.host(), targets.host(), losses.host_mut(), lse.host_mut()),
        _ => merge::<f32>(partial.host(), targets.host(), losses.host_mut(), lse.host_mut()),
    }
}

pub(super) fn partial_gradient(
    logits: &mut Tensor,
    targets: &Tensor,
    part: VocabularyPart,
    lse: &Tensor,
    scale: &Tensor,
    how: CrossEntropy,
) {
    let columns = logits.shape()[1];
    with_float!(logits.dtype(), S => {
        let (scale, terms) = (scale.host::<<S as Float>::Real>(), Terms::new(how, part.vocabulary));
        let rows = targets.host::<i32>().par_iter().zip(lse.host::<<S as Float>::Real>()).enumerate();
        logits.host_mut::<S>().par_rows_mut(columns).zip(rows).for_each(|(logits, (t, (&target, &lse)))| match target {
            IGNORE_INDEX => logits.fill(S::store(<S as Float>::Real::default())),
            target => {
                let column = column_of(target, part.first, columns);
                replace_by_gradient(logits, column, lse, of_token(scale, t), terms);
            }
        });
    });
}

fn log_sum_exp<S: Float>(logits: &[S], cap: Option<S::Real>) -> S::Real {
    // This comparison keeps NaN. The trainer stops on NaN.
    let values = logits.iter().map(|l| capped(l.load(), cap));
    let largest = values.clone().reduce(|a, b| if b > a { b } else { a }).expect("a vocabulary");
    // The sum is F64, because a sum over a long vocabulary loses digits in F32.
    let sum: f64 = match cap {
        Some(_) => values.map(|value| (value - largest).exp().to_f64()).sum(),
        None => {
            let (mut buffer, mut sum) = ([S::Real::default(); 256], 0.0);
            for logits in logits.chunks(buffer.len()) {
                exponentials(logits, largest, &mut buffer);
                buffer[..logits.len()].iter().for_each(|value| sum += value.to_f64());
            }
            sum
        }
    };
    largest + S::Real::of(sum).ln()
}
