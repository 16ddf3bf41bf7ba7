//! The thread of one tracker.

use crate::follow::Follower;
use crate::state::{Seen, Shared};
use crate::{Facts, Opening, Outcome, Tracker};
use ottava_common::ending::Ending;
use ottava_common::{Error, Result};
use ottava_http::Fault;
use ottava_settings::TrackerKind;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The pause between two looks at the metrics.
const POLL: Duration = Duration::from_secs(1);

/// The longest pause after a fault.
const LONGEST: Duration = Duration::from_secs(60);

/// Tells threads that the run has ended.
pub(crate) struct Stop {
    /// The time after the end of a run within which lines are sent.
    grace: Duration,
    ending: Ending<(Outcome, Instant)>,
}

impl Stop {
    pub(crate) fn new(grace: Duration) -> Stop {
        Stop { grace, ending: Ending::default() }
    }

    /// Ends the threads after they have sent what is left.
    pub(crate) fn ask(&self, outcome: Outcome) {
        self.ending.tell((outcome, Instant::now() + self.grace));
    }

    /// Returns the outcome of the run and the time until which lines are sent, if the run has ended.
    fn asked(&self) -> Option<(Outcome, Instant)> {
        self.ending.told()
    }

    /// Returns the time limit of a request that usually has the limit `usual`: after the end of the run, at most the time that is left.
    ///
    /// Errors if no time is left.
    pub(crate) fn limit(&self, usual: Duration) -> Result<Duration, Fault> {
        let Some((_, end)) = self.asked() else { return Ok(usual) };
        match end.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(Fault::passing("the time after the end of the run is over")),
            left => Ok(left.min(usual)),
        }
    }

    /// Waits for `time`, or until the run ends. After the end of the run, waits for a shorter time.
    fn wait(&self, time: Duration) {
        self.ending.wait(time, POLL / 2);
    }
}

/// What a look at the metrics has sent.
enum Sent {
    /// Some lines; there may be more.
    Some,
    /// All lines that there are.
    All,
    /// All lines, and the end of the run.
    End,
}

/// Sends the lines of a run to a tracker.
pub(crate) struct Worker {
    kind: TrackerKind,
    tracker: Box<dyn Tracker>,
    folder: PathBuf,
    facts: Facts,
    shared: Arc<Shared>,
    follower: Follower,
    is_open: bool,
}

impl Worker {
    pub(crate) fn new(
        kind: TrackerKind,
        tracker: Box<dyn Tracker>,
        folder: PathBuf,
        facts: Facts,
        shared: Arc<Shared>,
        seen: Seen,
    ) -> Result<Worker> {
        let path = folder.join("metrics.jsonl");
        let follower = Follower::after(&path, seen.lines, seen.attempt).map_err(Error::io(&path))?;
        let worker = Worker { kind, tracker, folder, facts, shared, follower, is_open: false };
        // If lines are gone, a later start must know that the lines in their place are others.
        worker.record()?;
        Ok(worker)
    }

    /// Records what the tracker has got.
    fn record(&self) -> Result<()> {
        let (lines, attempt) = self.follower.position();
        self.shared.record(self.kind, Seen { lines, attempt })
    }

    /// Sends lines until the run ends, and then the rest. A fault is told once, and never ends the run.
    pub(crate) fn run(mut self, stop: &Stop) {
        let (name, mut pause) = (self.tracker.name(), POLL);
        loop {
            // The end is read before the lines, so that the last lines are not missed.
            let ended = stop.asked();
            let sent = self.step(stop).and_then(|has_more| match ended {
                Some((outcome, _)) if !has_more => self.tracker.end(outcome, &self.folder, stop).map(|()| Sent::End),
                _ if has_more => Ok(Sent::Some),
                _ => Ok(Sent::All),
            });
            match sent {
                Ok(Sent::End) => return,
                Ok(_) if pause > POLL => {
                    tracing::info!("{name} is reached again");
                    pause = POLL;
                }
                Ok(_) => {}
                Err(ref fault) if !self.endure(fault, &mut pause) => return,
                Err(_) => {}
            }
            if ended.is_some_and(|(_, limit)| Instant::now() > limit) {
                tracing::warn!("{name} did not get all metrics; `ottava train` with --resume sends the rest");
                return;
            }
            if !matches!(sent, Ok(Sent::Some)) {
                stop.wait(pause);
            }
        }
    }

    /// Tells a new fault, and makes the pause longer. Returns whether another attempt may succeed.
    fn endure(&self, fault: &Fault, pause: &mut Duration) -> bool {
        let name = self.tracker.name();
        if !fault.may_pass {
            tracing::warn!("{name} gets no more metrics: {}; the run goes on", fault.words);
            return false;
        }
        if *pause == POLL {
            tracing::warn!("{name} gets metrics later: {}; the run goes on", fault.words);
        }
        *pause = (*pause * 2).min(LONGEST);
        true
    }

    /// Opens the run, or sends the next lines. Returns whether there may be more lines at once.
    fn step(&mut self, stop: &Stop) -> Result<bool, Fault> {
        let of_file = |error: std::io::Error| Fault::passing(format!("metrics.jsonl cannot be read: {error}"));
        if !self.is_open {
            let (id, started) = self.shared.id();
            let opening = Opening { id: &id, started, facts: &self.facts, folder: &self.folder };
            self.tracker.open(&opening, stop)?;
            self.is_open = true;
        }
        let recorded = |recorded: Result<()>| recorded.map_err(|error| Fault::passing(error.to_string()));
        if self.follower.look_back().map_err(of_file)? {
            if self.tracker.starts_over() {
                self.follower.start_over();
                self.is_open = false;
            }
            recorded(self.record())?;
            return Ok(true);
        }
        let batch = self.follower.read().map_err(of_file)?;
        if batch.is_empty() {
            return Ok(false);
        }
        self.tracker.send(&batch.lines, stop)?;
        self.follower.advance(batch);
        recorded(self.record())?;
        Ok(true)
    }
}
