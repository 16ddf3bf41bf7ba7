//! Points in streams: for timing, and for one stream to wait for another.

use super::{Context, Handle, Lane};
use crate::error::Result;
use std::ptr::null_mut;
use std::sync::Arc;

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;

/// A point in a stream.
pub struct Event {
    context: Arc<Context>,
    event: Handle,
}

// SAFETY: an event handle may be used from any thread with its context bound.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Marks the present end of the compute stream, for timing.
    pub(in crate::cuda) fn record(context: &Arc<Context>) -> Result<Event> {
        Event::mark(context, Lane::Compute, 0)
    }

    /// Marks the present end of a stream, for others to wait for.
    pub(in crate::cuda) fn end_of(context: &Arc<Context>, lane: Lane) -> Result<Event> {
        Event::mark(context, lane, DISABLE_TIMING)
    }

    fn mark(context: &Arc<Context>, lane: Lane, flags: u32) -> Result<Event> {
        context.bind()?;
        let mut event = null_mut();
        // SAFETY: the driver writes one handle; `Drop` destroys it.
        context.check(unsafe { (context.api.event_create)(&mut event, flags) }, "cuEventCreate")?;
        let event = Event { context: context.clone(), event };
        // SAFETY: both handles live.
        context.check(unsafe { (context.api.event_record)(event.event, context.lane(lane)) }, "cuEventRecord")?;
        Ok(event)
    }

    /// Has what is enqueued in `lane` from now on wait for it.
    pub(in crate::cuda) fn holds_back(&self, lane: Lane) -> Result<()> {
        let context = &self.context;
        context.bind()?;
        // SAFETY: both handles live; the driver needs the event no more once the wait is enqueued.
        let status = unsafe { (context.api.stream_wait_event)(context.lane(lane), self.event, 0) };
        context.check(status, "cuStreamWaitEvent")
    }

    /// Milliseconds of device time from `self` to `later`; waits for `later`.
    pub fn milliseconds_until(&self, later: &Event) -> Result<f32> {
        let context = &self.context;
        context.bind()?;
        // SAFETY: the event lives.
        context.check(unsafe { (context.api.event_synchronize)(later.event) }, "cuEventSynchronize")?;
        let mut milliseconds = 0.0;
        // SAFETY: the driver writes one float; both events are recorded and over.
        let status = unsafe { (context.api.event_elapsed)(&mut milliseconds, self.event, later.event) };
        context.check(status, "cuEventElapsedTime")?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made in `record`; the driver frees it once it is over.
        unsafe {
            (self.context.api.context_set)(self.context.context);
            (self.context.api.event_destroy)(self.event);
        }
    }
}
