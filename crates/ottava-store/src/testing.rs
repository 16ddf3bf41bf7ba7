//! A store with the protocol of S3, for tests. It keeps objects in memory, checks the SHA-256 of bodies, and can fail on request.

use crate::xml;
use ottava_common::hash::sha256;
use ottava_http::testing::{Received, Server, reply, reply_bytes};
use ottava_http::unescape;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The objects of a page of a listing.
const PAGE: usize = 2;

/// The store. It has every bucket.
pub struct FakeStore {
    server: Server,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// Contents by bucket and name.
    objects: BTreeMap<String, Vec<u8>>,
    /// The parts of uploads by object and id.
    uploads: BTreeMap<(String, String), BTreeMap<u64, Vec<u8>>>,
    faults: usize,
    /// The requests that fail, by their numbers from 0.
    failing: Range<usize>,
    seen: usize,
    slow: Option<Duration>,
    /// Requests whose target contains this text are refused.
    refused: Option<String>,
    /// Whether the next joined upload has no answer.
    loses_answer: bool,
    count: u64,
}

impl FakeStore {
    /// Starts an empty store.
    pub fn start() -> FakeStore {
        let state = Arc::new(Mutex::new(State::default()));
        let of_server = state.clone();
        let server = Server::start(move |_, request| {
            let pause = of_server.lock().unwrap_or_else(PoisonError::into_inner).slow;
            pause.into_iter().for_each(std::thread::sleep);
            of_server.lock().unwrap_or_else(PoisonError::into_inner).answer(request)
        });
        FakeStore { server, state }
    }

    /// Returns the address of the store.
    pub fn url(&self) -> String {
        self.server.url("")
    }

    /// Returns all requests.
    pub fn received(&self) -> Vec<Received> {
        self.server.received()
    }

    /// Returns the names and contents of all objects. A name begins with the bucket.
    pub fn objects(&self) -> BTreeMap<String, Vec<u8>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).objects.clone()
    }

    /// Returns the number of uploads in parts that were neither completed nor given up.
    pub fn open_uploads(&self) -> usize {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).uploads.len()
    }

    /// Changes an object, or removes it.
    pub fn set(&self, name: &str, content: Option<&[u8]>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match content {
            Some(content) => drop(state.objects.insert(name.to_string(), content.to_vec())),
            None => drop(state.objects.remove(name)),
        }
    }

    /// Lets the next `count` requests fail.
    pub fn fail(&self, count: usize) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).faults = count;
    }

    /// Lets the requests with these numbers fail. The first request of the store has number 0.
    pub fn fail_at(&self, numbers: Range<usize>) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).failing = numbers;
    }

    /// Refuses all requests whose target contains `part`.
    pub fn refuse(&self, part: &str) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).refused = Some(part.to_string());
    }

    /// Lets the next answer to the end of an upload in parts be lost. The object is made.
    pub fn lose_answer(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).loses_answer = true;
    }

    /// Pauses before each answer.
    pub fn slow(&self, pause: Option<Duration>) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).slow = pause;
    }
}

impl State {
    fn answer(&mut self, request: &Received) -> Vec<u8> {
        self.seen += 1;
        if self.faults > 0 || self.failing.contains(&(self.seen - 1)) {
            self.faults = self.faults.saturating_sub(1);
            return reply(503, "", "<Error><Code>SlowDown</Code></Error>");
        }
        let signed = request.header("authorization").unwrap_or_default();
        if !signed.starts_with("AWS4-HMAC-SHA256 Credential=id/") || request.header("x-amz-date").is_none() {
            return reply(403, "", "<Error><Code>AccessDenied</Code></Error>");
        }
        if request.header("x-amz-content-sha256") != Some(sha256(&request.bytes).as_str()) {
            return reply(400, "", "<Error><Code>XAmzContentSHA256Mismatch</Code></Error>");
        }
        let (method, target) = request.target();
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let query: BTreeMap<String, String> = query
            .split('&')
            .filter_map(|part| part.split_once('='))
            .map(|(key, value)| (key.to_string(), unescape(value)))
            .collect();
        if self.refused.as_ref().is_some_and(|part| target.contains(part)) {
            return reply(403, "", "<Error><Code>AccessDenied</Code></Error>");
        }
        let name = unescape(path.trim_start_matches('/'));
        match (method, query.get("uploadId"), query.contains_key("uploads")) {
            ("GET", None, false) if query.contains_key("list-type") => self.list(&name, &query),
            ("GET", None, true) => self.list_uploads(&name, &query),
            ("GET", ..) => match self.objects.get(&name) {
                Some(bytes) => reply_bytes(200, "", bytes),
                None => reply(404, "", "<Error><Code>NoSuchKey</Code></Error>"),
            },
            ("PUT", None, _) => {
                self.objects.insert(name, request.bytes.clone());
                reply(200, "ETag: \"whole\"\r\n", "")
            }
            ("PUT", Some(id), _) => {
                let number = query.get("partNumber").and_then(|number| number.parse().ok()).unwrap_or(0);
                match self.uploads.get_mut(&(name, id.clone())) {
                    Some(parts) => {
                        parts.insert(number, request.bytes.clone());
                        reply(200, &format!("ETag: \"part-{number}\"\r\n"), "")
                    }
                    None => reply(404, "", "<Error><Code>NoSuchUpload</Code></Error>"),
                }
            }
            ("POST", None, true) => {
                self.count += 1;
                let id = format!("upload/{}", self.count);
                self.uploads.insert((name, id.clone()), BTreeMap::new());
                reply(
                    200,
                    "",
                    &format!(
                        "<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
                    ),
                )
            }
            ("POST", Some(id), _) => self.complete(name, id, &request.body),
            ("DELETE", Some(id), _) => {
                self.uploads.remove(&(name, id.clone()));
                reply(204, "", "")
            }
            ("DELETE", None, _) => {
                self.objects.remove(&name);
                reply(204, "", "")
            }
            _ => reply(400, "", "<Error><Code>InvalidRequest</Code></Error>"),
        }
    }

