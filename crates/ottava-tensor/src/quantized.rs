//! FP8 operands of matrix products: codes, their transpose, and what multiplies them back.

use crate::dtype::DType;
use crate::granularity::{Granularity, PAD, padded};
use crate::tensor::Tensor;

/// An FP8 matrix `[rows, columns]`: `value = code · scale_inv`.
///
/// The tensor cores want FP8 operands contiguous along the contracted dimension, in rows of whole 16 bytes. So both
/// dimensions are padded with zero codes, as [`Granularity::codes_shape`] says, which adds nothing to a product,
/// and a matrix that is contracted along its rows as well carries a transposed copy.
#[derive(Clone, Debug)]
pub struct QuantizedTensor {
    /// `[rows, columns]`, padded; contracted along the columns.
    pub codes: Option<Tensor>,
    /// `[columns, rows]`, padded; contracted along the rows.
    pub transposed: Option<Tensor>,
    /// What multiplies the codes, F32, of the shape that [`Granularity::scales_shape`] gives for them; of the transposed codes where
    /// there are no others.
    pub scale_inv: Tensor,
    /// What multiplies the transposed codes, where there are both and that is not the same. Boxed, since few have it.
    pub transposed_scale_inv: Option<Box<Tensor>>,
    /// How scales are shared.
    pub granularity: Granularity,
    /// Type of the codes.
    pub format: DType,
    /// True number of rows.
    pub rows: usize,
    /// True number of columns.
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

    /// Drops the copy that is contracted along the columns, once no product needs it.
    pub fn only_transposed(self) -> QuantizedTensor {
        let scale_inv = self.transposed_scale_inv.map_or(self.scale_inv, |scale_inv| *scale_inv);
        QuantizedTensor { codes: None, scale_inv, transposed_scale_inv: None, ..self }
    }
}
