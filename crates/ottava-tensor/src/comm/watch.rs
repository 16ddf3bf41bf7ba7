//! Ends this process when its group fails while it waits for a GPU.
//!
//! NCCL's kernels wait for ever for a rank that has ended, and the thread that synchronises with them never returns. So a thread
//! watches the group's connections. After a fault it waits [`GRACE`], in which a main thread that waits on the CPU returns the error and
//! drops its communicator; then it reports the fault itself and ends the process.

use super::fault::Fault;
use super::history::History;
use super::link::Link;
use crate::error::Error;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// How long the main thread has to report a fault itself.
pub(super) const GRACE: Duration = Duration::from_secs(2);

enum Event {
    Fault(Fault),
    Disarm,
}

/// A running watch. Dropping it ends the watch.
pub(super) struct Watch(Sender<Event>);

impl Watch {
    /// Watches the group of `link`, and calls `end` with the first fault unless disarmed within `grace`.
    pub fn start(
        link: &dyn Link,
        history: Arc<History>,
        grace: Duration,
        end: impl FnOnce(Error) + Send + 'static,
    ) -> io::Result<Watch> {
        let (sender, events) = channel();
        thread::Builder::new().name("comm watch".into()).spawn(move || {
            let Ok(Event::Fault(fault)) = events.recv() else { return };
            let deadline = Instant::now() + grace;
            loop {
                match events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                    Ok(Event::Fault(_)) => {}
                    Ok(Event::Disarm) | Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => break,
                }
            }
            let during = history.last().map_or(String::new(), |last| format!(" after {last}"));
            end(fault.error(&format!("work of the GPU{during}"), history.recent()));
        })?;
        let faults = sender.clone();
        link.observe(Box::new(move |fault| drop(faults.send(Event::Fault(fault.clone())))));
        Ok(Watch(sender))
    }

    /// Ends the watch: no work of the GPU waits for other ranks any more.
    pub fn disarm(&self) {
        // The thread has ended where the group failed.
        let _ = self.0.send(Event::Disarm);
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.disarm();
    }
}

/// Reports `error` as the command line does, and ends the process at once: its exit handlers would wait for the GPU.
pub(super) fn end_process(error: &Error, exit_code: u8) -> ! {
    let _ = writeln!(io::stderr(), "error: {error}");
    // SAFETY: ends the process, from any thread.
    unsafe { libc::_exit(i32::from(exit_code)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::process::tests::{Rank, join_as_child};
    use crate::comm::{Comm, threads};
    use std::process::Command;

    const SHORT: Duration = Duration::from_millis(100);

    fn watched(comm: &Comm) -> (Watch, std::sync::mpsc::Receiver<String>) {
        let (ended, end) = channel();
        let end_with = move |error: Error| drop(ended.send(error.to_string()));
        (Watch::start(&*comm.link, comm.history.clone(), SHORT, end_with).unwrap(), end)
    }

    #[test]
    fn a_fault_ends_a_process_that_does_not_notice_it() {
        let [first, second] = threads::group(2).try_into().ok().expect("two ranks");
        let (watch, end) = watched(&first);
        drop(second);
        let message = end.recv_timeout(GRACE).unwrap();
        assert!(message.starts_with("rank 1 (pid ") && message.ends_with("ended during work of the GPU"), "{message}");
        // A watch that begins after the fault sees it, too.
        let (late, end) = watched(&first);
        assert!(end.recv_timeout(GRACE).is_ok());
        drop((watch, late));
    }

    #[test]
    fn a_process_that_notices_the_fault_or_has_finished_goes_on() {
        let [first, second] = threads::group(2).try_into().ok().expect("two ranks");
        let (watch, end) = watched(&first);
        drop(second);
        drop(watch);
        assert!(end.recv_timeout(SHORT * 3).is_err());
    }

    /// A process that is started as one of three ranks. Rank 0 sleeps as if it waited for a GPU.
    #[test]
    #[ignore = "started by the tests below"]
    fn rank_process() {
        let Some(mut comm) = join_as_child() else { return };
        comm.watch(5).unwrap();
        comm.barrier("first").unwrap();
        println!("joined");
        match std::env::var("OTTAVA_TEST_END").as_deref() {
            Ok("finish") => comm.finish().unwrap(),
            _ => thread::sleep(Duration::from_secs(30)),
        }
        if comm.rank() == 0 {
            // Longer than the others, which are gone then.
            thread::sleep(GRACE * 2);
        }
        println!("left");
    }

    const CHILD: &str = "comm::watch::tests::rank_process";

    #[test]
    fn a_killed_rank_ends_processes_that_wait_for_their_gpus() {
        for lost in [1, 0] {
            let mut ranks = Rank::group(CHILD, 3, &[]);
            let pid = ranks[lost].0.id();
            let sent = Instant::now();
            assert!(Command::new("kill").args(["-KILL", &pid.to_string()]).status().unwrap().success());
            for (rank, process) in ranks.iter_mut().enumerate().filter(|(rank, _)| *rank != lost) {
                assert_eq!(process.0.wait().unwrap().code(), Some(5), "rank {rank}");
                assert!(sent.elapsed() < Duration::from_secs(10), "{:?}", sent.elapsed());
                let message = process.errors();
                let expected = format!("error: rank {lost} (pid {pid} on host ");
                assert!(message.contains(&expected), "rank {rank}: {message}");
                assert!(
                    message.contains(" ended during work of the GPU after barrier `first`, collective 1"),
                    "{message}"
                );
            }
        }
    }

    #[test]
    fn ranks_that_finish_may_leave_at_different_times() {
        for process in &mut Rank::group(CHILD, 3, &[("OTTAVA_TEST_END", "finish")]) {
            process.line("left");
            assert!(process.0.wait().unwrap().success());
        }
    }
}
