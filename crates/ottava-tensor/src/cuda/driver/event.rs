//! Events, which time work and order streams.

use super::{Context, Handle, Stream};
use crate::error::Result;
use std::ptr::null_mut;
use std::sync::Arc;

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;

/// A CUDA event.
pub struct Event {
    context: Arc<Context>,
    event: Handle,
}

// SAFETY: an event handle may be used from any thread with its context bound.
unsafe impl Send for Event {}
// SAFETY: see `Send`.
unsafe impl Sync for Event {}

impl Event {
    /// Records an event with timing in the compute stream.
    pub(in crate::cuda) fn record(context: &Arc<Context>) -> Result<Event> {
        Event::mark(context, Stream::Compute, 0)
    }

    /// Records an event in `stream` for other streams to wait for.
    pub(in crate::cuda) fn end_of(context: &Arc<Context>, stream: Stream) -> Result<Event> {
        Event::mark(context, stream, DISABLE_TIMING)
    }

    fn mark(context: &Arc<Context>, stream: Stream, flags: u32) -> Result<Event> {
        context.bind()?;
        let mut event = null_mut();
        // SAFETY: the driver writes one handle, and `Drop` destroys it.
        context.check(unsafe { (context.api.event_create)(&mut event, flags) }, "cuEventCreate")?;
        let event = Event { context: context.clone(), event };
        // SAFETY: both handles live.
        context.check(unsafe { (context.api.event_record)(event.event, context.handle(stream)) }, "cuEventRecord")?;
        Ok(event)
    }

    /// Makes later work in `stream` wait for the event.
    pub(in crate::cuda) fn make_wait(&self, stream: Stream) -> Result<()> {
        let context = &self.context;
        context.bind()?;
        context.note_wait(stream);
        // SAFETY: both handles live, and the driver does not use the event after the call.
        let status = unsafe { (context.api.stream_wait_event)(context.handle(stream), self.event, 0) };
        context.check(status, "cuStreamWaitEvent")
    }

    /// Makes the host wait for the event.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let context = &self.context;
        context.bind()?;
        // SAFETY: the event lives.
        let status = context.waiting(|| unsafe { (context.api.event_synchronize)(self.event) });
        context.check(status, "cuEventSynchronize")
    }

    /// Returns the milliseconds of device time from `self` to `later`. Waits for `later`.
    pub fn milliseconds_until(&self, later: &Event) -> Result<f32> {
        later.synchronize()?;
        let context = &self.context;
        let mut milliseconds = 0.0;
        // SAFETY: the driver writes one float, and both events have completed.
        let status = unsafe { (context.api.event_elapsed)(&mut milliseconds, self.event, later.event) };
        context.check(status, "cuEventElapsedTime")?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: `mark` created the event, and the driver frees it after the event completes.
        unsafe {
            (self.context.api.context_set)(self.context.context);
            (self.context.api.event_destroy)(self.event);
        }
    }
}
