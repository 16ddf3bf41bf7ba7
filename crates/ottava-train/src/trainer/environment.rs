//! What a run has from its start to its end.

use super::inputs::Inputs;
use crate::plan::ResolvedRun;
use ottava_parallel::Ranks;
use ottava_settings::RunConfig;
use ottava_tensor::Device;
use std::rc::Rc;

/// The settings, inputs and ranks of a run, which no step changes.
pub(super) struct Environment {
    pub(super) config: RunConfig,
    /// The resolved settings, and the plan for the message when memory runs out.
    pub(super) resolved: ResolvedRun,
    pub(super) device: Device,
    pub(super) ranks: Rc<Ranks>,
    pub(super) inputs: Inputs,
}
