//! Uploads one file of Git LFS, as a whole or in parts.

use crate::api::{Hub, TIMEOUT, pause};
use crate::content::Content;
use ottava_common::threads::in_threads;
use ottava_common::{Error, Result, interrupt};
use ottava_http::{Fault, Request, Url};
use serde_json::{Map, Value, json};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The number of parts that are uploaded at a time.
const THREADS: usize = 4;

/// The lowest speed in bytes per second at which an upload is waited for.
pub(crate) const SLOWEST: u64 = 100_000;

/// What a push that ends with an error has left.
pub(crate) const UNCOMMITTED: &str = "nothing was committed; the same command goes on with the files that are missing";

/// A file, and what the Hub asks to do with it.
pub(crate) struct Upload<'a> {
    oid: String,
    pub(crate) size: u64,
    content: &'a Content,
    way: Way,
    /// The address that is told of the end of the upload, with its headers.
    verify: Option<(Url, Map<String, Value>)>,
}

/// Why an upload has ended.
pub(crate) enum Ended {
    /// The server refuses the address (status 400, 403 or 404), which is so if the address has expired.
    Expired(Error),
    Other(Error),
}

impl From<Error> for Ended {
    fn from(error: Error) -> Ended {
        Ended::Other(error)
    }
}

impl From<Ended> for Error {
    fn from(ended: Ended) -> Error {
        match ended {
            Ended::Expired(error) | Ended::Other(error) => error,
        }
    }
}

enum Way {
    /// One request.
    Whole(Url, Map<String, Value>),
    /// Parts of `size` bytes, and the address that joins them.
    Parts { urls: Vec<Url>, size: u64, join: Url },
}

impl<'a> Upload<'a> {
    /// Reads the `actions` of the Hub. Errors with the reason if they cannot be carried out.
    pub(crate) fn new(actions: &Value, oid: &str, size: u64, content: &'a Content) -> Result<Upload<'a>, String> {
        let url =
            |value: &Value| Url::new("href", value.as_str().unwrap_or_default()).map_err(|error| error.to_string());
        let headers = |value: &Value| value.as_object().cloned().unwrap_or_default();
        let (upload, verify) = (&actions["upload"], &actions["verify"]);
        let header = headers(&upload["header"]);
        let chunk = header.get("chunk_size").and_then(|size| size.as_u64().or_else(|| size.as_str()?.parse().ok()));
        let way = match chunk {
            None => Way::Whole(url(&upload["href"])?, header),
            Some(chunk) => {
                let mut parts: Vec<(u64, &Value)> =
                    header.iter().filter_map(|(key, value)| Some((key.parse().ok()?, value))).collect();
                parts.sort_by_key(|(number, _)| *number);
                if chunk == 0 || parts.len() as u64 != size.div_ceil(chunk) {
                    return Err(format!("{} parts of {chunk} bytes are not its {size} bytes", parts.len()));
                }
                let urls = parts.into_iter().map(|(_, value)| url(value)).collect::<Result<_, _>>()?;
                Way::Parts { urls, size: chunk, join: url(&upload["href"])? }
            }
        };
        let verify = match verify.is_object() {
            true => Some((url(&verify["href"])?, headers(&verify["header"]))),
            false => None,
        };
        Ok(Upload { oid: oid.to_string(), size, content, way, verify })
    }

    /// Uploads the file. Calls `look` with the bytes that are uploaded.
    pub(crate) fn run(&self, hub: &Hub, look: &mut dyn FnMut(u64)) -> Result<(), Ended> {
        match &self.way {
            Way::Whole(url, headers) => drop(self.put(hub, url, headers, 0, self.size)?),
            Way::Parts { urls, size, join } => {
                let etags = self.put_parts(hub, urls, *size, look)?;
                let parts: Vec<_> = (1..)
                    .zip(etags)
                    .map(|(number, etag): (u64, _)| json!({"partNumber": number, "etag": etag}))
                    .collect();
                let body = json!({"oid": self.oid, "parts": parts}).to_string();
                self.post(hub, join, &Map::new(), body.as_bytes())?;
            }
        }
        look(self.size);
        match &self.verify {
            Some((url, headers)) => {
                let body = json!({"oid": self.oid, "size": self.size}).to_string();
                self.post(hub, url, headers, body.as_bytes())
            }
            None => Ok(()),
        }
    }

    /// Uploads all parts with several threads, and returns their tags.
    fn put_parts(&self, hub: &Hub, urls: &[Url], size: u64, look: &mut dyn FnMut(u64)) -> Result<Vec<String>, Ended> {
        let (next, done, expired) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicBool::new(false));
        let etags: Vec<Mutex<String>> = urls.iter().map(|_| Mutex::default()).collect();
        let work = |has_failed: &dyn Fn() -> bool| {
            while !has_failed() {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let (Some(url), Some(etag)) = (urls.get(at), etags.get(at)) else { break };
                let start = at as u64 * size;
                let length = size.min(self.size - start);
                let found = self.put(hub, url, &Map::new(), start, length).inspect_err(|ended| {
                    expired.fetch_or(matches!(ended, Ended::Expired(_)), Ordering::Relaxed);
                })?;
                *etag.lock().unwrap_or_else(PoisonError::into_inner) = found;
                done.fetch_add(length, Ordering::Relaxed);
            }
            Ok(())
        };
        let mut look = || look(done.load(Ordering::Relaxed));
        in_threads(THREADS.min(urls.len()), "uploading", work, &mut look).map_err(|error| {
            match expired.load(Ordering::Relaxed) {
                true => Ended::Expired(error),
                false => Ended::Other(error),
            }
        })?;
        Ok(etags.into_iter().map(|etag| etag.into_inner().unwrap_or_else(PoisonError::into_inner)).collect())
    }

