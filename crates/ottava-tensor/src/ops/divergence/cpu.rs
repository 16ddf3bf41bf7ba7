use super::Divergence;
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use crate::ops::IGNORE_INDEX;
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
        let teacher = teacher.host::<S>().par_chunks(of_teacher);
        let rows = student.host_mut::<S>().par_chunks_mut(of_student).zip(teacher).zip(targets.host::<i32>());
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

/// The divergence of a token, whose logits by the student are replaced by the gradient.
fn row<S: Float>(student: &mut [S], teacher: &[S], scale: S::Real, how: Divergence) -> S::Real {
    let temperature = S::Real::of(how.temperature);
    let (s, t) = (log_probs(student, temperature), log_probs(teacher, temperature));
    let terms = || s.iter().zip(&t).map(|(&s, &t)| terms(how.beta, s, t));
    // F64: a sum over a long vocabulary loses digits in F32.
    let [of_teacher, of_student] = [0, 1].map(|side| terms().map(|terms| terms[side].to_f64()).sum::<f64>());
    let mean = S::Real::of(of_student);
    for ((logit, &s), [_, weighted]) in student.iter_mut().zip(&s).zip(terms()) {
        *logit = S::store(scale * ((weighted - s.exp() * mean) / temperature));
    }
    // The slopes of the forward divergence are no part of its value.
    S::Real::of(if how.beta == 0.0 { of_teacher } else { of_teacher + of_student })
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
    // The comparison keeps NaN, on which the trainer stops.
    let largest = values.iter().copied().reduce(|a, b| if b > a { b } else { a }).expect("a vocabulary");
    let sum: f64 = values.iter().map(|&value| (value - largest).exp().to_f64()).sum();
    let lse = largest + S::Real::of(sum).ln();
    values.iter_mut().for_each(|value| *value = *value - lse);
    values
}
