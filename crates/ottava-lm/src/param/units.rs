//! What surrounds the units of a model (the embedding, each block, the head) in a pass: where their weights come from, and where their
//! gradients go.

use super::{Fetched, Param};
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
    /// Starts to bring the weights of parameters of a unit.
    fn start(&mut self, params: &[&Param]) -> Result<()>;

    /// The weights of parameters that were started; nothing for those that are here.
    fn fetch(&mut self, params: &[&Param], direction: Direction) -> Result<Fetched>;

    /// Backward is about to add to the gradients of these parameters of a unit.
    fn begin_gradients(&mut self, params: &mut [&mut Param]) -> Result<()>;

    /// Backward has added all that this micro-batch adds to the gradients of a unit.
    fn end_gradients(&mut self, params: &mut [&mut Param]) -> Result<()>;
}

/// Units that are here as a whole, and keep their gradients.
pub struct Resident;

impl Units for Resident {
    fn start(&mut self, _: &[&Param]) -> Result<()> {
        Ok(())
    }

    fn fetch(&mut self, _: &[&Param], _: Direction) -> Result<Fetched> {
        Ok(Fetched::default())
    }

    fn begin_gradients(&mut self, _: &mut [&mut Param]) -> Result<()> {
        Ok(())
    }

    fn end_gradients(&mut self, _: &mut [&mut Param]) -> Result<()> {
        Ok(())
    }
}
