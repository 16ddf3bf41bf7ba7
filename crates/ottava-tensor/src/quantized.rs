//! FP8 operands of matrix products: codes, transposed codes and inverse scales.

use crate::dtype::DType;
use crate::error::Result;
use crate::granularity::{Granularity, PAD, padded};
use crate::tensor::Tensor;
use std::ops::Range;

/// An FP8 matrix `[rows, columns]`: `value = code · scale_inv`.
///
/// Tensor cores require FP8 operands that are contiguous along the contracted dimension, in rows of multiples of 16 bytes. Both dimensions
/// are padded with zero codes ([`Granularity::codes_shape`]), and a matrix that is also contracted along its rows has a transposed copy.
#[derive(Clone, Debug)]
pub struct QuantizedTensor {
    /// `[rows, columns]`, padded; contracted along the columns.
    pub codes: Option<Tensor>,
    /// `[columns, rows]`, padded; contracted along the rows.
    pub transposed: Option<Tensor>,
    /// Inverse scales of `codes`, F32, shaped as [`Granularity::scales_shape`] says; the inverse scales of `transposed` if there are no `codes`.
    pub scale_inv: Tensor,
    /// Inverse scales of `transposed` where both copies exist and differ in their scales. Boxed because most operands have none.
    pub transposed_scale_inv: Option<Box<Tensor>>,
    /// Which values share a scale.
    pub granularity: Granularity,
    /// Type of the codes.
    pub format: DType,
    /// Rows without padding.
    pub rows: usize,
    /// Columns without padding.
    pub columns: usize,
}

impl QuantizedTensor {
    /// Both dimensions of the codes are multiples of this.
    pub const PAD: usize = PAD;

    /// `n` rounded up to whole multiples of [`QuantizedTensor::PAD`].
    pub const fn padded(n: usize) -> usize {
        padded(n)
    }

    /// The copy that is contracted along the columns, alone.
    pub fn only_rows(&self) -> QuantizedTensor {
        QuantizedTensor { transposed: None, transposed_scale_inv: None, ..self.clone() }
    }

    /// The rows in `range` of the copy that is contracted along the columns, alone. `None` if the copy does not exist, if the scales of rows
    /// are not neighbours (blocks), or if the range does not start and end at multiples of [`QuantizedTensor::PAD`].
    pub fn row_range(&self, range: Range<usize>) -> Result<Option<QuantizedTensor>> {
        let is_padded = [range.start, range.end].iter().all(|end| end.is_multiple_of(PAD)) && range.end <= self.rows;
        let Some(codes) = self.codes.as_ref().filter(|_| is_padded) else { return Ok(None) };
        let scale_inv = match self.granularity {
            Granularity::PerTensor => self.scale_inv.clone(),
            Granularity::PerRow => self.scale_inv.rows(range.start, range.end)?,
            _ => return Ok(None),
        };
        let codes = Some(codes.rows(range.start, range.end)?);
        Ok(Some(QuantizedTensor { codes, scale_inv, rows: range.len(), ..self.only_rows() }))
    }

    /// Keeps only the transposed codes.
    pub fn only_transposed(self) -> QuantizedTensor {
        let scale_inv = self.transposed_scale_inv.map_or(self.scale_inv, |scale_inv| *scale_inv);
        QuantizedTensor { codes: None, scale_inv, transposed_scale_inv: None, ..self }
    }
}
