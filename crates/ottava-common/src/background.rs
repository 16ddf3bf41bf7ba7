//! Background threads with a low priority, so steps of an engine and short requests keep the CPU.

use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::Arc;
use std::thread::available_parallelism;

/// The nice value of the threads. If a thread with nice value 0 competes with them, they get about a tenth of its time.
#[cfg(target_os = "linux")]
const NICENESS: i32 = 10;

/// A pool of threads of low priority, one per two CPU cores.
pub struct Background {
    /// The threads; `None` if the system cannot start more threads.
    threads: Option<ThreadPool>,
    /// A counter: each unit of work that is not done holds a clone.
    undone: Arc<()>,
}

impl Background {
    /// Returns the number of threads.
    pub fn threads() -> usize {
        available_parallelism().map_or(1, |cores| cores.get().div_ceil(2))
    }

    /// Makes a pool of threads with this `name`.
    pub fn new(name: &'static str) -> Background {
        let threads = ThreadPoolBuilder::new()
            .num_threads(Background::threads())
            .thread_name(move |number| format!("{name} {number}"))
            .start_handler(|_| lower_priority())
            // The code that waits for the work learns of a panic because its sender is dropped.
            .panic_handler(|_| {});
        let threads =
            threads.build().inspect_err(|error| tracing::warn!("{name}: {error}; its work delays other work"));
        Background { threads: threads.ok(), undone: Arc::default() }
    }

    /// Returns the number of units of work that wait or run.
    pub fn undone(&self) -> usize {
        Arc::strong_count(&self.undone) - 1
    }

    /// Queues `work`. A panic in `work` does not end other work. Without threads, runs `work` at once, and passes its panic on to the caller.
    pub fn run(&self, work: impl FnOnce() + Send + 'static) {
        let undone = self.undone.clone();
        let work = move || {
            let _undone = undone;
            work();
        };
        match &self.threads {
            Some(threads) => threads.spawn_fifo(work),
            None => work(),
        }
    }
}

/// Lowers the priority of the calling thread permanently. Does nothing on systems other than Linux, where only the priority of whole processes can be
/// lowered.
fn lower_priority() {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::setpriority_process(None, NICENESS) {
        tracing::debug!("the priority of a thread in the background was not lowered: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn work_runs_in_its_order_at_a_low_priority_and_survives_a_panic() {
        let background = Background::new("test");
        let (sender, results) = channel();
        background.run(|| panic!("this panic is part of a test"));
        for number in 0..3 {
            let sender = sender.clone();
            background.run(move || sender.send((number, niceness())).unwrap());
        }
        drop(sender);
        let mut results: Vec<_> = results.iter().collect();
        results.sort_unstable();
        assert_eq!(results.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [0, 1, 2]);
        let own = niceness();
        assert!(results.iter().all(|(_, niceness)| *niceness >= own.max(NICENESS)), "{results:?} beside {own}");
        let (begun, waiting) = (channel(), channel::<()>());
        background.run(move || {
            begun.0.send(()).unwrap();
            waiting.1.recv().unwrap_err();
        });
        begun.1.recv().unwrap();
        assert_eq!(background.undone(), 1);
        drop(waiting.0);
    }

    fn niceness() -> i32 {
        rustix::process::getpriority_process(None).unwrap()
    }
}
