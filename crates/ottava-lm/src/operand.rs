//! What the products of a linear layer read: a matrix, or its FP8 codes.

use ottava_tensor::ops::Operand;
use ottava_tensor::{QuantizedTensor, Result, Tensor};
use std::ops::Range;

/// The scale that a tensor's own values gave, saved to cast the tensor again. Empty if the slot holds the scale for the whole step, or if
/// rows or blocks find their scales in each cast.
#[derive(Clone, Debug, Default)]
pub struct FrozenScale(Option<Tensor>);

impl FrozenScale {
    /// The scale F32 `[1]` of one tensor.
    pub fn own(scale: Tensor) -> FrozenScale {
        FrozenScale(Some(scale))
    }

    /// The scale, F32 `[1]`; `None` if the tensor has none of its own.
    pub fn scale(&self) -> Option<&Tensor> {
        self.0.as_ref()
    }

    /// Replaces the scale, in place if there is one.
    pub fn replace(&mut self, by: FrozenScale) -> Result<()> {
        match (&mut self.0, by.0) {
            (Some(old), Some(new)) => old.copy_from(0, &new)?,
            (old, new) => *old = new,
        }
        Ok(())
    }
}

/// A matrix as one product reads it.
#[derive(Clone, Debug)]
pub enum View {
    /// In the compute type.
    Value(Tensor),
    /// In FP8.
    Codes(QuantizedTensor),
    /// In FP8 for the product of the linear, and in the compute type for its adapter.
    CodesAndValue(QuantizedTensor, Tensor),
}

impl View {
    /// The operand that is contracted along the columns of the matrix.
    pub fn rows(&self) -> Operand<'_> {
        match self {
            View::Value(x) => Operand::plain(x),
            View::Codes(x) | View::CodesAndValue(x, _) => Operand::Rows(x),
        }
    }

    /// The operand that is contracted along the rows of the matrix.
    pub fn columns(&self) -> Operand<'_> {
        match self {
            View::Value(x) => Operand::plain_transposed(x),
            View::Codes(x) | View::CodesAndValue(x, _) => Operand::Columns(x),
        }
    }

    /// The number of rows of the matrix.
    pub fn row_count(&self) -> usize {
        match self {
            View::Value(x) => x.shape()[0],
            View::Codes(x) | View::CodesAndValue(x, _) => x.rows,
        }
    }

    /// The rows in `range`, as [`View::rows`] reads them; `None` if their scales cannot be taken apart ([`QuantizedTensor::row_range`]).
    pub fn row_range(&self, range: Range<usize>) -> Result<Option<View>> {
        let value = |x: &Tensor| x.rows(range.start, range.end);
        Ok(match self {
            View::Value(x) => Some(View::Value(value(x)?)),
            View::Codes(x) => x.row_range(range)?.map(View::Codes),
            View::CodesAndValue(codes, x) => {
                let x = value(x)?;
                codes.row_range(range)?.map(|codes| View::CodesAndValue(codes, x))
            }
        })
    }

    /// The matrix in the compute type, as an adapter reads it.
    ///
    /// Panics if it was cast for a linear without adapters.
    pub fn value(&self) -> &Tensor {
        match self {
            View::Value(x) | View::CodesAndValue(_, x) => x,
            View::Codes(_) => unreachable!("operands of linears with adapters keep their values"),
        }
    }
}

/// A matrix in the forms in which two products read it.
#[derive(Clone, Debug)]
pub struct Views {
    /// The form contracted along the columns.
    pub rows: View,
    /// The form contracted along the rows.
    pub columns: View,
}

impl Views {
    /// Views of codes with both copies.
    pub fn of_codes(codes: QuantizedTensor) -> Views {
        Views { rows: View::Codes(codes.only_rows()), columns: View::Codes(codes.only_transposed()) }
    }
}

/// The gradient of the residual stream, `[T, C]`, with its amax, F32 `[1]`, if the next cast needs it.
#[derive(Clone, Debug)]
pub struct ResidualGradient {
    /// The gradient.
    pub value: Tensor,
    /// Its largest absolute value, for current scaling.
    pub amax: Option<Tensor>,
}

impl From<Tensor> for ResidualGradient {
    fn from(value: Tensor) -> ResidualGradient {
        ResidualGradient { value, amax: None }
    }
}
