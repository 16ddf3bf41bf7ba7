//! The operands of a linear layer's products: matrices, or FP8 codes of matrices.
//!
//! A product receives a `View`, which holds a value or codes. Both kinds have `rows()` and `columns()`, and no accessor returns an operand in the
//! wrong precision.
//!
//! | product | a | b | |
//! |---|---|---|---|
//! | fprop `y = x · Wᵀ` | rows of `x` | rows of `W` | |
//! | dgrad `dx = dy · W` | rows of `dy` | columns of `W` | |
//! | wgrad `dW += dyᵀ · x` | columns of `dy` | columns of `x` | into the gradient, in place |
//!
//! The columns of a matrix in codes are a transposed copy, because FP8 products read both operands along the contracted dimension. A transposed copy
//! is a copy of codes. If the two copies have different scales, both are cast from the same values. So FP8 values are never made from other FP8
//! values, with two exceptions. With `memory.saved_activations = "float8"`, backward recomputes operands from compressed activations. To add a
//! micro-batch, E4M3 gradients of weights are widened and cast again.
//!
//! Each product may read the compute type instead (`ProductPrecision::High`, set by `high_precision_products`). Then `Views` holds the value for
//! one product and codes for the other. After forward, a linear keeps only the view that wgrad reads. A `Gathering` is an operand whose all-gather
//! is in flight: the first product that reads it starts with the rows of this rank.

use crate::layer_ranks::{Arriving, ShardPlace};
use ottava_common::error::{Error, Result};
use ottava_tensor::ops::{Operand, transpose};
use ottava_tensor::{QuantizedTensor, Tensor};
use std::cell::{OnceCell, RefCell};
use std::ops::Range;
use std::rc::Rc;

/// The scale of a cast that was computed from the tensor's own values, saved for casting the tensor again. Empty if the slot holds the scale for the
/// whole step, or if each cast computes scales per row or block.
#[derive(Clone, Debug, Default)]
pub struct FrozenScale(Option<Tensor>);

impl FrozenScale {
    /// Wraps the scale F32 `[1]` of one tensor.
    pub fn own(scale: Tensor) -> FrozenScale {
        FrozenScale(Some(scale))
    }

    /// Returns the scale, F32 `[1]`, or `None` if the tensor has no scale of its own.
    pub fn scale(&self) -> Option<&Tensor> {
        self.0.as_ref()
    }

    /// Replaces the scale. An existing scale is overwritten in place.
    pub fn replace(&mut self, by: FrozenScale) -> Result<()> {
        match (&mut self.0, by.0) {
            (Some(old), Some(new)) => old.copy_from(0, &new)?,
            (old, new) => *old = new,
        }
        Ok(())
    }
}

/// A matrix whose rows are being gathered from ranks. The rows are values, or codes with one scale. The first product multiplies this rank's rows
/// while the rows of other ranks arrive.
pub struct Gathering {
    range: Range<usize>,
    ranks: usize,
    /// This rank's rows and the gather of all rows. `None` after the gather has been waited for.
    arriving: RefCell<Option<(Matrix, Arriving)>>,
    all: OnceCell<Matrix>,
    /// The transposed codes of all rows, once they have been computed.
    transposed: OnceCell<QuantizedTensor>,
}

/// A matrix in the compute type, or its codes.
#[derive(Clone)]
pub enum Matrix {
    /// In the compute type.
    Value(Tensor),
    /// Codes that are contracted along the columns.
    Codes(QuantizedTensor),
}

impl Matrix {
    /// Returns the operand that is contracted along the columns.
    pub fn rows(&self) -> Operand<'_> {
        match self {
            Matrix::Value(x) => Operand::plain(x),
            Matrix::Codes(x) => Operand::Rows(x),
        }
    }

    /// Returns the tensor of values or codes.
    pub fn tensor(&self) -> &Tensor {
        match self {
            Matrix::Value(x) => x,
            Matrix::Codes(x) => x.codes.as_ref().expect("they are contracted along the columns"),
        }
    }

    /// Returns the rows in `range`, or `None` if the codes cannot be divided by rows ([`QuantizedTensor::row_range`]).
    pub fn row_range(&self, range: Range<usize>) -> Result<Option<Matrix>> {
        Ok(match self {
            Matrix::Value(x) => Some(Matrix::Value(x.rows(range.start, range.end)?)),
            Matrix::Codes(x) => x.row_range(range)?.map(Matrix::Codes),
        })
    }
}

impl Gathering {
    /// Creates a gather of the rows of all ranks, which are `arriving`. The rank at `place` has the rows `own`.
    pub fn new(own: Matrix, place: ShardPlace, arriving: Arriving) -> Gathering {
        let rows = own.tensor().shape()[0];
        Gathering {
            range: place.rank * rows..(place.rank + 1) * rows,
            ranks: place.ranks,
            arriving: RefCell::new(Some((own, arriving))),
            all: OnceCell::new(),
            transposed: OnceCell::new(),
        }
    }

    /// Returns the number of rows of all ranks.
    pub fn row_count(&self) -> usize {
        self.range.len() * self.ranks
    }

    /// Returns this rank's rows and their range, or `None` once the rows of all ranks have been read.
    pub fn own(&self) -> Option<(Matrix, Range<usize>)> {
        self.arriving.borrow().as_ref().map(|(own, _)| (own.clone(), self.range.clone()))
    }

