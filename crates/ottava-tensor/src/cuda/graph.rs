//! CUDA graphs: a step is captured once and replayed with one call.
//!
//! A graph lists the memory that it uses (`Footprint` in `pool.rs`). If a block of this memory has another owner now, `Graph::is_valid` returns
//! false, and the work must be captured again. A graph contains addresses, not values: numbers that change from step to step, such as the learning
//! rate, are in device memory.

use super::device::CudaDevice;
use super::driver::Handle;
use super::lock::lock;
use super::pool::Footprint;
use crate::error::{Error, Result};
use std::sync::Arc;

/// A captured graph and the memory it uses.
pub struct Graph {
    device: Arc<CudaDevice>,
    /// `None` in a dry run.
    graph: Option<Handle>,
    footprint: Footprint,
}

// SAFETY: a graph may be used from any thread with its context bound, by one at a time: `replay` takes `&mut self`.
unsafe impl Send for Graph {}

impl Graph {
    /// Captures what `work` enqueues instead of running it. Its kernels and products must have run before, since compiling and timing
    /// cannot be captured, and it must not synchronise. If `work` fails, nothing runs and its error is returned.
    pub fn capture<E: From<Error>>(device: &Arc<CudaDevice>, work: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        device.context().map_or(Ok(()), |context| context.begin_capture())?;
        lock(device.pool()).begin_capture();
        let outcome = work();
        let footprint = lock(device.pool()).end_capture();
        // The capture must end even if the work failed; its own error is ignored then.
        let graph = device.context().map(|context| context.end_capture()).transpose();
        outcome?;
        Ok(Graph { device: device.clone(), graph: graph?, footprint })
    }

    /// Whether every buffer that was live at the end of the capture still is, and memory freed during the capture is still free. If not,
    /// the work must be captured again.
    pub fn is_valid(&mut self) -> bool {
        lock(self.device.pool()).is_intact(&mut self.footprint)
    }

    /// Enqueues the graph. Errors if it is no longer valid.
    pub fn replay(&mut self) -> Result<()> {
        if !self.is_valid() {
            return Err(Error::Value("memory of a captured graph has changed its owner; capture it again".into()));
        }
        let (Some(context), Some(graph)) = (self.device.context(), self.graph) else { return Ok(()) };
        // SAFETY: `is_valid` holds: buffers that outlived the capture are live with the same owners, and the memory of the others is
        // free; its next owner's work is enqueued after this.
        unsafe { context.launch_graph(graph) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let (Some(context), Some(graph)) = (self.device.context(), self.graph) else { return };
        // SAFETY: captured in `capture`, not used again. The driver completes a running graph first.
        unsafe { context.destroy_graph(graph) };
    }
}
