//! `trackers.json`: the id of a run in trackers, and what each tracker has got.

use ottava_common::fs::{RealFs, replace_file};
use ottava_common::{Error, Result, input};
use ottava_settings::TrackerKind;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// The name of the file in the folder of a run.
const FILE: &str = "trackers.json";

/// The maximum size of the file in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// The characters of ids.
const LETTERS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";

/// What a tracker has got.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seen {
    /// The lines of `metrics.jsonl`.
    pub(crate) lines: u64,
    /// The number of returns to an earlier step.
    pub(crate) attempt: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct State {
    id: String,
    /// The first start of the run, in seconds since 1970.
    started: u64,
    seen: BTreeMap<TrackerKind, Seen>,
}

/// The state, which the threads of all trackers share.
pub(crate) struct Shared {
    path: PathBuf,
    state: Mutex<State>,
}

impl Shared {
    /// Reads the state of the run in `folder`. A run without metrics is a new run, with a new id.
    pub(crate) fn open(folder: &Path) -> Result<Shared> {
        let (path, metrics) = (folder.join(FILE), folder.join("metrics.jsonl"));
        let is_new = std::fs::metadata(&metrics).map_err(Error::io(&metrics))?.len() == 0;
        let state = match is_new || !path.exists() {
            true => State::new(),
            false => {
                let text = input::read_text(&path, MAX_BYTES)
                    .map_err(|why| Error::Config(format!("{}: {why}", path.display())))?;
                serde_json::from_str(&text).map_err(|why| {
                    let remedy = "restore it, or delete it so that trackers begin a new run";
                    Error::Config(format!("{}: {why}; {remedy}", path.display()))
                })?
            }
        };
        let shared = Shared { path, state: Mutex::new(state) };
        // The id is stored before a tracker gets it, so that a killed run is found again.
        shared.change(|_| {})?;
        Ok(shared)
    }

    pub(crate) fn id(&self) -> (String, u64) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.id.clone(), state.started)
    }

    pub(crate) fn seen(&self, kind: TrackerKind) -> Seen {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.seen.get(&kind).copied().unwrap_or_default()
    }

    /// Records what a tracker has got.
    pub(crate) fn record(&self, kind: TrackerKind, seen: Seen) -> Result<()> {
        self.change(|state| {
            state.seen.insert(kind, seen);
        })
    }

    fn change(&self, change: impl FnOnce(&mut State)) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut state);
        let text = serde_json::to_string_pretty(&*state).expect("texts and numbers are JSON");
        replace_file(&RealFs, &self.path, text.as_bytes())
    }
}

impl State {
    fn new() -> State {
        let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let mut random = RandomState::new().hash_one(started);
        let mut letter = || {
            let letter = LETTERS[(random % 36) as usize];
            random /= 36;
            char::from(letter)
        };
        State { id: (0..8).map(|_| letter()).collect(), started, seen: BTreeMap::new() }
    }
}
