//! CUDA graphs: the work of a step recorded once and enqueued again with one call.

use super::device::CudaDevice;
use super::driver::Handle;
use super::lock::lock;
use super::pool::Footprint;
use crate::error::{Error, Result};
use std::sync::Arc;

/// Recorded work, with the memory that it names.
pub struct Graph {
    device: Arc<CudaDevice>,
    /// `None` in a dry run.
    graph: Option<Handle>,
    footprint: Footprint,
}

// SAFETY: a graph may be used from any thread with its context bound, by one at a time: `replay` takes `&mut self`.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `work` enqueues instead of running it. Kernels and products must have run once before, since
    /// compiling and timing cannot be recorded; nothing may wait for the device meanwhile. Work that fails is not recorded, and whatever it has enqueued does not run.
    pub fn capture<E: From<Error>>(device: &Arc<CudaDevice>, work: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        device.context().map_or(Ok(()), |context| context.begin_capture())?;
        lock(device.pool()).begin_recording();
        let outcome = work();
        let footprint = lock(device.pool()).end_recording();
        // The stream must leave the recording state also when the work failed, and then says so itself.
        let graph = device.context().map(|context| context.end_capture()).transpose();
        outcome?;
        Ok(Graph { device: device.clone(), graph: graph?, footprint })
    }

    /// Whether all memory that was in use during the recording still belongs to the same owners, and what was given back
    /// meanwhile to nobody: otherwise the work must be recorded anew.
    pub fn is_valid(&mut self) -> bool {
        lock(self.device.pool()).holds(&mut self.footprint)
    }

    /// Enqueues the recorded work. An error where it is no longer valid.
    pub fn replay(&mut self) -> Result<()> {
        if !self.is_valid() {
            return Err(Error::Value("memory that recorded work names has changed its owner".into()));
        }
        let (Some(context), Some(graph)) = (self.device.context(), self.graph) else { return Ok(()) };
        // SAFETY: the work was recorded from calls that had buffers for all they name. Those that outlived the recording are
        // there, with the same owners; the others' memory is free, and whoever takes it next is served after this work.
        unsafe { context.launch_graph(graph) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let (Some(context), Some(graph)) = (self.device.context(), self.graph) else { return };
        // SAFETY: recorded in `capture`, not used again. A graph on the stream runs to its end first.
        unsafe { context.destroy_graph(graph) };
    }
}
