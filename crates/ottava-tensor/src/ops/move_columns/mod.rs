//! Moves runs of columns from one matrix to another, for heads that are assembled from parts.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::expect_compute;
use crate::ops::dispatch::dispatch;
use crate::{Error, Result, Tensor};

/// Runs of columns of a matrix. Run `i` begins at column `first + i · step`. With a step of 0, all runs are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColumnRuns {
    /// The first column of the first run.
    pub first: usize,
    /// The number of columns from one run to the next.
    pub step: usize,
}

impl ColumnRuns {
    fn check(self, what: &str, x: &Tensor, [count, width]: [usize; 2]) -> Result<()> {
        let [_, columns] = x.dims(what)?;
        let end = self.first + count.saturating_sub(1) * self.step + width;
        match end <= columns && count > 0 && width > 0 {
            true => Ok(()),
            false => Err(Error::Value(format!("{what}: {count} runs of {width} columns end at {end} of {columns}"))),
        }
    }
}

/// Copies the `count` runs `i` of `width` columns `c`: `to[t, b.first + i · b.step + c] = from[t, a.first + i · a.step + c]`. The runs of `to` must
/// not overlap.
pub fn move_columns(
    from: &Tensor,
    a: ColumnRuns,
    to: &mut Tensor,
    b: ColumnRuns,
    count: usize,
    width: usize,
) -> Result<()> {
    expect_compute("move_columns: from", from)?;
    to.expect_dtype("move_columns: to", &[from.dtype()])?;
    to.expect_device("move_columns: to", from.device())?;
    let [rows, columns] = to.dims("move_columns: to")?;
    from.expect("move_columns: from", &[rows, from.shape().last().copied().unwrap_or(0)])?;
    a.check("move_columns: from", from, [count, width])?;
    b.check("move_columns: to", to, [count, width])?;
    if count > 1 && b.step < width {
        return Err(Error::Value(format!(
            "move_columns: runs of {width} of {columns} columns overlap at steps of {}",
            b.step
        )));
    }
    dispatch! { to.device().clone(),
        cpu => cpu::move_columns(from, a, to, b, count, width),
        gpu => cuda::move_columns(&gpu, from, a, to, b, count, width)?,
    }
    Ok(())
}

/// Returns `y[t, c] = Σ_i x[t, runs.first + i · runs.step + c]` over `count` runs of `width` columns, `[T, width]` in the type of `x`. The runs are
/// added in order, in F32 (F64 for F64), and the sum is rounded once. This is the gradient of a run that [`move_columns`] has copied to all of these
/// runs.
pub fn sum_columns(x: &Tensor, runs: ColumnRuns, count: usize, width: usize) -> Result<Tensor> {
    expect_compute("sum_columns: x", x)?;
    let [rows, _] = x.dims("sum_columns: x")?;
    runs.check("sum_columns: x", x, [count, width])?;
    let mut y = Tensor::empty(x.device(), &[rows, width], x.dtype())?;
    dispatch! { x.device(),
        cpu => cpu::sum_columns(x, runs, count, &mut y),
        gpu => cuda::sum_columns(gpu, x, runs, count, &mut y)?,
    }
    Ok(y)
}
