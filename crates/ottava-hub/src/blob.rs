//! Downloads one file in ranges, several at a time, and resumes after a kill.
//!
//! The file grows as `CHECKSUM.part`, and `CHECKSUM.ranges` lists the ranges that are written. A process that downloads the file holds the lock of the
//! file. At the end, the checksum is compared, and the file gets its name in the cache.

use crate::api::{Hub, MAX_REDIRECTS, pause};
use crate::cache::{Cached, create_parent, unwritable};
use crate::hash::Checksum;
use crate::ranges::Ranges;
use crate::{Entry, RepoId};
use ottava_common::fs::{RealFs, sync_parent};
use ottava_common::{Error, Result, interrupt};
use ottava_http::{Fault, Request, Url};
use std::fs::{self, File, TryLockError};
use std::io::{Read, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The bytes of a request.
const REQUEST: u64 = 32 << 20;

/// The bytes after which a range is recorded as written.
const RECORD: u64 = 4 << 20;

/// The time limit of a request for a range. The bytes that arrived before are kept.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The lowest speed in bytes per second at which a whole file is waited for, because a server without ranges starts over.
const SLOWEST: u64 = 100_000;

/// The pause between checks whether another process has released the lock of a file.
const POLL: Duration = Duration::from_millis(50);

/// The download of a file. Threads call [`Blob::step`] until [`Blob::is_finished`].
pub(crate) struct Blob<'a> {
    hub: &'a Hub,
    id: &'a RepoId,
    entry: &'a Entry,
    /// The address of the file on the Hub, and the commit.
    url: Url,
    target: PathBuf,
    lock: PathBuf,
    state: Mutex<State>,
    /// The bytes that are written, of all files.
    written: &'a AtomicU64,
}

#[derive(Default)]
struct State {
    stage: Stage,
    done: Ranges,
    /// The ranges that threads are downloading.
    flying: Vec<Range<u64>>,
    /// Whether the server ignores ranges, so one thread downloads the whole file.
    whole: bool,
    /// The address that the Hub has redirected to. It expires.
    location: Option<Url>,
    /// Whether the file was downloaded before with another checksum.
    was_wrong: bool,
}

#[derive(Default)]
enum Stage {
    #[default]
    New,
    /// A thread waits for the lock.
    Opening,
    Open(Opened),
    Finished,
}

struct Opened {
    part: File,
    ranges: File,
    /// The file with the lock, which is released when the file is closed.
    _lock: File,
}

/// The rest of a range that a thread downloads.
struct Rest {
    range: Range<u64>,
    /// The number of bytes that this thread has added to the file.
    new: u64,
}

/// Why a range was not downloaded.
enum Trouble {
    Fault(Fault),
    Fatal(Error),
}

impl From<Fault> for Trouble {
    fn from(fault: Fault) -> Trouble {
        Trouble::Fault(fault)
    }
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Trouble {
        Trouble::Fatal(error)
    }
}

/// What a call of [`Blob::step`] has done.
#[derive(PartialEq)]
pub(crate) enum Step {
    Worked,
    /// The file is finished, or other threads are busy with the rest of it.
    Idle,
}

impl<'a> Blob<'a> {
    pub(crate) fn new(
        hub: &'a Hub,
        id: &'a RepoId,
        commit: &str,
        entry: &'a Entry,
        written: &'a AtomicU64,
    ) -> Blob<'a> {
        let cached: Cached = hub.cached(id);
        let (target, lock) = (cached.blob(entry.checksum()), cached.lock(entry.checksum()));
        let url = hub.file(id, commit, &entry.path);
        Blob { hub, id, entry, url, target, lock, state: Mutex::default(), written }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the file is in the cache.
    pub(crate) fn is_finished(&self) -> bool {
        matches!(self.state().stage, Stage::Finished)
    }

    /// Downloads one range of the file, or checks and names the file if all ranges are there.
    pub(crate) fn step(&self) -> Result<Step> {
        let size = self.entry.size;
        let mut state = self.state();
        match state.stage {
            Stage::Opening | Stage::Finished => return Ok(Step::Idle),
            Stage::New => {
                state.stage = Stage::Opening;
                drop(state);
                self.open()?;
                return Ok(Step::Worked);
            }
            Stage::Open(_) => {}
        }
        let gap = match state.whole {
            true if state.done.bytes() < size => state.flying.is_empty().then_some(0..size),
            true => None,
            false => {
                let mut taken = state.done.clone();
                state.flying.iter().for_each(|range| taken.add(range.clone()));
                taken.first_gap(size, REQUEST)
            }
        };
        match gap {
            Some(range) => {
                state.flying.push(range.clone());
                drop(state);
                let fetched = self.fetch_with_retries(range.clone());
                self.state().flying.retain(|flying| flying.start != range.start);
                fetched.map(|()| Step::Worked)
            }
            None if state.flying.is_empty() => {
                let Stage::Open(opened) = std::mem::replace(&mut state.stage, Stage::Opening) else {
                    unreachable!("the stage was checked under the same lock")
                };
                drop(state);
                self.finish(opened).map(|()| Step::Worked)
            }
            None => Ok(Step::Idle),
        }
    }

