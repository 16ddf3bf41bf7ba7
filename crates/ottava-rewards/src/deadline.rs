//! When scoring has to end.

use ottava_common::{Error, Result, interrupt};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// The time between two looks at a request to stop.
const POLL: Duration = Duration::from_millis(20);

/// The instant at which scoring has to be done. Work that polls a deadline also ends when the process is asked to stop.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Option<Instant>);

/// What came of waiting for a message.
pub(crate) enum Waited<T> {
    /// The message.
    Message(T),
    /// The sender is gone.
    Closed,
    /// The deadline has passed.
    Late,
}

impl Deadline {
    /// No deadline.
    pub fn never() -> Deadline {
        Deadline(None)
    }

    /// The instant `time` from now.
    pub fn after(time: Duration) -> Deadline {
        Deadline::never().within(time)
    }

    /// This deadline, or the instant `time` from now if it is earlier.
    pub fn within(self, time: Duration) -> Deadline {
        let then = Instant::now().checked_add(time);
        Deadline(self.0.into_iter().chain(then).min())
    }

    /// The time that is left.
    pub fn left(self) -> Duration {
        self.0.map_or(Duration::MAX, |then| then.saturating_duration_since(Instant::now()))
    }

    /// Errors with [`Error::Cancelled`] if the process was asked to stop, and with [`Error::External`] if the deadline has passed.
    pub fn check(self) -> Result<()> {
        interrupt::check("scoring completions")?;
        match self.left().is_zero() {
            true => Err(Error::External("scoring completions took longer than the time that was left for it".into())),
            false => Ok(()),
        }
    }

    /// Waits for a message. Errors if the process was asked to stop.
    pub(crate) fn receive<T>(self, from: &Receiver<T>) -> Result<Waited<T>> {
        loop {
            interrupt::check("scoring completions")?;
            match from.recv_timeout(self.left().min(POLL)) {
                Ok(message) => return Ok(Waited::Message(message)),
                Err(RecvTimeoutError::Disconnected) => return Ok(Waited::Closed),
                Err(RecvTimeoutError::Timeout) if self.left().is_zero() => return Ok(Waited::Late),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Sleeps for `pause`; false, perhaps early, if the deadline passes or the process is asked to stop.
    pub(crate) fn sleep(self, pause: Duration) -> bool {
        let wake = Deadline::after(pause);
        while self.check().is_ok() {
            match wake.left() {
                Duration::ZERO => return true,
                left => thread::sleep(left.min(POLL)),
            }
        }
        false
    }
}
