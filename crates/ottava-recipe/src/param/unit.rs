//! Units of a model: a pass reads the parameters of a unit together. This module decides where their weights come from and where their gradients go.

use super::{Loan, Param};
use ottava_common::error::Result;

/// The direction of a pass, which decides how it reads weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Products read weights by rows.
    Forward,
    /// Products read weights by rows and by columns.
    Backward,
}

/// Fetches the weights of units, and receives their gradients.
pub trait Units {
    /// Starts to fetch the weights of the unit with these parameters.
    fn start(&mut self, params: &[&Param]) -> Result<()>;

    /// Waits for the weights of a unit whose fetch was started. The loan has no entry for parameters that this process stores.
    fn fetch(&mut self, params: &[&Param], direction: Direction) -> Result<Loan>;

    /// Prepares these parameters of a unit before backward adds to their gradients.
    fn begin_gradients(&mut self, params: &mut [&mut Param]) -> Result<()>;

    /// Finishes a unit after backward of a micro-batch has added to all its gradients.
    fn end_gradients(&mut self, params: &mut [&mut Param]) -> Result<()>;
}

/// Units whose weights and gradients are entirely stored by this process.
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
