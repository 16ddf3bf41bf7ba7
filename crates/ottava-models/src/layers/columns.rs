//! Copies of neighbouring columns of a matrix.

use ottava_common::error::Result;
use ottava_tensor::Tensor;
use ottava_tensor::ops::{ColumnRuns, move_columns};

/// Copies `width` columns of `x`, starting at column `first`, to the columns of `y` from column `to` on.
pub(super) fn copy_columns(x: &Tensor, first: usize, y: &mut Tensor, to: usize, width: usize) -> Result<()> {
    let [from, to] = [first, to].map(|first| ColumnRuns { first, step: 0 });
    Ok(move_columns(x, from, y, to, 1, width)?)
}

/// Returns a copy of `width` columns of `x`, starting at column `first`.
pub(super) fn columns(x: &Tensor, first: usize, width: usize) -> Result<Tensor> {
    let mut y = Tensor::empty(x.device(), &[x.shape()[0], width], x.dtype())?;
    copy_columns(x, first, &mut y, 0, width)?;
    Ok(y)
}

/// Returns a matrix with the columns of `parts`, one part after the other.
pub(super) fn side_by_side<const N: usize>(parts: [&Tensor; N]) -> Result<Tensor> {
    let widths = parts.map(|part| part.shape()[1]);
    let (rows, all) = (parts[0].shape()[0], widths.iter().sum());
    let mut y = Tensor::empty(parts[0].device(), &[rows, all], parts[0].dtype())?;
    let mut first = 0;
    for (part, width) in parts.into_iter().zip(widths) {
        copy_columns(part, 0, &mut y, first, width)?;
        first += width;
    }
    Ok(y)
}
