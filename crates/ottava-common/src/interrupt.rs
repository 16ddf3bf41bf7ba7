//! Requests that end long work early. The work polls for a request to stop, which signal handlers or another rank set, and for the loss of a rank.

use crate::{Error, Result};
use ottava_tensor::RankFault;
use ottava_tensor::comm::{Stopper, report_progress};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// The fault of the group of ranks: its kind, a description, and the last collectives of this rank.
static LOST: Mutex<Option<(RankFault, String, Vec<String>)>> = Mutex::new(None);

/// The handle that passes requests on to the other ranks; `None` without other ranks.
static OTHERS: Mutex<Option<Stopper>> = Mutex::new(None);

/// Returns the flag that signal handlers set and a training loop polls.
pub fn flag() -> &'static AtomicBool {
    &REQUESTED
}

/// Requests this process and the other ranks of its job to stop.
pub fn request() {
    REQUESTED.store(true, Ordering::Relaxed);
    if let Some(others) = &*OTHERS.lock().unwrap_or_else(PoisonError::into_inner) {
        others.request();
    }
}

/// Passes requests on to these ranks from now on. If there was a request before, it is passed on at once.
pub fn forward_to(others: Stopper) {
    let mut forwarded = OTHERS.lock().unwrap_or_else(PoisonError::into_inner);
    if REQUESTED.load(Ordering::Relaxed) {
        others.request();
    }
    *forwarded = Some(others);
}

/// Ends work that polls, with the error `fault` of the group of ranks.
pub fn lose(fault: ottava_tensor::Error) {
    if let ottava_tensor::Error::Ranks { fault, message, recent } = fault {
        LOST.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert((fault, message, recent));
    }
}

/// Errors with the fault of the ranks if there was one, and with [`Error::Cancelled`] if a stop was requested. `what` names the work, such as
/// "tokenizing". Also tells ranks that wait for this rank that it makes progress.
pub fn check(what: &str) -> Result<()> {
    report_progress();
    if let Some((fault, message, recent)) = LOST.lock().unwrap_or_else(PoisonError::into_inner).clone() {
        return Err(ottava_tensor::Error::Ranks { fault, message, recent }.into());
    }
    match REQUESTED.load(Ordering::Relaxed) {
        true => Err(cancelled(what)),
        false => Ok(()),
    }
}

/// Returns the error of work that a request to stop has ended.
pub fn cancelled(what: &str) -> Error {
    Error::Cancelled(format!("stopped by a signal while {what}; nothing was lost"))
}