    /// Takes the lock, and opens the files of an earlier download if there was one.
    fn open(&self) -> Result<()> {
        create_parent(&self.lock)?;
        create_parent(&self.target)?;
        let lock = File::options().create(true).append(true).open(&self.lock).map_err(unwritable(&self.lock))?;
        wait_for(&self.lock, || lock.try_lock())?;
        if fs::metadata(&self.target).is_ok_and(|found| found.len() == self.entry.size) {
            self.written.fetch_add(self.entry.size, Ordering::Relaxed);
            self.state().stage = Stage::Finished;
            return Ok(());
        }
        let (part, ranges) = (self.beside("part"), self.beside("ranges"));
        if !part.exists() {
            remove(&ranges)?;
        }
        let listed = fs::read(&ranges).unwrap_or_default();
        let done = Ranges::parse(&String::from_utf8_lossy(&listed), self.entry.size);
        let open =
            |path: &Path| File::options().create(true).read(true).append(true).open(path).map_err(unwritable(path));
        let mut ranges_file = open(&ranges)?;
        if listed.last().is_some_and(|last| *last != b'\n') {
            // The rest of a line of a killed process must not become the beginning of the next line.
            ranges_file.write_all(b"\n").map_err(unwritable(&ranges))?;
        }
        let part_file = File::options().create(true).truncate(false).read(true).write(true).open(&part);
        let part_file = part_file.map_err(unwritable(&part))?;
        part_file.set_len(self.entry.size).map_err(unwritable(&part))?;
        self.written.fetch_add(done.bytes(), Ordering::Relaxed);
        let mut state = self.state();
        state.done = done;
        state.stage = Stage::Open(Opened { part: part_file, ranges: ranges_file, _lock: lock });
        Ok(())
    }

    fn beside(&self, extension: &str) -> PathBuf {
        PathBuf::from(format!("{}.{extension}", self.target.display()))
    }

    /// Compares the checksum, and gives the file its name. Starts over once if the checksum is wrong.
    fn finish(&self, opened: Opened) -> Result<()> {
        let (part, ranges) = (self.beside("part"), self.beside("ranges"));
        opened.part.sync_all().map_err(unwritable(&part))?;
        let file = File::open(&part).map_err(unwritable(&part))?;
        let expected = self.entry.checksum();
        let checksum = Checksum::like(expected, self.entry.size)
            .ok_or_else(|| self.hub.unusable(self.id, &format!("{expected:?} is no checksum")))?;
        let found = checksum.of_reader(file).map_err(unwritable(&part))?;
        if found == expected {
            fs::rename(&part, &self.target).map_err(unwritable(&part))?;
            sync_parent(&RealFs, &self.target)?;
            remove(&ranges)?;
            self.state().stage = Stage::Finished;
            return Ok(());
        }
        remove(&part)?;
        remove(&ranges)?;
        let mut state = self.state();
        if state.was_wrong {
            return Err(Error::External(format!(
                "{}: two downloads have another checksum than {} names ({expected}); nothing was stored; try again later",
                self.url, self.hub.endpoint
            )));
        }
        tracing::warn!("{}: the checksum of the downloaded file is wrong; it is downloaded again", self.url);
        self.written.fetch_sub(state.done.bytes(), Ordering::Relaxed);
        *state = State { was_wrong: true, ..State::default() };
        Ok(())
    }

