//! The processes of a job that rank 0 has started.

use super::own::{SECRET, open_log};
use ottava_common::launch::{OWN_ADDRESS, OWN_PARENT, OWN_RANK, OWN_SIZE};
use ottava_common::{Error, Result, interrupt};
use ottava_tensor::comm::process::{Supervisor, ask_to_end};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The time limit for processes to end after this process has finished.
const GRACE: Duration = Duration::from_secs(10);

/// The time limit for a process to end after its connection has ended.
const REAP: Duration = Duration::from_secs(1);

/// The time limit for processes to end after they got a signal to end.
const STOP: Duration = Duration::from_secs(2);

/// The numbers of SIGHUP, SIGINT and SIGTERM.
const ASKS_TO_END: [i32; 3] = [1, 2, 15];

const POLL: Duration = Duration::from_millis(20);

/// The processes of the other ranks, if this process has started them. Dropping it waits until they end.
#[derive(Default)]
pub struct Processes(Arc<Started>);

/// The started processes; the first process is rank 1. The group also holds this value, and may outlive [`Processes`].
#[derive(Default)]
pub(super) struct Started {
    processes: Mutex<Vec<Process>>,
    /// Whether all processes have joined the group. From then on, the group tells them to stop.
    have_joined: AtomicBool,
}

pub(super) struct Process {
    pub(super) child: Child,
    log: Option<PathBuf>,
}

/// Where a rank prints.
pub(super) enum Output<'a> {
    /// To the log of the rank in this folder.
    Log(&'a Path),
    /// Messages to standard error, and no results.
    Errors,
    /// As this process does.
    Inherited,
}

/// Returns the command that starts `[rank, ranks]` with the command line of this process.
pub(super) fn command(program: &Path, [rank, ranks]: [usize; 2], address: &str, secret: &str) -> Command {
    let mut command = Command::new(program);
    command
        .args(std::env::args_os().skip(1))
        .env(OWN_RANK, rank.to_string())
        .env(OWN_SIZE, ranks.to_string())
        .env(OWN_ADDRESS, address)
        .env(OWN_PARENT, std::process::id().to_string())
        .env(SECRET, secret)
        .stdin(Stdio::null());
    command
}

impl Started {
    fn lock(&self) -> MutexGuard<'_, Vec<Process>> {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Processes {
    /// Starts ranks 1 to `ranks - 1` with the command line of this process. Their output goes to logs in the folder `logs`.
    pub(super) fn start(ranks: usize, address: &str, secret: &str, logs: Option<&Path>) -> Result<Processes> {
        let program = std::env::current_exe().map_err(Error::io("the path of this program"))?;
        let processes = Processes::default();
        for rank in 1..ranks {
            let command = command(&program, [rank, ranks], address, secret);
            let output = match logs {
                Some(logs) => Output::Log(logs),
                None => Output::Errors,
            };
            processes.0.lock().push(Process::start(command, rank, output)?);
        }
        Ok(processes)
    }

    /// Records that all processes have joined the group.
    pub(super) fn joined(&self) {
        self.0.have_joined.store(true, Ordering::Relaxed);
    }

    /// Returns the processes, which the group supervises.
    pub(super) fn started(&self) -> Arc<Started> {
        self.0.clone()
    }

    /// Waits until all processes have ended. Errors if a process failed.
    pub fn wait(&self) -> Result<()> {
        for (process, rank) in self.0.lock().iter_mut().zip(1..) {
            let status = process.child.wait().map_err(Error::io(format!("rank {rank}")))?;
            if !status.success() {
                let words = format!("it {}", process.describe(Some(status)));
                return Err(Error::Rank { rank, words });
            }
        }
        Ok(())
    }
}

impl Processes {
    /// Converts the `error` of ranks that start to a stop, if a signal ended one of these processes before the ranks could agree on a stop.
    pub fn or_stop(&self, error: Error) -> Error {
        match error {
            Error::Tensor(ottava_tensor::Error::Ranks { .. }) if self.were_asked_to_end() => {
                Error::Cancelled(error.to_string())
            }
            other => other,
        }
    }

