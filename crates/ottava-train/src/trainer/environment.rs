//! The parts of a run that stay the same from its start to its end.

use super::inputs::Inputs;
use crate::plan::ResolvedRun;
use ottava_parallel::Ranks;
use ottava_settings::RunConfig;
use ottava_tensor::Device;
use std::rc::Rc;

/// The settings, inputs and ranks of a run, which no step changes.
pub(super) struct Environment {
    pub(super) config: RunConfig,
    /// The resolved settings, and the plan, which an error message shows if memory runs out.
    pub(super) resolved: ResolvedRun,
    pub(super) device: Device,
    pub(super) ranks: Rc<Ranks>,
    pub(super) inputs: Inputs,
}