    fn complete(&mut self, name: String, id: &str, body: &str) -> Vec<u8> {
        let Some(parts) = self.uploads.remove(&(name.clone(), id.to_string())) else {
            return reply(404, "", "<Error><Code>NoSuchUpload</Code></Error>");
        };
        let expected: Vec<String> = parts.keys().map(|number| format!("\"part-{number}\"")).collect();
        if xml::texts(body, "ETag") != expected {
            return reply(400, "", "<Error><Code>InvalidPart</Code></Error>");
        }
        self.objects.insert(name, parts.into_values().flatten().collect());
        if std::mem::take(&mut self.loses_answer) {
            return reply(503, "", "<Error><Code>InternalError</Code></Error>");
        }
        reply(200, "", "<CompleteMultipartUploadResult></CompleteMultipartUploadResult>")
    }

    fn list(&self, bucket: &str, query: &BTreeMap<String, String>) -> Vec<u8> {
        let start = format!("{bucket}/{}", query.get("prefix").map_or("", String::as_str));
        let after = query.get("continuation-token").cloned().unwrap_or_default();
        let mut found = self.objects.iter().filter(|(name, _)| name.starts_with(&start) && **name > after);
        let page: Vec<_> = found.by_ref().take(PAGE).collect();
        let content = |(name, bytes): &(&String, &Vec<u8>)| {
            let key = name.strip_prefix(&format!("{bucket}/")).unwrap_or_default().replace('&', "&amp;");
            format!(
                "<Contents><Key>{key}</Key><Size>{}</Size><ETag>&quot;{}&quot;</ETag></Contents>",
                bytes.len(),
                sha256(bytes)
            )
        };
        let next = match (found.next(), page.last()) {
            (Some(_), Some((last, _))) => format!("<NextContinuationToken>{last}</NextContinuationToken>"),
            _ => String::new(),
        };
        let contents: String = page.iter().map(content).collect();
        reply(200, "", &format!("<ListBucketResult>{next}{contents}</ListBucketResult>"))
    }

    fn list_uploads(&self, bucket: &str, query: &BTreeMap<String, String>) -> Vec<u8> {
        let start = format!("{bucket}/{}", query.get("prefix").map_or("", String::as_str));
        let of_query = |key: &str| query.get(key).cloned().unwrap_or_default();
        let after = (format!("{bucket}/{}", of_query("key-marker")), of_query("upload-id-marker"));
        let mut found = self.uploads.keys().filter(|upload| upload.0.starts_with(&start) && **upload > after);
        let page: Vec<_> = found.by_ref().take(PAGE).collect();
        let key = |name: &str| name.strip_prefix(&format!("{bucket}/")).unwrap_or_default().to_string();
        let upload = |(name, id): &&(String, String)| {
            format!("<Upload><Key>{}</Key><UploadId>{id}</UploadId></Upload>", key(name))
        };
        let next = match (found.next(), page.last()) {
            (Some(_), Some((name, id))) => format!(
                "<IsTruncated>true</IsTruncated><NextKeyMarker>{}</NextKeyMarker><NextUploadIdMarker>{id}</NextUploadIdMarker>",
                key(name)
            ),
            _ => "<IsTruncated>false</IsTruncated>".to_string(),
        };
        let uploads: String = page.iter().map(upload).collect();
        reply(200, "", &format!("<ListMultipartUploadsResult>{next}{uploads}</ListMultipartUploadsResult>"))
    }
}
