//! Whether this process makes progress while other ranks wait for it.
//!
//! A collective has a deadline ([`Limits::collective`](super::Limits::collective)), but work before it may take hours: tokenizing, hashing,
//! writing a checkpoint. Such work reports progress, which heartbeats carry to rank 0, and the deadline of a rank starts anew with each report.

use std::sync::atomic::{AtomicU64, Ordering};

static REPORTS: AtomicU64 = AtomicU64::new(0);

/// Reports that this process makes progress. Cheap enough for inner loops of file and text work.
pub fn report_progress() {
    REPORTS.fetch_add(1, Ordering::Relaxed);
}

/// Reports of this process so far.
pub(super) fn reports() -> u64 {
    REPORTS.load(Ordering::Relaxed)
}
