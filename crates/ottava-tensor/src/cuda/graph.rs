//! CUDA graphs: a step is captured once and replayed with one call.
//!
//! A graph lists the memory that it uses (`Footprint` in `pool.rs`). If a block of this memory has another owner, `Graph::is_valid` returns
//! false, and the work must be captured again. A graph contains addresses, not values. Numbers that change from step to step, such as the learning
//! rate, are in device memory.

use super::device::CudaDevice;
use super::driver::Handle;
use super::lock::lock;
use super::pool::Footprint;
use crate::error::{Error, Result};
use std::sync::Arc;

/// A captured graph and the memory that it uses.
pub struct Graph {
    device: Arc<CudaDevice>,
    /// The handle of the graph, and `None` in a dry run.
    graph: Option<Handle>,
    footprint: Footprint,
}

// SAFETY: a graph may be used from any thread with its context bound. One thread uses it at a time, because `replay` takes `&mut self`.
unsafe impl Send for Graph {}

impl Graph {
    /// Captures the work that `work` enqueues instead of running it. The kernels and products of `work` must have run before, because compiling and
    /// timing cannot be captured. `work` must not synchronise. If `work` fails, nothing runs and `capture` returns the error.
    pub fn capture<E: From<Error>>(device: &Arc<CudaDevice>, work: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        device.context().map_or(Ok(()), |context| context.begin_capture())?;
        lock(device.pool()).begin_capture();
        let outcome = work();
        let footprint = lock(device.pool()).end_capture();
        // The capture must end even if the work failed. In this case, an error of the end is ignored.
        let graph = device.context().map(|context| context.end_capture()).transpose();
        outcome?;
        Ok(Graph { device: device.clone(), graph: graph?, footprint })
    }

    /// Returns whether the buffers that were live at the end of the capture are still live, and memory that was freed during the capture is still
    /// free. If not, the work must be captured again.
    pub fn is_valid(&mut self) -> bool {
        lock(self.device.pool()).is_intact(&mut self.footprint)
    }

    /// Enqueues the graph. An invalid graph is an error.
    pub fn replay(&mut self) -> Result<()> {
        if !self.is_valid() {
            return Err(Error::Value("memory of a captured graph has changed its owner; capture it again".into()));
        }
        let (Some(context), Some(graph)) = (self.device.context(), self.graph) else { return Ok(()) };
        // SAFETY: the graph is valid. Buffers that outlived the capture are live with the same owners, and the other memory of the graph is free. The
        // work of the next owner of free memory is enqueued after this launch.
        unsafe { context.launch_graph(graph) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let (Some(context), Some(graph)) = (self.device.context(), self.graph) else { return };
        // SAFETY: `capture` captured the graph, and nothing uses it afterwards. The driver completes a running graph first.
        unsafe { context.destroy_graph(graph) };
    }
}
