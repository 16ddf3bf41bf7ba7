//! Units of a model: parameters that a pass needs together. Where their weights come from, and where their gradients go.

use super::id::UnitId;
use super::{Loan, Param};
use crate::error::Result;

/// What a pass does with weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Products read them by rows.
    Forward,
    /// Products read them by rows and by columns.
    Backward,
}

/// Brings the weights of units to this process, and takes their gradients.
pub trait Units {
    /// Starts to bring the weights of a unit.
    fn start(&mut self, unit: UnitId) -> Result<()>;

    /// The weights of parameters of one unit, which was started; nothing for those that this process has.
    fn fetch(&mut self, params: &[&Param], direction: Direction) -> Result<Loan>;

    /// Backward is about to add to the gradients of these parameters of a unit.
    fn begin_gradients(&mut self, params: &mut [&mut Param]) -> Result<()>;

    /// Backward has added all that this micro-batch adds to the gradients of a unit.
    fn end_gradients(&mut self, params: &mut [&mut Param]) -> Result<()>;
}

/// Units whose weights and gradients this process has as a whole.
pub struct Resident;

impl Units for Resident {
    fn start(&mut self, _: UnitId) -> Result<()> {
        Ok(())
    }

    fn fetch(&mut self, _: &[&Param], _: Direction) -> Result<Loan> {
        Ok(Loan::default())
    }

    fn begin_gradients(&mut self, _: &mut [&mut Param]) -> Result<()> {
        Ok(())
    }

    fn end_gradients(&mut self, _: &mut [&mut Param]) -> Result<()> {
        Ok(())
    }
}
