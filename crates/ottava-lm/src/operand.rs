//! What the products of a linear layer read: a matrix, or its FP8 codes.

use ottava_tensor::ops::Operand;
use ottava_tensor::{QuantizedTensor, Result, Tensor};

/// The scale that a tensor found from its own values, kept so that it can be cast again. Empty where its slot holds the scale for the
/// whole step, and where rows or blocks find their scales in each cast.
#[derive(Clone, Debug, Default)]
pub struct FrozenScale(Option<Tensor>);

impl FrozenScale {
    /// The scale F32 `[1]` of one tensor.
    pub fn own(scale: Tensor) -> FrozenScale {
        FrozenScale(Some(scale))
    }

    /// The scale, F32 `[1]`, if the tensor has one of its own.
    pub fn scale(&self) -> Option<&Tensor> {
        self.0.as_ref()
    }

    /// Takes over another scale, in the memory of this one where there is some.
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
}

impl View {
    /// The operand that is contracted along the columns of the matrix.
    pub fn rows(&self) -> Operand<'_> {
        match self {
            View::Value(x) => Operand::plain(x),
            View::Codes(x) => Operand::Rows(x),
        }
    }

    /// The operand that is contracted along the rows of the matrix.
    pub fn columns(&self) -> Operand<'_> {
        match self {
            View::Value(x) => Operand::plain_transposed(x),
            View::Codes(x) => Operand::Columns(x),
        }
    }
}

/// A matrix that two products read, as each of them does.
#[derive(Clone, Debug)]
pub struct Views {
    /// Contracted along its columns.
    pub rows: View,
    /// Contracted along its rows.
    pub columns: View,
}

impl Views {
    /// Of codes that have both copies.
    pub fn of_codes(codes: QuantizedTensor) -> Views {
        Views { rows: View::Codes(codes.only_rows()), columns: View::Codes(codes.only_transposed()) }
    }
}

/// The gradient on the residual stream, `[T, C]`, with its amax, F32 `[1]`, where the next cast asked for it.
#[derive(Clone, Debug)]
pub struct ResidualGradient {
    /// The gradient.
    pub value: Tensor,
    /// Its largest absolute value, for a cast by a scale of its own.
    pub amax: Option<Tensor>,
}

impl From<Tensor> for ResidualGradient {
    fn from(value: Tensor) -> ResidualGradient {
        ResidualGradient { value, amax: None }
    }
}
