//! Dequantization of FP8 codes.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::Operand;
use crate::granularity::ScaleLayout;
use crate::ops::dispatch::dispatch;
use crate::{DType, Error, Result, Tensor};

/// The positions of the code and of the scale of each element of a matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Layout {
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// The number of codes from one row to the next.
    pub(super) pitch: usize,
    /// The number of rows that share a scale, and the number of columns that share a scale.
    pub(super) shared: [usize; 2],
    /// The number of scales from one group of rows to the next, and from one group of columns to the next.
    pub(super) scale_steps: [usize; 2],
}

impl Layout {
    /// Returns the codes that a product reads, their inverse scales, and their layout. Columns are contracted in the product, rows are not.
    pub(super) fn of<'a>(what: &str, operand: Operand<'a>) -> Result<(&'a Tensor, &'a Tensor, Layout)> {
        let (codes, _) = operand.matrix(what)?;
        let Some((scale_inv, granularity)) = operand.scale_inv() else {
            return Err(Error::Value(format!("{what}: a matrix without codes")));
        };
        let ((rows, columns), shape) = (operand.size(what)?, scale_inv.shape());
        let ScaleLayout { shared, steps: scale_steps } = granularity.scale_layout(shape);
        Ok((codes, scale_inv, Layout { rows, columns, pitch: codes.shape()[1], shared, scale_steps }))
    }

    /// Returns the index of an element's scale.
    pub(super) fn scale_at(&self, row: usize, column: usize) -> usize {
        row / self.shared[0] * self.scale_steps[0] + column / self.shared[1] * self.scale_steps[1]
    }
}

/// Returns rows 0, `every`, 2 · `every`, … of the dequantized matrix `[rows, K]` that a product reads, in F32 or BF16. A value is `code · scale_inv`
/// in F32, rounded once. For [`Operand::Columns`], the matrix is the transpose of the matrix that was cast.
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
