//! Streamed training data: files that are fetched and tokenized while the run trains.
//!
//! The files of a stream are its shards. Each epoch visits the shards in a pseudo-random order, a window of some shards at a time. A window is
//! fetched, tokenized and read like a data set of its own: its documents are shuffled together, and each of its tokens is a target once. While a run
//! trains on a window, a thread prepares the next window.
//!
//! The order depends on the number of shards, the seed and the sizes of windows alone, so it is the same for local files and for files of a store, and a
//! position is a [`LoaderState`] whose `epoch` counts windows. In packing `wrapped`, the last row of a window is filled with tokens of the same
//! window, in another order.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use crate::loader::{Batch, LoaderState, SetRows};
use crate::order::{Permutation, Split};
use crate::packing::RowLayout;
use crate::shards::TokenDataset;
use crate::stamps;
use ottava_common::fs::{RealFs, create_dirs};
use ottava_common::hash::sha256;
use ottava_common::{Error, Result, interrupt};

/// The number of shards that are fetched at a time.
const THREADS: usize = 4;

/// The number of attempts to fetch a shard. Each attempt has the retries of its protocol.
const ATTEMPTS: u32 = 5;

/// The pause after the first failed attempt. Each pause is twice as long as the pause before.
const PAUSE: Duration = Duration::from_secs(2);

/// The interval between checks for a stop during a pause.
const POLL: Duration = Duration::from_millis(20);

/// The files of a stream: local files, or files elsewhere that are copied when they are needed.
pub trait ShardSource: Send + Sync {
    /// Returns the number of shards; at least one.
    fn count(&self) -> usize;

    /// Returns the name of a shard in messages.
    fn name(&self, shard: usize) -> String;

    /// Returns a text that differs between different versions of a shard, as far as this is known without reading the shard.
    fn version(&self, shard: usize) -> String;

    /// Returns the local file of a shard. Copies the shard if it is not here.
    ///
    /// Errors with [`Error::External`] if the shard cannot be fetched now.
    fn fetch(&self, shard: usize) -> Result<PathBuf>;

    /// Removes the copy of a shard, if the shard has one.
    fn remove(&self, _shard: usize) {}
}

/// The shards of a run. Two lists are equal if their shards have the same names and versions.
#[derive(Clone)]
pub struct Shards(Arc<dyn ShardSource>);

impl Shards {
    /// Creates the list of all shards of `source`.
    pub fn new(source: impl ShardSource + 'static) -> Shards {
        Shards(Arc::new(source))
    }

    /// Returns the number of shards.
    pub fn count(&self) -> usize {
        self.0.count()
    }

    fn versions(&self) -> Vec<(String, String)> {
        (0..self.count()).map(|shard| (self.0.name(shard), self.0.version(shard))).collect()
    }

    /// Returns a hash of the names and versions of all shards, in order.
    pub fn key(&self) -> String {
        sha256(format!("{:?}", self.versions()).as_bytes())
    }

    /// Returns the local file of a shard. An attempt that fails is repeated after a pause, and a warning names the shard.
    ///
    /// Has the errors of [`ShardSource::fetch`], after the last attempt.
    pub fn fetch(&self, shard: usize) -> Result<PathBuf> {
        self.fetch_with(shard, PAUSE)
    }

    fn fetch_with(&self, shard: usize, mut pause: Duration) -> Result<PathBuf> {
        for attempt in 2..=ATTEMPTS {
            match self.0.fetch(shard) {
                Err(Error::External(why)) => {
                    let (name, seconds) = (self.0.name(shard), pause.as_secs_f64());
                    warn!("{name}: {why}; attempt {attempt} of {ATTEMPTS} follows in {seconds:.0} s");
                    wait(pause)?;
                    pause *= 2;
                }
                found => return found,
            }
        }
        self.0.fetch(shard).map_err(|error| match error {
            Error::External(why) => {
                Error::External(format!("{}: {why}; this was attempt {ATTEMPTS} of {ATTEMPTS}", self.0.name(shard)))
            }
            other => other,
        })
    }
}

impl fmt::Debug for Shards {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_list().entries(self.versions()).finish()
    }
}

impl PartialEq for Shards {
    fn eq(&self, other: &Shards) -> bool {
        self.versions() == other.versions()
    }
}

/// Waits for `pause`. Errors with [`Error::Cancelled`] if the process was asked to stop.
fn wait(pause: Duration) -> Result<()> {
    let end = Instant::now() + pause;
    while Instant::now() < end {
        interrupt::check("fetching data")?;
        thread::sleep(POLL.min(pause));
    }
    Ok(())
}

