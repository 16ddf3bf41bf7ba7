//! Sums equal parts of a tensor: partial products of several ranks, and the residual connection.

mod cpu;
pub(super) mod cuda;
pub(super) mod one_shot;
#[cfg(test)]
mod tests;

pub(crate) use one_shot::{Inboxes, sum_in_one_shot};

use super::expect_compute;
use crate::ops::dispatch::dispatch;
use crate::{Error, Result, Tensor};

/// Returns `addend + Σ part`, `[T, C]`. The parts are summed in their order, then the addend is added, in F32 (F64 for F64), and the sum is rounded
/// once. Part number `place` is `own` `[T, C]`. `others` has the elements of `[P - 1, T, C]`, the other parts in their order. `addend` is `[T, C]`.
///
/// Errors with [`Error::Value`] if `others` does not consist of whole parts, or if `place` is not the number of a part.
pub fn sum_parts(own: &Tensor, place: usize, others: &Tensor, addend: Option<&Tensor>) -> Result<Tensor> {
    own.dims::<2>("sum_parts: own")?;
    let mut y = own.empty_like()?;
    sum_parts_into(own, place, others, addend, &mut y)?;
    Ok(y)
}

/// Computes [`sum_parts`] into `y`. Tensors may have any shapes.
pub(crate) fn sum_parts_into(
    own: &Tensor,
    place: usize,
    others: &Tensor,
    addend: Option<&Tensor>,
    y: &mut Tensor,
) -> Result<()> {
    expect_compute("sum_parts: own", own)?;
    others.expect_dtype("sum_parts: others", &[own.dtype()])?;
    others.expect_device("sum_parts: others", own.device())?;
    let count = if own.is_empty() { 0 } else { others.len() / own.len() };
    if others.len() != count * own.len() || place > count {
        let (elements, part) = (others.len(), own.len());
        return Err(Error::Value(format!("sum_parts: {elements} elements beside part {place}, of {part} elements")));
    }
    expect_addend(addend, own)?;
    y.expect_dtype("sum_parts: y", &[own.dtype()])?;
    y.expect_device("sum_parts: y", own.device())?;
    if y.len() != own.len() {
        return Err(Error::Value(format!("sum_parts: a sum of {} elements for {} elements", own.len(), y.len())));
    }
    dispatch! { own.device(),
        cpu => cpu::sum_parts(own, place, others, addend, y),
        gpu => cuda::sum_parts(gpu, own, place, others, addend, y)?,
    }
    Ok(())
}

/// Errors unless the addend, if there is one, is a tensor like `part`.
fn expect_addend(addend: Option<&Tensor>, part: &Tensor) -> Result<()> {
    let Some(addend) = addend else { return Ok(()) };
    addend.expect("sum_parts: addend", part.shape())?;
    addend.expect_dtype("sum_parts: addend", &[part.dtype()])?;
    addend.expect_device("sum_parts: addend", part.device())
}
