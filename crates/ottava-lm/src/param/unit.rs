//! Units of a model: parameters that a pass needs together. Where their weights come from, and where their gradients go.

use super::{Loan, Param};
use crate::error::Result;

/// A unit of a model, numbered in the order of forward: the embedding, learned positions, each block, the last norm and the head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitId(pub usize);

/// A parameter's place in its model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParamId {
    /// Its unit.
    pub unit: UnitId,
    /// Its number in the unit, in the order in which the unit was built.
    pub index: usize,
}

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
