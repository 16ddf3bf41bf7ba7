//! The divergence of the distribution of a student from the distribution of a teacher, and its gradient by the student's logits.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::{expect_compute, real_type};
use crate::ops::dispatch::dispatch;
use crate::{DType, Error, Result, Tensor};

/// The generalized Jensen-Shannon divergence of the teacher's distribution `T` and the student's `S`, both at a temperature:
/// `β · KL(T, M) + (1 - β) · KL(S, M)` with the mixture `M = β · T + (1 - β) · S`. At 0, where this is 0 for all distributions, it is the
/// forward divergence `KL(T, S)`, and at 1 the reverse divergence `KL(S, T)`. Agarwal et al. 2023, arXiv:2306.13649, section 2 and equation 1;
/// the values at 0 and 1 as in TRL.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Divergence {
    /// `β`, from 0 to 1.
    pub beta: f64,
    /// The temperature, by which the logits of both are divided, above 0.
    pub temperature: f64,
}

impl Divergence {
    fn check(self, op: &str) -> Result<()> {
        let Divergence { beta, temperature } = self;
        match (0.0..=1.0).contains(&beta) && temperature.is_finite() && temperature > 0.0 {
            true => Ok(()),
            false => Err(Error::Value(format!(
                "{op}: beta is {beta} and the temperature {temperature}; they are from 0 to 1, and above 0"
            ))),
        }
    }
}

/// The likeliest tokens of a teacher's distributions, and the rest of each distribution.
#[derive(Clone, Copy, Debug)]
pub struct TopLogProbs<'a> {
    /// The ids of the `k` tokens, I32 `[T, k]`: in the vocabulary, and different in each row.
    pub ids: &'a Tensor,
    /// The log-probabilities of these tokens in the whole vocabulary, F32 (F64 for F64) `[T, k]`.
    pub log_probs: &'a Tensor,
    /// The log-probability of all other tokens together, in the same type `[T]`.
    pub rest: &'a Tensor,
}

/// Returns the divergences `[T]` of tokens with these logits, F32 (F64 for F64), and 0 where the target is
/// [`IGNORE_INDEX`](super::IGNORE_INDEX); replaces the `student`'s logits by the gradient of `scale · Σ divergences`.
///
/// The logits are the first `vocabulary` columns of `student` `[T, P]` and `teacher` `[T, Q]` of the same type; the rest is padding, which stays as
/// it is. `targets` are I32 `[T]`, and `scale` F32 (F64 for F64) `[1]` on the device. With `w = (1 - β) · S · (ln S - ln M)`, the gradient of a
/// token is `(w - S · Σ w) / temperature`. A token of the vocabulary with a probability of 0 adds nothing to its sum.
///
/// Errors with [`Error::Value`] unless the constants are in their ranges and the vocabulary has columns.
pub fn divergence_gradient(
    student: &mut Tensor,
    teacher: &Tensor,
    vocabulary: usize,
    targets: &Tensor,
    scale: &Tensor,
    how: Divergence,
) -> Result<Tensor> {
    let [tokens, of_student] = student.dims("divergence_gradient: student")?;
    let [_, of_teacher] = teacher.dims("divergence_gradient: teacher")?;
    expect_compute("divergence_gradient: student", student)?;
    teacher.expect("divergence_gradient: teacher", &[tokens, of_teacher])?;
    teacher.expect_dtype("divergence_gradient: teacher", &[student.dtype()])?;
    targets.expect("divergence_gradient: targets", &[tokens])?;
    targets.expect_dtype("divergence_gradient: targets", &[DType::I32])?;
    scale.expect("divergence_gradient: scale", &[1])?;
    scale.expect_dtype("divergence_gradient: scale", &[real_type(student.dtype())])?;
    for (what, tensor) in [
        ("divergence_gradient: teacher", teacher),
        ("divergence_gradient: targets", targets),
        ("divergence_gradient: scale", scale),
    ] {
        tensor.expect_device(what, student.device())?;
    }
    if !(1..=of_student.min(of_teacher)).contains(&vocabulary) {
        return Err(Error::Value(format!(
            "divergence_gradient: a vocabulary of {vocabulary} in {of_student} columns of the student and {of_teacher} of the teacher"
        )));
    }
    how.check("divergence_gradient")?;
    let mut divergences = Tensor::empty(student.device(), &[tokens], real_type(student.dtype()))?;
    dispatch! { student.device().clone(),
        cpu => cpu::divergence_gradient(student, teacher, vocabulary, targets, scale, how, &mut divergences),
        gpu => cuda::divergence_gradient(&gpu, student, teacher, vocabulary, targets, scale, how, &mut divergences)?,
    }
    Ok(divergences)
}

/// As [`divergence_gradient`], for a teacher of which only the likeliest tokens are known: a distribution has a bucket for each of these tokens, and a
/// last bucket for all other tokens. The divergence of the buckets is a lower bound of the divergence of the distributions, and equals it if all
/// tokens are known.
///
/// The log-probabilities of the teacher are those at the temperature of `how`, which only divides the logits of the student. With `w` of the last
/// bucket, a token `v` in this bucket has the gradient `S_v / S_rest · (w_rest - S_rest · Σ w) / temperature`.
///
/// Errors with [`Error::Value`] unless the constants are in their ranges, and `k` is from 1 to the size of the vocabulary.
pub fn divergence_gradient_of_top(
    student: &mut Tensor,
    teacher: TopLogProbs,
    vocabulary: usize,
    targets: &Tensor,
    scale: &Tensor,
    how: Divergence,
) -> Result<Tensor> {
    const OP: &str = "divergence_gradient_of_top";
    let [tokens, of_student] = student.dims("divergence_gradient_of_top: student")?;
    let [_, k] = teacher.ids.dims("divergence_gradient_of_top: ids")?;
    expect_compute("divergence_gradient_of_top: student", student)?;
    let real = real_type(student.dtype());
    for (name, tensor, shape, dtype) in [
        ("ids", teacher.ids, &[tokens, k][..], DType::I32),
        ("log_probs", teacher.log_probs, &[tokens, k], real),
        ("rest", teacher.rest, &[tokens], real),
        ("targets", targets, &[tokens], DType::I32),
        ("scale", scale, &[1], real),
    ] {
        let what = format!("{OP}: {name}");
        tensor.expect(&what, shape)?;
        tensor.expect_dtype(&what, &[dtype])?;
        tensor.expect_device(&what, student.device())?;
    }
    if !(1..=of_student).contains(&vocabulary) || !(1..=vocabulary).contains(&k) {
        return Err(Error::Value(format!(
            "{OP}: {k} likeliest tokens of a vocabulary of {vocabulary} in {of_student} columns"
        )));
    }
    how.check(OP)?;
    let mut divergences = Tensor::empty(student.device(), &[tokens], real)?;
    dispatch! { student.device().clone(),
        cpu => cpu::divergence_gradient_of_top(student, teacher, vocabulary, targets, scale, how, &mut divergences),
        gpu => cuda::divergence_gradient_of_top(&gpu, student, teacher, vocabulary, targets, scale, how, &mut divergences)?,
    }
    Ok(divergences)
}
