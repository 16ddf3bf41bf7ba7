//! A process that answers lines.

use super::MAX_ANSWER;
use super::lines::{Line, Tail, read, write};
use crate::deadline::{Deadline, Waited};
use ottava_common::Result;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitIdStatus, kill_process_group, waitid};
use std::os::unix::process::CommandExt;
use std::process::{self, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender};
use std::thread::sleep;
use std::time::Duration;

/// How long a process may take to end after its standard input or output is closed, and its last words to arrive.
const GRACE: Duration = Duration::from_secs(1);

/// A process with its threads. When it is dropped, its standard input is closed; then its whole process group is killed.
pub(super) struct Child {
    process: process::Child,
    /// `None` once the process is asked to end.
    requests: Option<Sender<Vec<u8>>>,
    answers: Receiver<Line>,
    stderr: Tail,
    stderr_end: Receiver<()>,
    /// Whether the process gets no time to end.
    is_faulty: bool,
}

impl Child {
    /// Starts `command`, a program and its arguments, in a process group of its own. `name` is before the lines of its stderr in the log.
    ///
    /// Errors with a sentence if the program cannot be started.
    pub(super) fn start(name: &str, command: &[String]) -> Result<Child, String> {
        let [program, arguments @ ..] = command else { return Err("`command` is empty".into()) };
        let mut process = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|error| format!("`{program}` cannot be started: {error}"))?;
        let requests = Some(write(process.stdin.take().expect("a pipe was asked for")));
        let answers = read(process.stdout.take().expect("a pipe was asked for"), MAX_ANSWER);
        let (stderr, stderr_end) = Tail::follow(name, process.stderr.take().expect("a pipe was asked for"));
        Ok(Child { process, requests, answers, stderr, stderr_end, is_faulty: false })
    }

    /// Sends a request and waits for a line. The inner error is a sentence about what the process did instead.
    ///
    /// Errors if Ottava was asked to stop.
    pub(super) fn exchange(&mut self, request: Vec<u8>, deadline: Deadline) -> Result<Result<Vec<u8>, String>> {
        // A process that has closed its input may still write what it has to say; if not, its end is noticed below.
        self.requests.as_ref().map(|requests| requests.send(request));
        Ok(match deadline.receive(&self.answers)? {
            Waited::Message(Line::Whole(line)) => Ok(line),
            Waited::Message(Line::TooLong) => Err(format!("it wrote a line of more than {MAX_ANSWER} bytes")),
            Waited::Message(Line::Cut(length)) => {
                Err(format!("its output ended after {length} bytes without a line end; {}", self.end()))
            }
            Waited::Closed => Err(self.end()),
            Waited::Late => Err("it did not answer in time".into()),
        })
    }

    /// How the process has ended, after it closed its output.
    fn end(&self) -> String {
        match self.wait(GRACE) {
            Some(status) => match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => format!("it ended with exit code {code}"),
                (None, Some(signal)) => format!("signal {signal} killed it"),
                (None, None) => "it ended".into(),
            },
            None => "it closed its output".into(),
        }
    }

    /// The status of the process once it has ended, within `time`. The process is not reaped, so that its group keeps its number.
    fn wait(&self, time: Duration) -> Option<WaitIdStatus> {
        let deadline = Deadline::after(time);
        loop {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
            match waitid(WaitId::Pid(self.pid()), options) {
                Ok(Some(status)) => return Some(status),
                _ if deadline.left().is_zero() => return None,
                _ => sleep(Duration::from_millis(2)),
            }
        }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.process)
    }

    /// Closes the standard input, which asks the process to end.
    pub(super) fn close(&mut self) {
        self.requests = None;
    }

    /// Kills the process group, and returns the last lines of stderr.
    pub(super) fn kill(mut self) -> String {
        self.is_faulty = true;
        self.kill_group();
        // A process that has left the group may keep the pipe open.
        self.stderr_end.recv_timeout(GRACE).ok();
        self.stderr.text()
    }

    fn kill_group(&self) {
        // Fails only if the group is gone.
        kill_process_group(self.pid(), Signal::KILL).ok();
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.close();
        if !self.is_faulty {
            self.wait(GRACE);
        }
        self.kill_group();
        self.process.wait().ok();
    }
}
