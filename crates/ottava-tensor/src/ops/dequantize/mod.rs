//! The values of FP8 codes.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::Operand;
use crate::granularity::ScaleLayout;
use crate::ops::dispatch::dispatch;
use crate::{DType, Error, Result, Tensor};

/// Where the codes of a matrix and their scales are, for the row and column of an element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Layout {
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Codes from a row to the next.
    pub(super) pitch: usize,
    /// Rows, and columns, that share a scale.
    pub(super) shared: [usize; 2],
    /// Scales from a group of rows to the next, and from a group of columns to the next.
    pub(super) scale_steps: [usize; 2],
}

impl Layout {
    /// The codes that a product reads, their inverse scales, and where they are: rows are not contracted, columns are.
    pub(super) fn of<'a>(what: &str, operand: Operand<'a>) -> Result<(&'a Tensor, &'a Tensor, Layout)> {
        let (codes, _) = operand.matrix(what)?;
        let Some((scale_inv, granularity)) = operand.scale_inv() else {
            return Err(Error::Value(format!("{what}: a matrix without codes")));
        };
        let ((rows, columns), shape) = (operand.size(what)?, scale_inv.shape());
        let ScaleLayout { shared, steps: scale_steps } = granularity.scale_layout(shape);
        Ok((codes, scale_inv, Layout { rows, columns, pitch: codes.shape()[1], shared, scale_steps }))
    }

    /// The index of an element's scale.
    pub(super) fn scale_at(&self, row: usize, column: usize) -> usize {
        row / self.shared[0] * self.scale_steps[0] + column / self.shared[1] * self.scale_steps[1]
    }
}

/// Rows 0, `every`, 2 · `every`, … of the matrix `[rows, K]` whose codes a product reads, in F32 or BF16: `code · scale_inv` in F32, rounded
/// once. For [`Operand::Columns`], that is the transpose of the matrix that was cast.
pub fn dequantize(operand: Operand, every: usize, dtype: DType) -> Result<Tensor> {
    let (codes, scale_inv, layout) = Layout::of("dequantize", operand)?;
    let mut y = Tensor::empty(codes.device(), &[layout.rows.div_ceil(every), layout.columns], dtype)?;
    y.expect_dtype("dequantize: type", &[DType::F32, DType::BF16])?;
    dispatch! { y.device().clone(),
        cpu => cpu::dequantize(codes, scale_inv, &layout, every, &mut y),
        gpu => cuda::dequantize(&gpu, codes, scale_inv, &layout, every, &mut y)?,
    }
    Ok(y)
}
