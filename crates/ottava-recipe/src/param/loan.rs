//! Weights that are lent to a unit for one pass: gathered from ranks, or copied from host memory.

use super::id::ParamId;
use ottava_tensor::{QuantizedTensor, Tensor};

/// Weights on loan to a unit for one pass, by parameter: values, codes, or both. A parameter without an entry uses its stored weights.
#[derive(Default)]
pub struct Loan(Vec<(ParamId, LoanedWeight)>);

/// A weight that is lent for one pass.
pub enum LoanedWeight {
    /// The weight in the form of [`Weights::value`](super::Weights::value).
    Value(Tensor),
    /// A device copy of [`Weights::read_from`](super::Weights::read_from).
    Stored(Tensor),
    /// The codes of the weight's cast.
    Codes(QuantizedTensor),
}

impl Loan {
    /// Returns an empty loan: all weights are on the device.
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

    /// Returns whether the loan has a weight of the parameter.
    pub fn has(&self, param: ParamId) -> bool {
        self.of(param).next().is_some()
    }

    /// Returns all lent weights, by parameter.
    pub fn into_weights(self) -> Vec<(ParamId, LoanedWeight)> {
        self.0
    }

    /// Returns the values on loan to a parameter.
    pub(super) fn values(&self, param: ParamId) -> Option<&LoanedWeight> {
        self.of(param).find(|weight| !matches!(weight, LoanedWeight::Codes(_)))
    }

    /// Returns the codes on loan to a parameter.
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
