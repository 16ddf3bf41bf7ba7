//! CUDA graphs: the work of a step recorded once and enqueued again with one call.

use super::CudaDevice;
use super::driver::Handle;
use crate::error::Result;
use std::sync::Arc;

/// Recorded work. It names the memory it was recorded with, which must still be allocated when it is replayed.
pub struct Graph {
    device: Arc<CudaDevice>,
    graph: Handle,
}

// SAFETY: a graph may be used from any thread with its context bound, by one at a time: `replay` takes `&mut self`.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `work` enqueues instead of running it. Kernels and products must have run once before, since
    /// compiling and timing cannot be recorded; memory must not come from the driver meanwhile.
    pub fn capture(device: &Arc<CudaDevice>, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        device.context.begin_capture()?;
        let outcome = work();
        // The stream must leave the recording state also when the work failed, and then says so itself.
        let graph = device.context.end_capture();
        outcome?;
        Ok(Graph { device: device.clone(), graph: graph? })
    }

    /// Enqueues the recorded work.
    ///
    /// # Safety
    /// All memory that was in use during the recording is still allocated to the same owners.
    pub unsafe fn replay(&mut self) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.device.context.launch_graph(self.graph) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: recorded in `capture`, not used again. A graph on the stream runs to its end first.
        unsafe { self.device.context.destroy_graph(self.graph) };
    }
}
