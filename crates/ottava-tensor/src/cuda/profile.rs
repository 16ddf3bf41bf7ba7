//! Device time by call, while somebody asks for it.

use super::driver::{Event, lock};
use super::{CudaDevice, GemmSpec};
use crate::error::Result;
use std::sync::Mutex;

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
pub(super) type Profile = Mutex<Option<Vec<(Call, Event, Event)>>>;

impl CudaDevice {
    /// Takes the device time of every call from now on, for which each waits a little.
    pub fn start_profile(&self) {
        *lock(&self.profile) = Some(Vec::new());
    }

    /// Ends the profile, and gives the milliseconds of each call since it began. Waits for them.
    pub fn take_profile(&self) -> Result<Vec<(Call, f64)>> {
        let calls = lock(&self.profile).take().unwrap_or_default();
        calls.iter().map(|(call, start, end)| Ok((*call, f64::from(start.milliseconds_until(end)?)))).collect()
    }

    pub(super) fn profiled(&self, call: Call, enqueue: impl FnOnce() -> Result<()>) -> Result<()> {
        if lock(&self.profile).is_none() {
            return enqueue();
        }
        let start = self.record()?;
        enqueue()?;
        let end = self.record()?;
        if let Some(calls) = &mut *lock(&self.profile) {
            calls.push((call, start, end));
        }
        Ok(())
    }
}