    /// Runs `work`, which multiplies this rank's rows, while other rows arrive ([`Pending::beside`](ottava_tensor::comm::Pending::beside)).
    pub fn beside<R>(&self, work: impl FnOnce() -> R) -> R {
        match &*self.arriving.borrow() {
            Some((_, Arriving::Coming(pending))) => pending.beside(work),
            Some((_, Arriving::Here(_))) | None => work(),
        }
    }

    /// Returns the rows of all ranks. The first call waits for them.
    pub fn all(&self) -> Result<&Matrix> {
        if let Some((own, arriving)) = self.arriving.take() {
            let all = arriving.wait()?;
            let all = match own {
                Matrix::Value(_) => Matrix::Value(all),
                Matrix::Codes(own) => Matrix::Codes(QuantizedTensor { rows: all.shape()[0], codes: Some(all), ..own }),
            };
            return Ok(self.all.get_or_init(|| all));
        }
        let words = "the gather of rows was lost in an earlier call".to_string();
        self.all.get().ok_or(Error::Rank { rank: self.range.start / self.range.len().max(1), words })
    }

    /// Returns the operand of all rows that is contracted along the rows.
    fn columns(&self) -> Result<Operand<'_>> {
        let all = self.all()?;
        let codes = match all {
            Matrix::Value(x) => return Ok(Operand::plain_transposed(x)),
            Matrix::Codes(codes) => codes,
        };
        if self.transposed.get().is_none() {
            let transposed = Some(transpose(all.tensor())?);
            self.transposed.get_or_init(|| QuantizedTensor { codes: None, transposed, ..codes.clone() });
        }
        Ok(Operand::Columns(self.transposed.get().expect("set above")))
    }
}

/// A matrix in the form in which one product reads it.
#[derive(Clone)]
pub enum View {
    /// In the compute type.
    Value(Tensor),
    /// Rows that are gathered from several ranks.
    Gathering(Rc<Gathering>),
    /// In FP8.
    Codes(QuantizedTensor),
    /// In FP8 for the product of the linear, and in the compute type for its adapter.
    CodesAndValue(QuantizedTensor, Tensor),
}

impl View {
    /// Returns the operand that is contracted along the columns of the matrix.
    pub fn rows(&self) -> Result<Operand<'_>> {
        Ok(match self {
            View::Value(x) => Operand::plain(x),
            View::Gathering(x) => x.all()?.rows(),
            View::Codes(x) | View::CodesAndValue(x, _) => Operand::Rows(x),
        })
    }

    /// Returns the operand that is contracted along the rows of the matrix.
    pub fn columns(&self) -> Result<Operand<'_>> {
        Ok(match self {
            View::Value(x) => Operand::plain_transposed(x),
            View::Gathering(x) => x.columns()?,
            View::Codes(x) | View::CodesAndValue(x, _) => Operand::Columns(x),
        })
    }

    /// Returns the number of rows of the matrix.
    pub fn row_count(&self) -> usize {
        match self {
            View::Value(x) => x.shape()[0],
            View::Gathering(x) => x.row_count(),
            View::Codes(x) | View::CodesAndValue(x, _) => x.rows,
        }
    }

    /// Returns the rows in `range` for [`View::rows`], or `None` if their scales cannot be divided by rows ([`QuantizedTensor::row_range`]).
    pub fn row_range(&self, range: Range<usize>) -> Result<Option<View>> {
        let value = |x: &Tensor| x.rows(range.start, range.end);
        Ok(match self {
            View::Value(x) => Some(View::Value(value(x)?)),
            View::Gathering(x) => x.all()?.row_range(range)?.map(View::from),
            View::Codes(x) => x.row_range(range)?.map(View::Codes),
            View::CodesAndValue(codes, x) => {
                let x = value(x)?;
                codes.row_range(range)?.map(|codes| View::CodesAndValue(codes, x))
            }
        })
    }

    /// Returns the matrix in the compute type, which an adapter reads.
    ///
    /// Panics if the matrix was cast for a linear without adapters.
    pub fn value(&self) -> Result<&Tensor> {
        match self {
            View::Value(x) | View::CodesAndValue(_, x) => Ok(x),
            View::Gathering(x) => match x.all()? {
                Matrix::Value(x) => Ok(x),
                Matrix::Codes(_) => unreachable!("operands of linears with adapters keep their values"),
            },
            View::Codes(_) => unreachable!("operands of linears with adapters keep their values"),
        }
    }
}

impl From<Matrix> for View {
    fn from(matrix: Matrix) -> View {
        match matrix {
            Matrix::Value(x) => View::Value(x),
            Matrix::Codes(x) => View::Codes(x),
        }
    }
}

/// A matrix in the forms that two products read.
#[derive(Clone)]
pub struct Views {
    /// The form contracted along the columns.
    pub rows: View,
    /// The form contracted along the rows.
    pub columns: View,
}

impl Views {
    /// Returns the two views of codes that have both copies.
    pub fn of_codes(codes: QuantizedTensor) -> Views {
        Views { rows: View::Codes(codes.only_rows()), columns: View::Codes(codes.only_transposed()) }
    }
}

/// The gradient of the residual stream, `[T, C]`, with its amax, F32 `[1]`, if the next cast needs it.
#[derive(Clone, Debug)]
pub struct ResidualGradient {
    /// The gradient.
    pub value: Tensor,
    /// The amax of the gradient, for current scaling.
    pub amax: Option<Tensor>,
}

impl From<Tensor> for ResidualGradient {
    fn from(value: Tensor) -> ResidualGradient {
        ResidualGradient { value, amax: None }
    }
}
