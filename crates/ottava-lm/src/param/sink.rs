//! What happens to gradients while backward makes them.

use super::Param;
use crate::error::Result;

/// Takes the gradients of a micro-batch, unit by unit as backward makes them: of the head, the blocks from the last to the first, the
/// embedding.
pub trait GradientSink {
    /// Backward is about to add to the gradients of these parameters of a unit.
    fn begin(&mut self, params: &mut [&mut Param]) -> Result<()>;

    /// Backward has added all that this micro-batch adds to the gradients of a unit.
    fn end(&mut self, params: &mut [&mut Param]) -> Result<()>;
}

/// Leaves gradients where they are made.
pub struct KeepGradients;

impl GradientSink for KeepGradients {
    fn begin(&mut self, _: &mut [&mut Param]) -> Result<()> {
        Ok(())
    }

    fn end(&mut self, _: &mut [&mut Param]) -> Result<()> {
        Ok(())
    }
}
