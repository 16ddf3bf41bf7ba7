//! Negates the values of tokens that have a target: the losses for the scores of a reward model, and their gradient.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::{COMPUTE, IGNORE_INDEX, real_type};
use crate::ops::dispatch::dispatch;
use crate::{DType, Result, Tensor};

/// Returns `y[t] = -x[t]`, or 0 if `targets[t]` is [`IGNORE_INDEX`], rounded to `out`.
///
/// `x` is F32 (F64 if `out` is F64): `[T]`, or `[1]` with one value for all tokens. `targets` is I32 `[T]`. Returns `[T]`.
pub fn negate_targets(x: &Tensor, targets: &Tensor, out: DType) -> Result<Tensor> {
    let [tokens] = targets.dims("negate_targets: targets")?;
    targets.expect_dtype("negate_targets: targets", &[DType::I32])?;
    x.expect("negate_targets: x", &[if x.len() == 1 { 1 } else { tokens }])?;
    x.expect_dtype("negate_targets: x", &[real_type(out)])?;
    x.expect_device("negate_targets: x", targets.device())?;
    let mut y = Tensor::empty(x.device(), &[tokens], out)?;
    y.expect_dtype("negate_targets: the result", COMPUTE)?;
    dispatch! { x.device(),
        cpu => cpu::negate_targets(x, targets, &mut y),
        gpu => cuda::negate_targets(gpu, x, targets, &mut y)?,
    }
    Ok(y)
}
