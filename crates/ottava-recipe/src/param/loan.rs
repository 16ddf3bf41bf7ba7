//! Weights that are lent to a unit for one pass: gathered from ranks, or copied from host memory.

use super::id::ParamId;
use ottava_tensor::{QuantizedTensor, Tensor};

/// Weights on loan to a unit for one pass, by parameter: its values, its codes, or both. Parameters without an entry read their own.
#[derive(Default)]
pub struct Loan(Vec<(ParamId, LoanedWeight)>);

/// A weight lent for one pass.
pub enum LoanedWeight {
    /// In the form of [`Weights::value`](super::Weights::value).
    Value(Tensor),
    /// A copy of [`Weights::read_from`](super::Weights::read_from).
    Stored(Tensor),
    /// The codes of its cast.
    Codes(QuantizedTensor),
}

impl Loan {
    /// No loans: all weights are on the device.
    pub fn none() -> &'static Loan {
        static NONE: Loan = Loan(Vec::new());
        &NONE
    }

    /// Adds the weight of a parameter.
    pub fn add(&mut self, param: ParamId, weight: LoanedWeight) {
        self.0.push((param, weight));
    }

    /// Adds the weights of `other`.
    pub fn extend(&mut self, other: Loan) {
        self.0.extend(other.0);
    }

    /// All weights, by parameter.
    pub fn into_weights(self) -> Vec<(ParamId, LoanedWeight)> {
        self.0
    }

    /// The values on loan to a parameter.
    pub(super) fn values(&self, param: ParamId) -> Option<&LoanedWeight> {
        self.of(param).find(|weight| !matches!(weight, LoanedWeight::Codes(_)))
    }

    /// The codes on loan to a parameter.
    pub(super) fn codes(&self, param: ParamId) -> Option<&QuantizedTensor> {
        self.of(param).find_map(|weight| match weight {
            LoanedWeight::Codes(codes) => Some(codes),
            LoanedWeight::Value(_) | LoanedWeight::Stored(_) => None,
        })
    }

    fn of(&self, param: ParamId) -> impl Iterator<Item = &LoanedWeight> {
        self.0.iter().filter(move |(id, _)| *id == param).map(|(_, weight)| weight)
    }
}