    /// Downloads `range`. Retries after temporary faults; each attempt that brings new bytes counts as the first one.
    fn fetch_with_retries(&self, range: Range<u64>) -> Result<()> {
        let has = |range: &Range<u64>| {
            let mut done = self.state().done.clone();
            let before = done.bytes();
            done.add(range.clone());
            done.bytes() == before
        };
        let mut rest = Rest { range, new: 0 };
        while !has(&rest.range) {
            let attempt = || match self.fetch(&mut rest) {
                Ok(()) => Ok(Ok(())),
                Err(Trouble::Fatal(error)) => Ok(Err(error)),
                Err(Trouble::Fault(fault)) => Err(fault),
            };
            match self.hub.retry.run(pause, attempt) {
                Ok(fetched) => fetched?,
                Err(fault) => {
                    interrupt::check("downloading")?;
                    let kept = self.state().done.bytes();
                    return Err(Error::External(format!(
                        "{}; {kept} of {} bytes of {} are kept, and the next attempt resumes there",
                        fault.words, self.entry.size, self.entry.path
                    )));
                }
            }
            if self.state().whole && rest.range != (0..self.entry.size) {
                // Another thread downloads the whole file.
                return Ok(());
            }
        }
        Ok(())
    }

    /// Sends one request for the rest of a range, and records what arrives. A fault after new bytes of this range is no fault.
    fn fetch(&self, rest: &mut Rest) -> Result<(), Trouble> {
        let before = rest.new;
        match self.request(rest) {
            Err(Trouble::Fault(fault)) if fault.may_pass && rest.new > before => Ok(()),
            other => other,
        }
    }

    fn request(&self, rest: &mut Rest) -> Result<(), Trouble> {
        let stored = self.state().location.clone();
        let is_stored = stored.is_some();
        let mut url = stored.unwrap_or_else(|| self.url.clone());
        let whole = 0..self.entry.size;
        for _ in 0..MAX_REDIRECTS {
            let there = self.hub.client_at(&url)?;
            let range = rest.range.clone();
            let timeout = match self.state().whole {
                true => TIMEOUT + Duration::from_secs(self.entry.size / SLOWEST),
                false => TIMEOUT,
            };
            let bytes = format!("bytes={}-{}", range.start, range.end - 1);
            let request = Request::get().header("Range", bytes).header("Accept-Encoding", "identity");
            let answer = there.send(request, timeout)?;
            match answer.status() {
                200 => {
                    let mut state = self.state();
                    if range != whole && state.whole {
                        // Another thread downloads the whole file.
                        return Ok(());
                    }
                    state.location = Some(url.clone());
                    let has_time = state.whole || range == whole;
                    (state.whole, rest.range) = (true, whole.clone());
                    drop(state);
                    if has_time {
                        // A fault starts over, so the bytes that are new in the file are counted, and the range stays.
                        let mut all = Rest { range: whole, new: rest.new };
                        let received = self.receive(answer.into_reader(), &mut all);
                        rest.new = all.new;
                        return received;
                    }
                }
                206 => {
                    let expected = format!("bytes {}-", range.start);
                    if !answer.header("content-range").is_some_and(|range| range.starts_with(&expected)) {
                        return Err(Fault::passing(format!("{url} answered with another range than asked for")).into());
                    }
                    self.state().location = Some(url);
                    return self.receive(answer.into_reader(), rest);
                }
                300..=399 => {
                    let location = answer.header("location").unwrap_or_default();
                    url =
                        url.redirect(location).map_err(|_| Fault::lasting(format!("{url} redirects to no address")))?;
                }
                401 | 403 | 404 | 410 if is_stored || url.origin() != self.url.origin() => {
                    // The address has expired, so the Hub is asked for another one.
                    self.state().location = None;
                    return Err(Fault::passing(format!("{url} answered with status {}", answer.status())).into());
                }
                status => {
                    let codes = [answer.header("x-error-code"), answer.header("x-error-message")];
                    let codes = codes.map(|text| text.unwrap_or_default().to_string());
                    if let Some(error) = self.hub.refusal(self.id, status, &codes) {
                        return Err(error.into());
                    }
                    answer.success()?;
                    return Err(Fault::lasting(format!("{url} answered with status {status}")).into());
                }
            }
        }
        Err(Fault::lasting(format!("{} redirects more than {MAX_REDIRECTS} times", self.url)).into())
    }

    /// Writes the bytes of `body` to the `rest` of a range, whose start moves to the first byte that is missing.
    fn receive(&self, mut body: impl Read, rest: &mut Rest) -> Result<(), Trouble> {
        let path = self.beside("part");
        let part = match &self.state().stage {
            Stage::Open(opened) => opened.part.try_clone().map_err(unwritable(&path))?,
            _ => unreachable!("ranges are received while the file is open"),
        };
        let (mut buffer, mut at) = (vec![0; 256 << 10], rest.range.start);
        while at < rest.range.end {
            interrupt::check("downloading; the finished part is kept")?;
            let most = buffer.len().min(usize::try_from(rest.range.end - at).unwrap_or(usize::MAX));
            let count = match body.read(&mut buffer[..most]) {
                Ok(count) => count,
                Err(error) => {
                    self.record(rest, at)?;
                    return Err(Fault::passing(format!("the connection to {} was lost: {error}", self.url)).into());
                }
            };
            if count == 0 {
                self.record(rest, at)?;
                return Err(Fault::passing(format!("{} ended its answer too early", self.url)).into());
            }
            part.write_all_at(&buffer[..count], at).map_err(unwritable(&path))?;
            at += count as u64;
            if at - rest.range.start >= RECORD || at == rest.range.end {
                self.record(rest, at)?;
            }
        }
        Ok(())
    }

