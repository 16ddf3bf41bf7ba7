//! Parameters whose weights are taken out, for ranks to divide after loading, and put back whole, for inference.

use super::Param;
use crate::param::LoanedWeight;
use crate::param::ownership::Ownership;
use ottava_tensor::MemoryKind;

impl Param {
    /// Takes the values and codes that a frozen matrix stores, so that ranks can divide them. Passes get them as a loan.
    pub fn take_frozen(&mut self) -> Vec<LoanedWeight> {
        assert!(!self.is_trained(), "only weights that no update writes are taken out");
        self.ownership = Ownership::Frozen(None);
        let value = self.weights.take_value().map(LoanedWeight::Value);
        let codes = self.cast.as_mut().and_then(|cast| cast.codes.take()).map(LoanedWeight::Codes);
        value.into_iter().chain(codes).collect()
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
