//! Parameters whose weights are taken out, for ranks to divide after loading, and put back whole, for inference or for a while.

use super::Param;
use crate::param::ownership::Ownership;
use crate::param::{Loan, LoanedWeight};
use crate::scaling::Casts;
use ottava_common::error::Result;
use ottava_tensor::ops::CodeCopies;
use ottava_tensor::{MemoryKind, QuantizedTensor, Tensor};
use std::mem;

/// What forward passes without a loan read of a weight. The default is nothing.
#[derive(Default)]
pub struct ForwardWeight {
    /// The values. Forward computes missing values from master weights.
    pub value: Option<Tensor>,
    /// The codes by rows. Forward casts the values if codes are missing.
    pub codes: Option<QuantizedTensor>,
}

impl ForwardWeight {
    /// Returns the tensors of values, codes and scales.
    pub fn tensors(&mut self) -> impl Iterator<Item = &mut Tensor> {
        let codes = self.codes.iter_mut().flat_map(|codes| codes.codes.iter_mut().chain([&mut codes.scale_inv]));
        self.value.iter_mut().chain(codes)
    }

    /// Returns the same tensors as [`ForwardWeight::tensors`].
    pub fn into_tensors(self) -> impl Iterator<Item = Tensor> {
        let codes = self.codes.into_iter().flat_map(|codes| codes.codes.into_iter().chain([codes.scale_inv]));
        self.value.into_iter().chain(codes)
    }
}

impl Param {
    /// Takes the values and codes that a frozen matrix stores, so that ranks can divide them. Passes get them as a loan.
    pub fn take_frozen(&mut self) -> Vec<LoanedWeight> {
        assert!(!self.is_trained(), "only weights that no update writes are taken out");
        self.ownership = Ownership::Frozen(None);
        let value = self.weights.take_value().map(LoanedWeight::Value);
        let codes = self.cast.as_mut().and_then(|cast| cast.codes.take()).map(LoanedWeight::Codes);
        value.into_iter().chain(codes).collect()
    }

    /// Returns what forward reads of a weight on `loan`: codes if FP8 products read codes, otherwise values. A weight that is lent as values is cast now.
    pub fn for_forward(&self, loan: &Loan, casts: &mut Casts) -> Result<ForwardWeight> {
        Ok(match &self.cast {
            Some(cast) if cast.copies != CodeCopies::Columns => {
                ForwardWeight { value: None, codes: Some(self.codes_for_forward(loan, casts)?.only_rows()) }
            }
            _ => ForwardWeight { value: Some(self.read(loan)?), codes: None },
        })
    }

    /// Exchanges what forward passes without a loan read with `weight`. A second call restores what the parameter stored. In between, no update may run.
    pub fn exchange(&mut self, weight: &mut ForwardWeight) {
        self.weights.exchange_value(&mut weight.value);
        if let Some(cast) = &mut self.cast {
            mem::swap(&mut cast.codes, &mut weight.codes);
        }
    }

    /// Replaces a slice, or the frozen matrix of [`Param::take_frozen`], by the whole `weight` for inference.
    pub fn put_whole(&mut self, weight: LoanedWeight) {
        self.ownership = match self.ownership {
            Ownership::Whole(_) | Ownership::Sliced(_) => Ownership::Whole(MemoryKind::Device),
            Ownership::Frozen(_) => Ownership::Frozen(Some(MemoryKind::Device)),
        };
        match weight {
            LoanedWeight::Value(value) | LoanedWeight::Stored(value) => self.weights.set_value(value),
            LoanedWeight::Codes(codes) => self.cast.as_mut().expect("its codes are of its cast").codes = Some(codes),
        }
    }
}