/// Tokenizes the files of a window.
type Prepare = dyn Fn(&[PathBuf]) -> Result<Arc<TokenDataset>> + Send + Sync;

/// How shards become windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamSizes {
    /// The number of shards whose documents are shuffled together.
    pub window: usize,
    /// The maximum number of shards whose copies and tokens are on disk, at least two windows; 0 keeps all.
    pub kept: usize,
}

/// A stream of training data.
pub struct ShardStream {
    shards: Shards,
    sizes: StreamSizes,
    /// The folder with a record of each window whose tokens are on disk.
    records: PathBuf,
    prepare: Box<Prepare>,
    pause: Duration,
}

/// What is on disk of a window.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WindowRecord {
    shards: Vec<usize>,
    tokens: PathBuf,
}

impl ShardStream {
    /// Creates the stream of `shards`. `prepare` tokenizes the files of a window. Records of windows are in a subfolder of `cache`.
    pub fn new(
        shards: Shards,
        sizes: StreamSizes,
        cache: &Path,
        prepare: impl Fn(&[PathBuf]) -> Result<Arc<TokenDataset>> + Send + Sync + 'static,
    ) -> ShardStream {
        let records = cache.join(format!("stream-{}", &shards.key()[..16]));
        ShardStream { shards, sizes, records, prepare: Box::new(prepare), pause: PAUSE }
    }

    /// Returns the shards.
    pub fn shards(&self) -> &Shards {
        &self.shards
    }

    /// Returns the shards of a window. Windows are counted over all epochs.
    pub fn window(&self, seed: u64, window: u64) -> Vec<usize> {
        let (count, together) = (self.shards.count() as u64, self.sizes.window as u64);
        let of_epoch = count.div_ceil(together);
        let (epoch, start) = (window / of_epoch, window % of_epoch * together);
        let order = Permutation::new(count, seed, epoch);
        (start..count.min(start + together)).map(|place| order.get(place) as usize).collect()
    }

    /// Returns the tokens of a window: fetches its shards and tokenizes them, unless this was done before.
    fn open(&self, seed: u64, window: u64) -> Result<Arc<TokenDataset>> {
        create_dirs(&RealFs, &self.records)?;
        let (shards, mut attempt) = (self.window(seed, window), 1);
        let dataset = loop {
            let files = self.fetch(&shards)?;
            let _lock = self.lock()?;
            match (self.prepare)(&files) {
                // A run, or another data set, with the same copies may have removed a copy.
                Err(_) if attempt < ATTEMPTS && files.iter().any(|file| !file.exists()) => attempt += 1,
                prepared => break prepared?,
            }
        };
        stamps::write(&self.record(window), &WindowRecord { shards, tokens: dataset.folder().to_path_buf() });
        Ok(dataset)
    }

    /// Returns the local files of `shards`, in order.
    fn fetch(&self, shards: &[usize]) -> Result<Vec<PathBuf>> {
        let fetch = |shard: usize| move || self.shards.fetch_with(shard, self.pause);
        let mut files = Vec::new();
        for together in shards.chunks(THREADS) {
            let found = thread::scope(|scope| {
                let threads: Vec<_> = together.iter().map(|shard| scope.spawn(fetch(*shard))).collect();
                let files = threads.into_iter().map(|thread| thread.join().expect("fetching a shard does not panic"));
                files.collect::<Result<Vec<_>>>()
            });
            files.extend(found?);
        }
        Ok(files)
    }

    /// Waits until no other process tokenizes files of this stream. So ranks of one host share the work: the first rank tokenizes, and the others find
    /// the tokens. Without locks, each process does the work.
    fn lock(&self) -> Result<File> {
        let path = self.records.join(".lock");
        let lock = File::options().create(true).append(true).open(&path).map_err(Error::io(&path))?;
        while let Err(TryLockError::WouldBlock) = lock.try_lock() {
            wait(POLL)?;
        }
        Ok(lock)
    }

    fn record(&self, window: u64) -> PathBuf {
        self.records.join(format!("window-{window}.json"))
    }

