//! A request to stop, set by signal handlers and polled by long work.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::{Error, Result};

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// The flag that signal handlers set and [`Trainer::run`](crate::trainer::Trainer::run) polls.
pub fn flag() -> &'static AtomicBool {
    &REQUESTED
}

/// Errors with [`Error::Cancelled`] once a stop was requested; `what` names the work, as in "tokenizing".
pub fn check(what: &str) -> Result<()> {
    match REQUESTED.load(Ordering::Relaxed) {
        true => Err(Error::Cancelled(format!("stopped by a signal while {what}; nothing was lost"))),
        false => Ok(()),
    }
}
