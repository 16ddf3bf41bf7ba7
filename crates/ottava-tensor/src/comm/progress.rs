//! Progress reports of a process while other ranks wait for it.
//!
//! A collective has a deadline ([`Limits::collective`](super::Limits::collective)), but the work before it may take hours: tokenizing, hashing,
//! or writing a checkpoint. Such work reports progress. Heartbeats carry the reports to rank 0, and each report restarts the deadline of its
//! rank.

use std::sync::atomic::{AtomicU64, Ordering};

static REPORTS: AtomicU64 = AtomicU64::new(0);

/// Reports that this process makes progress. It is cheap enough for inner loops of file and text work.
pub fn report_progress() {
    REPORTS.fetch_add(1, Ordering::Relaxed);
}

/// Returns the number of reports of this process so far.
pub(super) fn reports() -> u64 {
    REPORTS.load(Ordering::Relaxed)
}
