//! FP8 operands of matrix products: codes, transposed codes and inverse scales.

use crate::dtype::DType;
use crate::error::Result;
use crate::granularity::{Granularity, PAD, padded};
use crate::tensor::Tensor;
use std::ops::Range;

/// An FP8 matrix `[rows, columns]`: `value = code · scale_inv`.
///
/// Tensor cores require FP8 operands that are contiguous along the contracted dimension, in rows of multiples of 16 bytes. So both dimensions
/// are padded with zero codes ([`Granularity::codes_shape`]), and a matrix that is also contracted along its rows has a transposed copy.
#[derive(Clone, Debug)]
pub struct QuantizedTensor {
    /// The codes `[rows, columns]`, padded, for products that contract the columns.
    pub codes: Option<Tensor>,
    /// The codes `[columns, rows]`, padded, for products that contract the rows.
    pub transposed: Option<Tensor>,
    /// The inverse scales of `codes`, F32, in the shape of [`Granularity::scales_shape`]. Without `codes`, these are the inverse scales of
    /// `transposed`.
    pub scale_inv: Tensor,
    /// The inverse scales of `transposed`, if both copies exist and have different scales. Boxed because most operands have none.
    pub transposed_scale_inv: Option<Box<Tensor>>,
    /// The elements that share a scale.
    pub granularity: Granularity,
    /// The type of the codes.
    pub format: DType,
    /// The number of rows without padding.
    pub rows: usize,
    /// The number of columns without padding.
    pub columns: usize,
}

impl QuantizedTensor {
    /// The number whose multiples are both dimensions of the codes.
    pub const PAD: usize = PAD;

    /// Returns `n` rounded up to a multiple of [`QuantizedTensor::PAD`].
    pub const fn padded(n: usize) -> usize {
        padded(n)
    }

    /// Returns only the copy that is contracted along the columns.
    pub fn only_rows(&self) -> QuantizedTensor {
        QuantizedTensor { transposed: None, transposed_scale_inv: None, ..self.clone() }
    }

    /// Returns the rows in `range` of the copy that is contracted along the columns. Returns `None` if this copy does not exist, if the scales of
    /// rows are not adjacent (blocks), or if the range does not start and end at multiples of [`QuantizedTensor::PAD`].
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

    /// Returns only the transposed codes.
    pub fn only_transposed(self) -> QuantizedTensor {
        let scale_inv = self.transposed_scale_inv.map_or(self.scale_inv, |scale_inv| *scale_inv);
        QuantizedTensor { codes: None, scale_inv, transposed_scale_inv: None, ..self }
    }
}
