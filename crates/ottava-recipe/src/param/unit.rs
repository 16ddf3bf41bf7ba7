//! Units of a model, whose parameters a pass reads together: where their weights come from, and where their gradients go.

use super::{Loan, Param};
use ottava_common::error::Result;

/// How a pass reads weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Products read them by rows.
    Forward,
    /// Products read them by rows and by columns.
    Backward,
}

/// Fetches the weights of units, and receives their gradients.
pub trait Units {
    /// Starts to fetch the weights of the unit with these parameters.
    fn start(&mut self, params: &[&Param]) -> Result<()>;

    /// Waits for the weights of a unit that was started. The loan has no entry for parameters that this process stores.
    fn fetch(&mut self, params: &[&Param], direction: Direction) -> Result<Loan>;

    /// Called before backward adds to the gradients of these parameters of a unit.
    fn begin_gradients(&mut self, params: &mut [&mut Param]) -> Result<()>;

    /// Called after backward of a micro-batch has added to all gradients of a unit.
    fn end_gradients(&mut self, params: &mut [&mut Param]) -> Result<()>;
}

/// Units whose weights and gradients this process stores whole.
pub struct Resident;

impl Units for Resident {
    fn start(&mut self, _: &[&Param]) -> Result<()> {
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
