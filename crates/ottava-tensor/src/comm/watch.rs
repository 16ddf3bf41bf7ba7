//! The watch, which ends this process when its job fails and the main thread does not notice.
//!
//! NCCL's kernels wait forever for a rank that has ended, and a thread that synchronises with them never returns. So a separate thread watches
//! the job's connections. After a fault it waits [`GRACE`]. In this time, a main thread that waits on the CPU returns the error and drops its
//! groups. Otherwise the watch reports the fault and ends the process. It also fails the job if the host waits for its GPU longer than
//! [`Limits::collective`](super::Limits::collective).

use super::fault::{Fault, this_process};
use super::history::History;
use super::link::Link;
use crate::cuda::CudaDevice;
use crate::error::Error;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// The time that the main thread has to report a fault itself.
pub(super) const GRACE: Duration = Duration::from_secs(2);

/// The time between checks of how long the host has waited for its GPU.
const PAUSE: Duration = Duration::from_secs(1);

enum Event {
    Fault(Fault),
    Gpu(Arc<CudaDevice>),
    Disarm,
}

/// A running watch. Dropping it ends the watch.
pub(super) struct Watch(Sender<Event>);

/// The settings of a watch.
pub(super) struct Orders {
    /// The index of this rank.
    pub rank: usize,
    /// The maximum time that the host may wait for its GPU.
    pub limit: Duration,
    /// The time that the main thread has to handle a fault.
    pub grace: Duration,
    /// Called with the error immediately after the first fault.
    pub notify: Box<dyn Fn(Error) + Send>,
    /// Ends the process with the first fault if the main thread has not handled it.
    pub end: Box<dyn FnOnce(Error) + Send>,
}

impl Watch {
    /// Watches the job of `link`.
    pub fn start(link: &dyn Link, history: Arc<History>, orders: Orders) -> io::Result<Watch> {
        let (sender, events) = channel();
        let reporter = link.reporter();
        thread::Builder::new().name("comm watch".into()).spawn(move || {
            let late = |waited: Duration| {
                let (rank, process) = (orders.rank, this_process());
                let after = history.recent().pop().map_or(String::new(), |last| format!(" after {last}"));
                let waited = waited.as_secs();
                reporter.fail(Fault::Late(format!("rank {rank} ({process}) has waited {waited}s for its GPU{after}")));
            };
            let Some(fault) = first_fault(&events, orders.limit, late) else { return };
            (orders.notify)(fault.error("the work", history.recent()));
            let deadline = Instant::now() + orders.grace;
            loop {
                match events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                    Ok(Event::Fault(_) | Event::Gpu(_)) => {}
                    Ok(Event::Disarm) | Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => break,
                }
            }
            let after = history.last().map_or(String::new(), |last| format!(" after {last}"));
            (orders.end)(fault.error(&format!("the work{after}"), history.recent()));
        })?;
        let faults = sender.clone();
        link.observe(Box::new(move |fault| drop(faults.send(Event::Fault(fault.clone())))));
        Ok(Watch(sender))
    }

    /// Also watches how long the host waits for `device`.
    pub fn add_gpu(&self, device: Arc<CudaDevice>) {
        // If the job has failed, the thread has ended.
        let _ = self.0.send(Event::Gpu(device));
    }

    /// Ends the watch, because no work waits for other ranks any more.
    pub fn disarm(&self) {
        let _ = self.0.send(Event::Disarm);
    }
}

/// Waits for the first fault. Returns `None` when the watch ends. Calls `late` once if the host waits for a GPU longer than `limit`.
fn first_fault(events: &Receiver<Event>, limit: Duration, mut late: impl FnMut(Duration)) -> Option<Fault> {
    let mut gpu: Option<Arc<CudaDevice>> = None;
    let mut reported = false;
    loop {
        match events.recv_timeout(PAUSE) {
            Ok(Event::Fault(fault)) => return Some(fault),
            Ok(Event::Gpu(device)) => gpu = Some(device),
            Ok(Event::Disarm) | Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) => {
                let waited = gpu.as_ref().and_then(|gpu| gpu.longest_wait()).filter(|&waited| waited > limit);
                if let (Some(waited), false) = (waited, reported) {
                    reported = true;
                    late(waited);
                }
            }
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.disarm();
    }
}

/// Reports `error` like the command line, and ends the process at once. Exit handlers are skipped, because they would wait for the GPU.
pub(super) fn end_process(error: &Error, exit_code: u8) -> ! {
    let _ = writeln!(io::stderr(), "error: {error}");
    // SAFETY: ends the process, from any thread.
    unsafe { libc::_exit(i32::from(exit_code)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::process::tests::{Rank, join_as_child};
    use crate::comm::{Group, threads};
    use std::process::Command;

    const SHORT: Duration = Duration::from_millis(100);

    fn watched(comm: &Group) -> (Watch, std::sync::mpsc::Receiver<String>) {
        let (ended, end) = channel();
        let end_with = move |error: Error| drop(ended.send(error.to_string()));
        let orders =
            Orders { rank: comm.rank(), limit: SHORT, grace: SHORT, notify: Box::new(|_| {}), end: Box::new(end_with) };
        (Watch::start(&*comm.endpoint.link, comm.endpoint.history.clone(), orders).unwrap(), end)
    }

    #[test]
    fn a_fault_ends_a_process_that_does_not_notice_it() {
        let [first, second] = threads::group(2).try_into().ok().expect("two ranks");
        let (watch, end) = watched(&first);
        drop(second);
        let message = end.recv_timeout(GRACE).unwrap();
        assert!(message.starts_with("rank 1 (pid ") && message.ends_with("ended during the work"), "{message}");
        // A watch that begins after the fault sees the fault, too.
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

    /// A process that is started as one of three ranks. Rank 0 sleeps, to simulate waiting for a GPU.
    #[test]
    #[ignore = "started by the tests below"]
    fn rank_process() {
        let Some(comm) = join_as_child() else { return };
        comm.watch(5, |_| {}).unwrap();
        comm.barrier("first").unwrap();
        println!("joined");
        match std::env::var("OTTAVA_TEST_END").as_deref() {
            Ok("finish") => comm.finish().unwrap(),
            Ok("late") if comm.rank() != 1 => panic!("{}", comm.barrier("second").unwrap_err()),
            _ => thread::sleep(Duration::from_secs(30)),
        }
        if comm.rank() == 0 {
            // This is longer than the other ranks, which have ended by then.
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
                assert!(message.contains(" ended during the work after barrier `first`, collective 1"), "{message}");
            }
        }
    }

    #[test]
    fn a_process_that_never_comes_is_named_and_ends_too() {
        for (rank, process) in Rank::group(CHILD, 3, &[("OTTAVA_TEST_END", "late")]).iter_mut().enumerate() {
            // If the main thread has the error, the test's own exit code is used. If it sleeps, the exit code of the watch is used.
            assert_eq!(process.0.wait().unwrap().code(), Some(if rank == 1 { 5 } else { 101 }), "rank {rank}");
            let message = process.errors();
            assert!(
                message.contains(
                    ") did not call barrier `second`, collective 2 (its last was barrier `first`, collective 1)"
                ),
                "{message}"
            );
            assert!(message.contains(" within 3s; ranks 0, 2 are waiting"), "{message}");
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
