//! Weights that a unit reads from elsewhere for one pass: gathered from ranks, or copied from host memory.

use super::{Param, ParamId};
use crate::error::Result;
use ottava_tensor::{HostTransfer, QuantizedTensor, Tensor};

/// Weights on loan to a unit for one pass, by parameter. Parameters without an entry read their own.
#[derive(Default)]
pub struct Loan(Vec<(ParamId, LoanedWeight)>);

/// A weight for the time of a pass.
pub enum LoanedWeight {
    /// As [`Param::value`] gives it.
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

    /// Adds the weight of `param`.
    pub fn add(&mut self, param: &Param, weight: LoanedWeight) {
        self.0.push((param.id(), weight));
    }

    /// Adds the weights of `other`.
    pub fn extend(&mut self, other: Loan) {
        self.0.extend(other.0);
    }

    /// Starts to copy those of `params` that are in host memory, and `others`, whose copies are returned.
    ///
    /// On a CPU no weight is copied, since device memory is host memory.
    pub fn prefetch(params: &[&Param], others: &[&Tensor]) -> Result<(Loan, Vec<Tensor>, HostTransfer)> {
        let offloaded: Vec<_> = params.iter().filter(|param| param.is_in_host_memory()).collect();
        let weights = offloaded.iter().map(|param| param.weights.read_from());
        let tensors: Vec<&Tensor> = others.iter().copied().chain(weights).collect();
        let (mut copies, transfer) = HostTransfer::upload(&tensors)?;
        let weights = copies.split_off(others.len()).into_iter().map(LoanedWeight::Stored);
        let loan = offloaded.iter().map(|param| param.id()).zip(weights).collect();
        Ok((Loan(loan), copies, transfer))
    }

    /// The weight on loan to `param`.
    pub(super) fn of(&self, param: &Param) -> Option<&LoanedWeight> {
        self.0.iter().find(|(id, _)| *id == param.id()).map(|(_, weight)| weight)
    }

    /// The codes on loan to `param`.
    pub(super) fn codes_of(&self, param: &Param) -> Option<&QuantizedTensor> {
        match self.of(param)? {
            LoanedWeight::Codes(codes) => Some(codes),
            LoanedWeight::Value(_) | LoanedWeight::Stored(_) => None,
        }
    }
}