    /// Whether a signal that requests an end has ended a process, directly or with the exit code for such a stop.
    pub(super) fn were_asked_to_end(&self) -> bool {
        let stopped = i32::from(Error::Cancelled(String::new()).exit_code());
        let was_asked = |process: &mut Process| {
            let status = process.child.try_wait().ok().flatten();
            let by = |status: ExitStatus| status.signal().is_some_and(|signal| ASKS_TO_END.contains(&signal));
            status.is_some_and(|status| status.code() == Some(stopped) || by(status))
        };
        self.0.lock().iter_mut().any(was_asked)
    }
}

impl Process {
    /// Starts `rank` with `command`.
    pub(super) fn start(mut command: Command, rank: usize, output: Output) -> Result<Process> {
        let log = match output {
            Output::Log(folder) => {
                let log = open_log(folder, rank)?;
                command.stdout(log.try_clone().map_err(Error::io(folder))?).stderr(log);
                Some(folder.join(format!("rank-{rank}.log")))
            }
            Output::Errors => {
                command.stdout(Stdio::null()).stderr(Stdio::inherit());
                None
            }
            Output::Inherited => None,
        };
        let child = command.spawn().map_err(Error::io(command.get_program()))?;
        Ok(Process { child, log })
    }

    /// Describes how the process ended (if it has ended), and where its log is.
    pub(super) fn describe(&self, status: Option<ExitStatus>) -> String {
        let end = status.map(|status| match (status.signal(), status.code()) {
            (Some(signal), _) => format!("was killed by signal {signal}{}", name(signal)),
            (None, code) => format!("ended with exit code {}", code.unwrap_or_default()),
        });
        let log = self.log.as_ref().map(|log| format!("its log is {}", log.display()));
        match (end, log) {
            (Some(end), Some(log)) => format!("{end}; {log}"),
            (Some(only), None) | (None, Some(only)) => only,
            (None, None) => "runs".into(),
        }
    }
}

/// Names a signal that may end processes of a job.
fn name(signal: i32) -> &'static str {
    match signal {
        6 => " (SIGABRT)",
        7 => " (SIGBUS)",
        9 => " (SIGKILL), as by a kernel without free memory",
        11 => " (SIGSEGV)",
        15 => " (SIGTERM)",
        _ => "",
    }
}

impl Supervisor for Started {
    fn check(&self) -> Result<(), String> {
        for (process, rank) in self.lock().iter_mut().zip(1..) {
            if let Ok(Some(status)) = process.child.try_wait() {
                return Err(format!("rank {rank} {} before all ranks had joined", process.describe(Some(status))));
            }
        }
        Ok(())
    }

    fn stop_flag(&self) -> Option<&AtomicBool> {
        Some(interrupt::flag())
    }

    fn describe_end(&self, rank: usize) -> Option<String> {
        let limit = Instant::now() + REAP;
        loop {
            let mut processes = self.lock();
            let process = processes.get_mut(rank.checked_sub(1)?)?;
            let status = process.child.try_wait().ok().flatten();
            if status.is_some() || Instant::now() > limit {
                return Some(process.describe(status));
            }
            drop(processes);
            thread::sleep(POLL);
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        // The group has told ranks that have joined. Other ranks get a signal.
        let is_stopped = interrupt::flag().load(Ordering::Relaxed) && !self.0.have_joined.load(Ordering::Relaxed);
        let limit = Instant::now() + if is_stopped { STOP } else { GRACE };
        for Process { child, .. } in self.0.lock().iter_mut() {
            if is_stopped && matches!(child.try_wait(), Ok(None)) {
                ask_to_end(child.id());
            }
        }
        for Process { child, .. } in self.0.lock().iter_mut() {
            while matches!(child.try_wait(), Ok(None)) {
                if Instant::now() > limit {
                    let _ = child.kill();
                    let _ = child.wait();
                    break;
                }
                thread::sleep(POLL);
            }
        }
    }
}
