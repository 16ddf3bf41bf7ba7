//! Dequantization of FP8 codes.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::microscaling::{Hadamard, hadamard};
use super::{Operand, cast};
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
/// in F32, rounded once, or with a scale of the tensor `code · scale_inv · scale of the tensor`, rounded twice. For [`Operand::Columns`], the matrix is the
/// transpose of the matrix that was cast. If it was cast after a Hadamard transform, the transform is inverted in F32.
pub fn dequantize(operand: Operand, every: usize, dtype: DType) -> Result<Tensor> {
    let of_tensor = tensor_scale(operand)?;
    if !is_rotated(operand) {
        return values(operand, every, dtype, of_tensor);
    }
    let y = hadamard(&values(operand, every, DType::F32, of_tensor)?, Hadamard::Inverse)?;
    if dtype == DType::F32 { Ok(y) } else { cast(&y, dtype) }
}

/// Returns the matrix `[rows, K]` that a product reads in BF16, without the scale of the tensor and without inverting a Hadamard transform. Values of
/// formats with small blocks are exact in BF16, except below 2⁻¹²⁶.
pub(super) fn block_values(operand: Operand) -> Result<Tensor> {
    values(operand, 1, DType::BF16, None)
}

/// Returns the scale of the tensor, repeated for each row (F32), if the operand has it besides the scales of blocks.
pub(super) fn tensor_scale(operand: Operand) -> Result<Option<Tensor>> {
    let Some((scale_inv, granularity)) = operand.scale_inv() else { return Ok(None) };
    let last = scale_inv.shape()[0];
    granularity.has_tensor_scale().then(|| scale_inv.rows(last - 1, last)).transpose()
}

/// Returns whether the copy that a product reads was cast after a Hadamard transform.
fn is_rotated(operand: Operand) -> bool {
    let Operand::Columns(x) = operand else { return false };
    x.granularity.microscaling().is_some_and(|how| how.rotates_columns)
}

/// Returns whether the values of the codes are not products of a code and one scale.
pub(super) fn is_indirect(operand: Operand) -> bool {
    is_rotated(operand) || operand.scale_inv().is_some_and(|(_, granularity)| granularity.has_tensor_scale())
}

fn values(operand: Operand, every: usize, dtype: DType, of_tensor: Option<Tensor>) -> Result<Tensor> {
    let (codes, scale_inv, layout) = Layout::of("dequantize", operand)?;
    let mut y = Tensor::empty(codes.device(), &[layout.rows.div_ceil(every), layout.columns], dtype)?;
    y.expect_dtype("dequantize: type", &[DType::F32, DType::BF16])?;
    dispatch! { y.device().clone(),
        cpu => cpu::dequantize(codes, (scale_inv, of_tensor.as_ref()), &layout, every, &mut y),
        gpu => cuda::dequantize(&gpu, codes, (scale_inv, of_tensor.as_ref()), &layout, every, &mut y)?,
    }
    Ok(y)
}
