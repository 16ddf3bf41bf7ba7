//! The operands of products, and how products accumulate.

use crate::granularity::Granularity;
use crate::quantized::QuantizedTensor;
use crate::{Error, Result, Tensor};

/// An operand of a product: a matrix `[rows, K]`, contracted along `K`.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a> {
    /// A matrix of a 16-bit or wider type. If `transposed`, `x` is `[K, rows]`; nothing is copied.
    Plain {
        /// The matrix.
        x: &'a Tensor,
        /// Whether `x` holds the transpose.
        transposed: bool,
    },
    /// The FP8 codes of `[rows, K]`.
    Rows(&'a QuantizedTensor),
    /// The transposed codes of `[K, rows]`.
    Columns(&'a QuantizedTensor),
}

/// How tensor cores accumulate FP8 products. Products of wider types always accumulate in F32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Accumulation {
    /// Sums stay in tensor-core registers with about 14 bits. Slightly faster.
    Fast,
    /// Partial sums are added to F32 registers every 128 products.
    Exact,
}

impl<'a> Operand<'a> {
    /// Returns whether rows are contiguous in memory, and not transposed.
    pub(crate) fn is_rows(&self) -> bool {
        matches!(self, Operand::Plain { transposed: false, .. } | Operand::Rows(_))
    }

    /// Returns the operand of a plain matrix `[rows, K]`.
    pub fn plain(x: &'a Tensor) -> Operand<'a> {
        Operand::Plain { x, transposed: false }
    }

    /// Returns the operand of a plain matrix `[K, rows]`.
    pub fn plain_transposed(x: &'a Tensor) -> Operand<'a> {
        Operand::Plain { x, transposed: true }
    }

    /// Returns the matrix of elements or codes, and whether it is contracted along its rows.
    pub(in crate::ops) fn matrix(self, what: &str) -> Result<(&'a Tensor, bool)> {
        let missing = || Error::Value(format!("{what}: the codes for this product were not made"));
        match self {
            Operand::Plain { x, transposed } => Ok((x, transposed)),
            Operand::Rows(q) => Ok((q.codes.as_ref().ok_or_else(missing)?, false)),
            Operand::Columns(q) => Ok((q.transposed.as_ref().ok_or_else(missing)?, false)),
        }
    }

    /// Returns the inverse scales of this copy, and their granularity.
    pub(in crate::ops) fn scale_inv(self) -> Option<(&'a Tensor, Granularity)> {
        match self {
            Operand::Plain { .. } => None,
            Operand::Rows(q) => Some((&q.scale_inv, q.granularity.of_rows())),
            Operand::Columns(q) => {
                Some((q.transposed_scale_inv.as_deref().unwrap_or(&q.scale_inv), q.granularity.of_columns()))
            }
        }
    }

    /// Returns the number of rows without padding. `what` names the operand in the error if it is not a matrix.
    pub fn rows(self, what: &str) -> Result<usize> {
        Ok(self.size(what)?.0)
    }

    /// Returns `(rows, K)` without padding.
    pub(in crate::ops) fn size(self, what: &str) -> Result<(usize, usize)> {
        match self {
            Operand::Plain { x, transposed } => {
                let [r, c] = x.dims(what)?;
                Ok(if transposed { (c, r) } else { (r, c) })
            }
            Operand::Rows(q) => Ok((q.rows, q.columns)),
            Operand::Columns(q) => Ok((q.columns, q.rows)),
        }
    }
}
