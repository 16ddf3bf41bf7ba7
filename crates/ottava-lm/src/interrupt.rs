//! A request to stop, as signals make it: work that takes long asks for it now and then.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::{Error, Result};

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// The flag itself, for signal handlers to set and for [`Trainer::run`](crate::trainer::Trainer::run) to watch.
pub fn flag() -> &'static AtomicBool {
    &REQUESTED
}

/// Errors with [`Error::Cancelled`] once the process was asked to stop; `what` was being done then.
pub fn check(what: &str) -> Result<()> {
    match REQUESTED.load(Ordering::Relaxed) {
        true => Err(Error::Cancelled(format!("stopped by a signal while {what}; nothing was lost"))),
        false => Ok(()),
    }
}
