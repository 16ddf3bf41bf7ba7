//! A frozen parameter that ranks divide: passes get it as a loan.

use super::{Param, Placement};
use crate::param::LoanedWeight;

impl Param {
    /// Takes out what a frozen matrix stores, value or codes or both, for ranks to divide.
    pub fn take_frozen(&mut self) -> Vec<LoanedWeight> {
        assert!(self.frozen, "only weights that no update writes are taken out");
        self.placement = Placement::Gathered;
        let value = self.weights.take_value().map(LoanedWeight::Value);
        let codes = self.cast.as_mut().and_then(|cast| cast.codes.take()).map(LoanedWeight::Codes);
        value.into_iter().chain(codes).collect()
    }

    /// Puts back a whole weight of [`Param::take_frozen`].
    pub fn put_frozen(&mut self, weight: LoanedWeight) {
        self.placement = Placement::Device;
        match weight {
            LoanedWeight::Value(value) | LoanedWeight::Stored(value) => self.weights.set_value(value),
            LoanedWeight::Codes(codes) => self.cast.as_mut().expect("its codes are of its cast").codes = Some(codes),
        }
    }
}