    /// Records that the bytes from the start of `rest` to `at` are written, and moves the start.
    fn record(&self, rest: &mut Rest, at: u64) -> Result<()> {
        if at == rest.range.start {
            return Ok(());
        }
        let written = rest.range.start..at;
        let mut state = self.state();
        if let Stage::Open(opened) = &mut state.stage {
            let path = self.beside("ranges");
            opened.ranges.write_all(Ranges::line(&written).as_bytes()).map_err(unwritable(&path))?;
        }
        let before = state.done.bytes();
        state.done.add(written);
        let new = state.done.bytes() - before;
        self.written.fetch_add(new, Ordering::Relaxed);
        rest.new += new;
        rest.range.start = at;
        Ok(())
    }
}

/// Waits until `try_lock` has the lock of the file at `path`, which another process may hold.
///
/// Errors if the file system has no locks.
fn wait_for(path: &Path, mut try_lock: impl FnMut() -> Result<(), TryLockError>) -> Result<()> {
    loop {
        match try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) => interrupt::check("waiting for another download of the same file")?,
            Err(TryLockError::Error(error)) => {
                return Err(Error::Config(format!(
                    "{}: the file cannot be locked: {error}; set HF_HUB_CACHE to a folder on a file system with locks",
                    path.display()
                )));
            }
        }
        std::thread::sleep(POLL);
    }
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(unwritable(path)(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kind;
    use ottava_http::Retry;
    use ottava_http::testing::{Server, reply};
    use std::sync::Arc;
    use std::thread;

    #[test]
    fn progress_of_other_ranges_gives_a_failing_range_no_attempts() {
        let asked = Arc::new((AtomicU64::new(0), AtomicU64::new(0)));
        let counts = asked.clone();
        // Before each answer, another thread makes progress.
        let server = Server::start(move |_, _| {
            let number = counts.0.fetch_add(1, Ordering::SeqCst) + 1;
            while counts.1.load(Ordering::SeqCst) < number {
                thread::yield_now();
            }
            reply(503, "", "busy")
        });
        let cache = tempfile::tempdir().unwrap();
        let retry = Retry { attempts: 3, first_pause: Duration::from_millis(1) };
        let hub = Hub::new(Url::new("url", &server.url("")).unwrap(), None, cache.path()).with_retry(retry);
        let id = RepoId::parse(Kind::Model, "a/b").unwrap();
        let entry = Entry::new("x", 200, "a".repeat(40), None).unwrap();
        let written = AtomicU64::new(0);
        let blob = Blob::new(&hub, &id, "main", &entry, &written);
        blob.open().unwrap();
        thread::scope(|scope| {
            let failing = scope.spawn(|| blob.fetch_with_retries(100..200));
            while !failing.is_finished() {
                let (number, done) = (asked.0.load(Ordering::SeqCst), asked.1.load(Ordering::SeqCst));
                if done < number {
                    blob.record(&mut Rest { range: done..number, new: 0 }, number).unwrap();
                    asked.1.store(number, Ordering::SeqCst);
                }
                thread::yield_now();
            }
            let error = failing.join().unwrap().unwrap_err().to_string();
            assert!(error.contains("after 3 attempts") && error.contains("3 of 200 bytes"), "{error}");
        });
        assert_eq!(server.received().len(), 3);
    }

    #[test]
    fn a_file_system_without_locks_is_an_error() {
        let mut tries = 0;
        let busy_twice = || {
            tries += 1;
            if tries < 3 { Err(TryLockError::WouldBlock) } else { Ok(()) }
        };
        wait_for(Path::new("x.lock"), busy_twice).unwrap();
        assert_eq!(tries, 3);
        let none = || Err(TryLockError::Error(std::io::ErrorKind::Unsupported.into()));
        let error = wait_for(Path::new("x.lock"), none).unwrap_err();
        assert!(matches!(&error, Error::Config(text) if text.contains("x.lock") && text.contains("HF_HUB_CACHE")));
    }
}
