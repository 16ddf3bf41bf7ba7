//! The device time per call.

use super::cublaslt::GemmSpec;
use super::driver::{Context, Event};
use super::lock::lock;
use crate::error::Result;
use std::sync::{Arc, Mutex};

/// The name of copies between host memory and device memory.
pub const HOST_TRANSFER: &str = "host transfer";

/// A timed call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// A kernel, by its name.
    Kernel(&'static str),
    /// A matrix product.
    Gemm(GemmSpec),
    /// The forward pass of cuDNN attention.
    AttentionForward,
    /// The backward pass of cuDNN attention.
    AttentionBackward,
    /// The time that compute waits for a collective, by the name of its function, or for a [`HOST_TRANSFER`]. This part of the call overlaps with no
    /// compute.
    Wait(&'static str),
}

/// The calls of the profile in progress, each with the events before and after it. The value is `None` outside a profile.
#[derive(Default)]
pub(super) struct Profile(Mutex<Option<Vec<(Call, Event, Event)>>>);

impl Profile {
    pub(super) fn start(&self) {
        *lock(&self.0) = Some(Vec::new());
    }

    /// Ends the profile, waits for the calls, and returns the milliseconds of each call.
    pub(super) fn take(&self) -> Result<Vec<(Call, f64)>> {
        let calls = lock(&self.0).take().unwrap_or_default();
        calls.iter().map(|(call, start, end)| Ok((*call, f64::from(start.milliseconds_until(end)?)))).collect()
    }

    /// Runs `enqueue`. During a profile, it is between two events.
    pub(super) fn time(&self, context: &Arc<Context>, call: Call, enqueue: impl FnOnce() -> Result<()>) -> Result<()> {
        if lock(&self.0).is_none() {
            return enqueue();
        }
        let start = Event::record(context)?;
        enqueue()?;
        let end = Event::record(context)?;
        if let Some(calls) = &mut *lock(&self.0) {
            calls.push((call, start, end));
        }
        Ok(())
    }
}
