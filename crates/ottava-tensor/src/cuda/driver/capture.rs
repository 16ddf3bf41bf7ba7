//! Captures of the compute stream as graphs.

use super::{Context, Handle};
use crate::error::Result;
use std::ptr::null_mut;

/// The capture mode that allows memory allocations, which are not stream operations.
const CAPTURE_RELAXED: i32 = 2;

impl Context {
    /// Returns whether the compute stream captures a graph.
    pub(in crate::cuda) fn is_capturing(&self) -> Result<bool> {
        self.bind()?;
        let mut state = 0;
        // SAFETY: the driver writes one int.
        self.check(unsafe { (self.api.stream_is_capturing)(self.stream(), &mut state) }, "cuStreamIsCapturing")?;
        Ok(state != 0)
    }

    /// Starts capturing the work of the compute stream.
    pub(in crate::cuda) fn begin_capture(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream lives until `Drop`.
        let status = unsafe { (self.api.stream_begin_capture)(self.stream(), CAPTURE_RELAXED) };
        self.check(status, "cuStreamBeginCapture")
    }

    /// Ends the capture and instantiates the graph.
    pub(in crate::cuda) fn end_capture(&self) -> Result<Handle> {
        self.bind()?;
        let (mut graph, mut replayable) = (null_mut(), null_mut());
        // SAFETY: the driver writes one handle, or null if the capture was invalidated.
        self.check(unsafe { (self.api.stream_end_capture)(self.stream(), &mut graph) }, "cuStreamEndCapture")?;
        // SAFETY: `graph` is the handle just written, and the instantiated graph does not refer to it.
        let made = unsafe {
            let status = (self.api.graph_instantiate)(&mut replayable, graph, 0);
            (self.api.graph_destroy)(graph);
            status
        };
        self.check(made, "cuGraphInstantiate")?;
        Ok(replayable)
    }

    /// Launches a captured graph.
    ///
    /// # Safety
    /// `graph` came from [`Context::end_capture`], and the memory that it uses is still allocated.
    pub(in crate::cuda) unsafe fn launch_graph(&self, graph: Handle) -> Result<()> {
        self.bind()?;
        self.record_launch("a captured graph");
        // SAFETY: the caller's promise.
        self.check(unsafe { (self.api.graph_launch)(graph, self.stream()) }, "cuGraphLaunch")
    }

    /// Frees a captured graph.
    ///
    /// # Safety
    /// `graph` came from [`Context::end_capture`] and is not used afterwards.
    pub(in crate::cuda) unsafe fn destroy_graph(&self, graph: Handle) {
        // SAFETY: the caller's promise. A failure is ignored.
        unsafe { (self.api.graph_exec_destroy)(graph) };
    }
}
