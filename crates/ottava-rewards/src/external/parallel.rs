//! Requests to a server at the same time.

use super::failure::Failure;
use crate::deadline::{Deadline, Waited};
use ottava_common::Result;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

/// The results of `work` for each of `jobs`, in order, by so many `threads`.
///
/// Errors if `deadline` passes or the process is asked to stop. Then requests that are under way end by their own timeouts, in the background, and no
/// others begin.
pub(super) fn in_parallel<J: Send + Sync + 'static, T: Send + 'static>(
    jobs: Vec<J>,
    threads: usize,
    deadline: Deadline,
    work: impl Fn(&J) -> Result<T, Failure> + Send + Sync + 'static,
) -> Result<Vec<Result<T, Failure>>> {
    let count = jobs.len();
    let (shared, (sender, done)) = (Arc::new((jobs, work, AtomicUsize::new(0))), mpsc::channel());
    for _ in 0..threads.min(count) {
        let (shared, sender) = (shared.clone(), sender.clone());
        thread::spawn(move || {
            let (jobs, work, next) = &*shared;
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(job) = jobs.get(number) else { return };
                if sender.send((number, work(job))).is_err() {
                    return;
                }
            }
        });
    }
    drop(sender);
    let mut results: Vec<_> = (0..count).map(|_| None).collect();
    for _ in 0..count {
        match deadline.receive(&done)? {
            Waited::Message((number, result)) => results[number] = Some(result),
            Waited::Late => deadline.check()?,
            Waited::Closed => break,
        }
    }
    let lost = || Err(Failure::Failed("a thread of requests has ended".into()));
    Ok(results.into_iter().map(|result| result.unwrap_or_else(lost)).collect())
}
