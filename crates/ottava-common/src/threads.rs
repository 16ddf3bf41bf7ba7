//! Threads that transfer files while this thread shows their progress.

use crate::{Error, Result, interrupt};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// The pause between two looks at the progress.
const POLL: Duration = Duration::from_millis(20);

/// Runs `work` in `count` threads, and calls `look` from this thread meanwhile. `work` is told whether a thread has failed, and then ends. `what` names
/// the work for a wait that a signal ends.
///
/// Errors with the first error of `work`.
pub fn in_threads(
    count: usize,
    what: &str,
    work: impl Fn(&dyn Fn() -> bool) -> Result<()> + Sync,
    look: &mut dyn FnMut(),
) -> Result<()> {
    let failed: Mutex<Option<Error>> = Mutex::default();
    let lock = || failed.lock().unwrap_or_else(PoisonError::into_inner);
    let run = || {
        if let Err(error) = work(&|| lock().is_some()) {
            lock().get_or_insert(error);
        }
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|_| scope.spawn(run)).collect();
        while threads.iter().any(|thread| !thread.is_finished()) {
            // A request to stop reaches the threads through the same flag, and waits for ranks learn of progress here.
            let _ = interrupt::check(what);
            look();
            thread::sleep(POLL);
        }
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}