    /// Removes copies and tokens of all windows except the windows that stay when `window` begins: the window after it, itself, and windows before
    /// it as far as they are within the bound.
    fn remove_others(&self, seed: u64, window: u64) {
        let windows = (self.sizes.kept / self.sizes.window) as u64;
        if windows == 0 {
            return;
        }
        let stay = (window + 2).saturating_sub(windows)..window + 2;
        let needed: BTreeSet<usize> = stay.clone().flat_map(|window| self.window(seed, window)).collect();
        // Windows of different epochs may have the same files in the same order.
        let records = stay.clone().filter_map(|window| stamps::read::<WindowRecord>(&self.record(window)));
        let in_use: BTreeSet<PathBuf> = records.map(|record| record.tokens).collect();
        let entries = std::fs::read_dir(&self.records).into_iter().flatten().flatten();
        for path in entries.map(|entry| entry.path()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let number = name.strip_prefix("window-").and_then(|name| name.strip_suffix(".json")?.parse::<u64>().ok());
            let Some(record) =
                number.filter(|number| !stay.contains(number)).and_then(|_| stamps::read::<WindowRecord>(&path))
            else {
                continue;
            };
            record.shards.iter().filter(|shard| !needed.contains(shard)).for_each(|shard| self.shards.0.remove(*shard));
            if !in_use.contains(&record.tokens) {
                let _ = std::fs::remove_dir_all(&record.tokens);
            }
            let _ = std::fs::remove_file(&path);
        }
    }

    fn describe(&self, seed: u64, window: u64) -> String {
        let names: Vec<String> = self.window(seed, window).into_iter().map(|shard| self.shards.0.name(shard)).collect();
        names.join(", ")
    }
}

/// The endless rows of a stream.
pub(super) struct StreamRows {
    stream: Arc<ShardStream>,
    layout: RowLayout,
    seed: u64,
    /// The number of the window of `rows`.
    window: u64,
    rows: SetRows,
    /// The thread that prepares the next window.
    next: Option<JoinHandle<Result<Arc<TokenDataset>>>>,
}

impl StreamRows {
    /// Starts at `state`, when its window is there. Errors with [`Error::Checkpoint`] if the state does not fit the data, and with the errors of
    /// [`Shards::fetch`].
    pub(super) fn new(stream: Arc<ShardStream>, layout: RowLayout, state: LoaderState) -> Result<StreamRows> {
        let (seed, window) = (state.seed, state.epoch);
        let dataset = stream.open(seed, window)?;
        let rows = rows_at(dataset, layout, state)?;
        let mut all = StreamRows { stream, layout, seed, window, rows, next: None };
        all.begin();
        Ok(all)
    }

    /// Removes what is no longer needed, and prepares the next window in another thread.
    fn begin(&mut self) {
        self.stream.remove_others(self.seed, self.window);
        let (stream, seed, next) = (self.stream.clone(), self.seed, self.window + 1);
        self.next = Some(thread::spawn(move || stream.open(seed, next)));
    }

    /// Returns the position of the next row.
    pub(super) fn state(&self) -> LoaderState {
        let state = self.rows.state();
        match state.epoch == self.window {
            true => state,
            false => self.start_of_next(),
        }
    }

    fn start_of_next(&self) -> LoaderState {
        LoaderState { epoch: self.window + 1, ..LoaderState::start(self.seed) }
    }

    /// Appends the next row to `batch`. Returns the number of its tokens without padding.
    pub(super) fn row(&mut self, batch: &mut Batch) -> Result<u64> {
        self.turn()?;
        self.rows.row(batch)
    }

    /// Skips the next row without reading its tokens. Returns the number of its tokens.
    pub(super) fn skip(&mut self) -> Result<u64> {
        self.turn()?;
        self.rows.skip()
    }

    /// Goes to the next window if the rows of this window are over.
    fn turn(&mut self) -> Result<()> {
        if self.rows.state().epoch == self.window {
            return Ok(());
        }
        let state = self.start_of_next();
        self.rows = rows_at(self.wait_for_next()?, self.layout, state)?;
        self.window = state.epoch;
        self.begin();
        Ok(())
    }

    /// Returns the tokens of the next window when they are there. After an error, another call begins again.
    fn wait_for_next(&mut self) -> Result<Arc<TokenDataset>> {
        let Some(next) = self.next.take() else { return self.stream.open(self.seed, self.window + 1) };
        if !next.is_finished() {
            info!("waiting for {}", self.stream.describe(self.seed, self.window + 1));
        }
        while !next.is_finished() {
            interrupt::check("waiting for data")?;
            thread::sleep(POLL);
        }
        next.join().expect("the thread of a window does not panic")
    }
}

/// Returns the rows of a window from `state` on.
fn rows_at(dataset: Arc<TokenDataset>, layout: RowLayout, state: LoaderState) -> Result<SetRows> {
    let split = Split::new(dataset.len(), 0.0)?;
    SetRows::new(dataset, split, layout, state)
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