    /// Uploads `length` bytes from `start` on, and returns the tag that the server gives them.
    fn put(
        &self,
        hub: &Hub,
        url: &Url,
        headers: &Map<String, Value>,
        start: u64,
        length: u64,
    ) -> Result<String, Ended> {
        let there = hub.client_at(url)?;
        let timeout = TIMEOUT + Duration::from_secs(length / SLOWEST);
        let attempt = || {
            let body = match self.content.part(start, length) {
                Ok(body) => body,
                Err(error) => return Ok(Err(Ended::Other(error))),
            };
            let request = with_headers(Request::put(body, length), headers);
            let answer = there.send(request, timeout)?.success()?;
            Ok(Ok(answer.header("etag").unwrap_or_default().to_string()))
        };
        hub.retry.run(pause, attempt).unwrap_or_else(|fault| Err(broken(fault)))
    }

    fn post(&self, hub: &Hub, url: &Url, headers: &Map<String, Value>, body: &[u8]) -> Result<(), Ended> {
        let there = hub.client_at(url)?;
        let attempt = || {
            let request =
                with_headers(Request::post(body).header("Content-Type", "application/vnd.git-lfs+json"), headers);
            there.send(request, TIMEOUT)?.success().map(drop)
        };
        hub.retry.run(pause, attempt).map_err(broken)
    }
}

fn with_headers<'a>(request: Request<'a>, headers: &Map<String, Value>) -> Request<'a> {
    let texts = headers.iter().filter_map(|(name, value)| Some((name, value.as_str()?)));
    texts.fold(request, |request, (name, value)| request.header(name, value))
}

fn broken(fault: Fault) -> Ended {
    if let Err(error) = interrupt::check("uploading") {
        return Ended::Other(error);
    }
    let error = Error::External(format!("{}; {UNCOMMITTED}", fault.words));
    match fault.status {
        Some(400 | 403 | 404) => Ended::Expired(error),
        _ => Ended::Other(error),
    }
}
