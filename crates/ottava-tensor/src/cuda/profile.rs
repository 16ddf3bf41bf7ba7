//! Device time by call, while somebody asks for it.

use super::cublaslt::GemmSpec;
use super::driver::{Context, Event};
use super::lock::lock;
use crate::error::Result;
use std::sync::{Arc, Mutex};

/// What device time was spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// A kernel, by its name.
    Kernel(&'static str),
    /// A matrix product.
    Gemm(GemmSpec),
    /// The library's attention.
    AttentionForward,
    /// Its gradient.
    AttentionBackward,
}

/// Calls since the profile began, with the events around each; `None` while there is no profile.
#[derive(Default)]
pub(super) struct Profile(Mutex<Option<Vec<(Call, Event, Event)>>>);

impl Profile {
    pub(super) fn start(&self) {
        *lock(&self.0) = Some(Vec::new());
    }

    /// Ends the profile, and gives the milliseconds of each call since it began. Waits for them.
    pub(super) fn take(&self) -> Result<Vec<(Call, f64)>> {
        let calls = lock(&self.0).take().unwrap_or_default();
        calls.iter().map(|(call, start, end)| Ok((*call, f64::from(start.milliseconds_until(end)?)))).collect()
    }

    /// Runs `enqueue`, between two events while there is a profile.
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
