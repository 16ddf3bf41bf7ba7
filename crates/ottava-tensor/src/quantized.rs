//! FP8 operands of matrix products: codes, their transpose, and what multiplies them back.

use crate::dtype::DType;
use crate::tensor::Tensor;

/// How many elements share one scale. Rows and blocks come with their recipes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Granularity {
    /// One scale for the whole tensor.
    PerTensor,
}

/// An FP8 matrix `[rows, columns]`: `value = code · scale_inv`.
///
/// The tensor cores want FP8 operands contiguous along the contracted dimension, in rows of whole 16 bytes. So both
/// dimensions are padded with zero codes to multiples of [`QuantizedTensor::PAD`], which adds nothing to a product,
/// and a matrix that is contracted along its rows as well carries a transposed copy.
#[derive(Clone, Debug)]
pub struct QuantizedTensor {
    /// `[rows, columns]`, padded; contracted along the columns.
    pub codes: Option<Tensor>,
    /// `[columns, rows]`, padded; contracted along the rows.
    pub transposed: Option<Tensor>,
    /// What multiplies the codes, F32; `[1]` for [`Granularity::PerTensor`].
    pub scale_inv: Tensor,
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
    pub const PAD: usize = 16;

    /// `n` rounded up to whole multiples of [`QuantizedTensor::PAD`].
    pub const fn padded(n: usize) -> usize {
        n.next_multiple_of(Self::PAD)
    }

    /// Drops the copy that is contracted along the columns, once no product needs it.
    pub fn only_transposed(self) -> QuantizedTensor {
        QuantizedTensor { codes: None, ..self }
    }
}
