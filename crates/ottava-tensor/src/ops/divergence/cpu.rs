use super::{Divergence, TopLogProbs};
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use crate::ops::IGNORE_INDEX;
use crate::ops::parallel_rows::ParallelRows;
use rayon::prelude::*;

pub(super) fn divergence_gradient(
    student: &mut Tensor,
    teacher: &Tensor,
    vocabulary: usize,
    targets: &Tensor,
    scale: &Tensor,
    how: Divergence,
    divergences: &mut Tensor,
) {
    let (of_student, of_teacher) = (student.shape()[1], teacher.shape()[1]);
    with_float!(student.dtype(), S => {
        let scale = scale.host::<<S as Float>::Real>()[0];
        let teacher = teacher.host::<S>().par_rows(of_teacher);
        let rows = student.host_mut::<S>().par_rows_mut(of_student).zip(teacher).zip(targets.host::<i32>());
        divergences.host_mut::<<S as Float>::Real>().par_iter_mut().zip(rows).for_each(|(value, ((s, t), &target))| {
            *value = match target {
                IGNORE_INDEX => {
                    s[..vocabulary].fill(S::store(Default::default()));
                    Default::default()
                }
                _ => row(&mut s[..vocabulary], &t[..vocabulary], scale, how),
            };
        });
    });
}

pub(super) fn divergence_gradient_of_top(
    student: &mut Tensor,
    TopLogProbs { ids, log_probs, rest }: TopLogProbs,
    vocabulary: usize,
    targets: &Tensor,
    scale: &Tensor,
    how: Divergence,
    divergences: &mut Tensor,
) {
    let (of_student, k) = (student.shape()[1], ids.shape()[1]);
    with_float!(student.dtype(), S => {
        type R = <S as Float>::Real;
        let scale = scale.host::<R>()[0];
        let top = ids.host::<i32>().par_chunks(k).zip(log_probs.host::<R>().par_chunks(k)).zip(rest.host::<R>());
        let rows = student.host_mut::<S>().par_rows_mut(of_student).zip(top).zip(targets.host::<i32>());
        divergences.host_mut::<R>().par_iter_mut().zip(rows).for_each(|(value, ((s, ((ids, top), &rest)), &target))| {
            *value = match target {
                IGNORE_INDEX => {
                    s[..vocabulary].fill(S::store(Default::default()));
                    Default::default()
                }
                _ => row_of_top(&mut s[..vocabulary], ids, &[top, &[rest]].concat(), scale, how),
            };
        });
    });
}

/// The divergence of a token, whose logits by the student are replaced by the gradient.
fn row<S: Float>(student: &mut [S], teacher: &[S], scale: S::Real, how: Divergence) -> S::Real {
    let temperature = S::Real::of(how.temperature);
    let (s, t) = (log_probs(student, temperature), log_probs(teacher, temperature));
    let (divergence, mean) = divergence_and_mean(how.beta, &s, &t);
    for ((logit, &s), &t) in student.iter_mut().zip(&s).zip(&t) {
        *logit = S::store(scale * ((terms(how.beta, s, t)[1] - s.exp() * mean) / temperature));
    }
    divergence
}

/// As [`row`], with the log-probabilities by the teacher of the tokens `ids`, and after them of all other tokens.
fn row_of_top<S: Float>(
    student: &mut [S],
    ids: &[i32],
    teacher: &[S::Real],
    scale: S::Real,
    how: Divergence,
) -> S::Real {
    let temperature = S::Real::of(how.temperature);
    let all = log_probs(student, temperature);
    let (mut others, nothing) = (all.clone(), S::Real::of(f64::NEG_INFINITY));
    ids.iter().for_each(|&id| others[id as usize] = nothing);
    let rest = log_sum_exp(&others);
    let s: Vec<S::Real> = ids.iter().map(|&id| all[id as usize]).chain([rest]).collect();
    let (divergence, mean) = divergence_and_mean(how.beta, &s, teacher);
    let slope = |bucket: usize| (terms(how.beta, s[bucket], teacher[bucket])[1] - s[bucket].exp() * mean) / temperature;
    let of_rest = slope(ids.len());
    // Without tokens in the last bucket, no infinities may be subtracted.
    let base = if rest == nothing { S::Real::default() } else { rest };
    for (logit, &other) in student.iter_mut().zip(&others) {
        *logit = S::store(scale * ((other - base).exp() * of_rest));
    }
    ids.iter().enumerate().for_each(|(bucket, &id)| student[id as usize] = S::store(scale * slope(bucket)));
    divergence
}

/// The divergence of distributions with these log-probabilities, and the sum of the student's [`terms`].
fn divergence_and_mean<R: Real>(beta: f64, student: &[R], teacher: &[R]) -> (R, R) {
    let terms = || student.iter().zip(teacher).map(|(&s, &t)| terms(beta, s, t));
    // F64: a sum over a long vocabulary loses digits in F32.
    let [of_teacher, of_student] = [0, 1].map(|side| terms().map(|terms| terms[side].to_f64()).sum::<f64>());
    // The slopes of the forward divergence are no part of its value.
    (R::of(if beta == 0.0 { of_teacher } else { of_teacher + of_student }), R::of(of_student))
}

/// The term of the teacher in the divergence of a token of the vocabulary with these log-probabilities; and the student's probability times the slope
/// of the divergence by it, which is the student's term, except in the forward divergence.
fn terms<R: Real>(beta: f64, s: R, t: R) -> [R; 2] {
    let (of_student, of_teacher) = (s.exp(), t.exp());
    let of =
        |probability: R, log_ratio: R| if probability > R::default() { probability * log_ratio } else { R::default() };
    if beta == 0.0 {
        return [of(of_teacher, t - s), -of_teacher];
    }
    if beta == 1.0 {
        return [R::default(), of(of_student, s - t)];
    }
    let (share, rest) = (R::of(beta), R::of(1.0 - beta));
    let (a, b) = (s + rest.ln(), t + share.ln());
    let (more, less) = if a > b { (a, b) } else { (b, a) };
    let mixture = more + (R::of(1.0) + (less - more).exp()).ln();
    [share * of(of_teacher, t - mixture), rest * of(of_student, s - mixture)]
}

/// The log-probabilities of tokens with these logits at a temperature.
fn log_probs<S: Float>(logits: &[S], temperature: S::Real) -> Vec<S::Real> {
    let mut values: Vec<S::Real> = logits.iter().map(|logit| logit.load() / temperature).collect();
    let lse = log_sum_exp(&values);
    values.iter_mut().for_each(|value| *value = *value - lse);
    values
}

/// The logarithm of the sum of the exponentials of `values`.
fn log_sum_exp<R: Real>(values: &[R]) -> R {
    // The comparison keeps NaN, on which the trainer stops.
    let largest = values.iter().copied().reduce(|a, b| if b > a { b } else { a }).expect("a vocabulary");
    // Without this, infinities would be subtracted.
    if largest == R::of(f64::NEG_INFINITY) {
        return largest;
    }
    let sum: f64 = values.iter().map(|&value| (value - largest).exp().to_f64()).sum();
    largest + R::of(sum).ln()
}
