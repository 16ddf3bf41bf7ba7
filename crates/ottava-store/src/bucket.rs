//! The objects below a prefix of a bucket.

use crate::access::Access;
use crate::place::Place;
use crate::signed::Signed;
use crate::{azure, xml};
use ottava_common::fs::{RealFs, sync_parent};
use ottava_common::hash::sha256;
use ottava_common::{Error, Result, interrupt};
use ottava_http::{Answer, Client, Fault, Request, Retry, Url, escape};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Files up to this size in bytes are put by one request.
const WHOLE: u64 = 64 << 20;

/// The smallest part of a larger file in bytes.
const PART: u64 = 32 << 20;

/// The maximum number of parts of a file. The protocol allows 10,000.
const PARTS: u64 = 9_000;

/// The maximum size of an answer that is read at once, in bytes.
const MAX_ANSWER: u64 = 64 << 20;

/// The maximum number of pages of a listing. A page has up to 1,000 objects.
const PAGES: usize = 10_000;

/// The time limit of a request without a large body.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The time limit for joining the parts of a file. Stores may take minutes.
const JOIN_TIMEOUT: Duration = Duration::from_secs(600);

/// The lowest speed in bytes per second at which a body is waited for.
const SLOWEST: u64 = 100_000;

/// An object of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// The name below the prefix of the bucket.
    pub name: String,
    /// The size in bytes.
    pub size: u64,
    /// A text of the store that changes with the content.
    pub etag: String,
}

/// A bucket, with a prefix of the names of its objects.
#[derive(Clone)]
pub struct Bucket {
    client: Client,
    access: Access,
    /// The prefix, with a slash at the end unless it is empty.
    prefix: String,
    /// The address as the user wrote it.
    written: String,
    retry: Retry,
    /// The size from which files are put in parts, and the size of parts.
    whole: u64,
    part: u64,
    /// Whether a request to stop the process ends waits and transfers.
    heeds_stop: bool,
}

impl Bucket {
    /// Opens `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX`, which the setting `setting` names. Does not open a connection.
    ///
    /// Errors with [`Error::Config`] for an address of another form, if the keys are missing, or if connections are forbidden.
    pub fn from_env(setting: &str, text: &str) -> Result<Bucket> {
        Bucket::with_variables(setting, text, &|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// Like [`Bucket::from_env`], with the variables that `variable` returns.
    pub fn with_variables(setting: &str, text: &str, variable: &dyn Fn(&str) -> Option<String>) -> Result<Bucket> {
        let Place { scheme, bucket, prefix } = Place::read(setting, text)?;
        let (access, url) = Access::new(scheme, bucket, variable)?;
        let client = Client::new(url, None, MAX_ANSWER)?;
        let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
        let retry = Retry { attempts: 6, first_pause: Duration::from_millis(300) };
        let written = text.trim_end_matches('/').to_string();
        Ok(Bucket { client, access, prefix, written, retry, whole: WHOLE, part: PART, heeds_stop: true })
    }

    /// Returns this bucket with another `retry`.
    pub fn with_retry(self, retry: Retry) -> Bucket {
        Bucket { retry, ..self }
    }

    /// Returns this bucket with other sizes in bytes: files of more than `whole` are put in parts of at least `part`, for tests.
    pub fn with_parts(self, whole: u64, part: u64) -> Bucket {
        Bucket { whole, part, ..self }
    }

    /// Returns this bucket for transfers that go on although the process was asked to stop.
    pub fn without_stop(self) -> Bucket {
        Bucket { heeds_stop: false, ..self }
    }

    /// Errors with [`Error::Cancelled`] if a request to stop ends the work `what`.
    pub(crate) fn check(&self, what: &str) -> Result<()> {
        if self.heeds_stop { interrupt::check(what) } else { Ok(()) }
    }

    /// Returns the address of an object in messages.
    pub fn place(&self, name: &str) -> String {
        format!("{}/{name}", self.written)
    }

    /// Puts the bytes as an object, and replaces an existing object.
    ///
    /// Errors with [`Error::External`] if the store fails or refuses, as all functions of this type.
    pub fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.ask(Method::Put, name, "", bytes, 0, &read).map(drop)
    }

    /// Puts an open file as an object, and replaces an existing object.
    pub fn put_file(&self, name: &str, file: &File) -> Result<()> {
        let path = Path::new(name);
        let size = file.metadata().map_err(Error::io(path))?.len();
        let read = |start: u64, length: u64| -> Result<Vec<u8>> {
            let mut bytes = vec![0; usize::try_from(length).unwrap_or(usize::MAX)];
            file.read_exact_at(&mut bytes, start).map_err(Error::io(path))?;
            Ok(bytes)
        };
        if size <= self.whole {
            return self.put(name, &read(0, size)?);
        }
        if self.access.is_azure() {
            return self.put_blocks(name, size, &read);
        }
        let before = self.find(name)?;
        let started =
            String::from_utf8_lossy(&self.ask(Method::Post, name, "uploads=", b"", 0, &self::read)?).into_owned();
        let id = xml::text(&started, "UploadId").ok_or_else(|| self.unusable(name, "it names no upload"))?;
        let parts = self.put_parts(name, &id, size, &read);
        let joined = parts.and_then(|parts| {
            let body = format!("<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>");
            let url = self.url(Some(name), &format!("uploadId={}", escape(&id, "")))?;
            // If the answer to an earlier attempt was lost, the upload is gone, and the object is new.
            let is_joined =
                || self.find(name).is_ok_and(|now| now != before && now.is_some_and(|now| now.size == size));
            let joined = |answer: Answer| match answer.status() {
                404 if is_joined() => Ok(Vec::new()),
                _ => answer.success()?.read(),
            };
            let answer = self.ask_at(Method::Post, &url, body.as_bytes(), JOIN_TIMEOUT, &joined)?;
            // The store may find a fault after it has begun a successful answer.
            let answer = String::from_utf8_lossy(&answer);
            if answer.contains("<Error>") { Err(self.unusable(name, &answer)) } else { Ok(()) }
        });
        match joined {
            Ok(()) => Ok(()),
            Err(error) => {
                // The parts cost money until the upload is given up.
                let _ = self.give_up(name, &id);
                Err(error)
            }
        }
    }

    /// Returns the object with this name, if there is one.
    fn find(&self, name: &str) -> Result<Option<Object>> {
        Ok(self.list(name)?.into_iter().find(|object| object.name == name))
    }

    /// Puts the parts of a file, and returns their list as XML.
    fn put_parts(&self, name: &str, id: &str, size: u64, read: &dyn Fn(u64, u64) -> Result<Vec<u8>>) -> Result<String> {
        let mut list = String::new();
        for (number, bytes) in self.parts(size, read) {
            let bytes = bytes?;
            let query = format!("partNumber={number}&uploadId={}", escape(id, ""));
            let etag = |answer: Answer| Ok(answer.success()?.header("etag").unwrap_or_default().to_string());
            let etag = self.ask(Method::Put, name, &query, &bytes, 0, &etag)?;
            list += &format!("<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>");
        }
        Ok(list)
    }

    /// Returns the parts of a file of `size` bytes, with their numbers from 1.
    fn parts<'a>(
        &'a self,
        size: u64,
        read: &'a dyn Fn(u64, u64) -> Result<Vec<u8>>,
    ) -> impl Iterator<Item = (u64, Result<Vec<u8>>)> + 'a {
        let step = self.part.max(size.div_ceil(PARTS));
        (1..).zip((0..size).step_by(usize::try_from(step).unwrap_or(usize::MAX))).map(move |(number, start)| {
            (number, self.check("uploading").and_then(|()| read(start, step.min(size - start))))
        })
    }

    /// Puts a file as blocks of Azure. Blocks without a list are deleted by the store after a week.
    fn put_blocks(&self, name: &str, size: u64, read: &dyn Fn(u64, u64) -> Result<Vec<u8>>) -> Result<()> {
        let mut ids = Vec::new();
        for (number, bytes) in self.parts(size, read) {
            let id = azure::block_id(number);
            let query = format!("blockid={}&comp=block", escape(&id, ""));
            self.ask(Method::Put, name, &query, &bytes?, 0, &self::read)?;
            ids.push(id);
        }
        let url = self.url(Some(name), "comp=blocklist")?;
        self.ask_at(Method::Put, &url, azure::block_list(&ids).as_bytes(), JOIN_TIMEOUT, &self::read).map(drop)
    }

    /// Returns the bytes of an object of at most 64 MiB; `None` if there is none.
    pub fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let bytes = |answer: Answer| match answer.status() {
            404 => Ok(None),
            _ => answer.success()?.read().map(Some),
        };
        self.ask(Method::Get, name, "", b"", MAX_ANSWER, &bytes)
    }

    /// Writes an object of `size` bytes to a new file at `path`. Errors if the object is absent or has another size.
    pub fn get_file(&self, name: &str, size: u64, path: &Path) -> Result<()> {
        let write = |answer: Answer| -> Result<(), Fault> {
            let fault = |error: std::io::Error| Fault::passing(format!("{}: {error}", self.place(name)));
            let mut file = File::create(path).map_err(fault)?;
            let (mut reader, mut buffer, mut count) = (answer.success()?.into_reader(), vec![0; 1 << 20], 0);
            loop {
                self.check("downloading").map_err(|error| Fault::lasting(error.to_string()))?;
                match reader.read(&mut buffer).map_err(fault)? {
                    0 => break,
                    read => {
                        count += read as u64;
                        if count > size {
                            return Err(Fault::lasting(format!("{} has more than {size} bytes", self.place(name))));
                        }
                        file.write_all(&buffer[..read]).map_err(fault)?;
                    }
                }
            }
            if count != size {
                return Err(Fault::passing(format!("{} has sent {count} of {size} bytes", self.place(name))));
            }
            file.sync_all().map_err(fault)
        };
        self.ask(Method::Get, name, "", b"", size, &write)?;
        sync_parent(&RealFs, path)
    }

    /// Lists the objects whose names begin with `start`.
    pub fn list(&self, start: &str) -> Result<Vec<Object>> {
        let (mut objects, mut token) = (Vec::new(), None::<String>);
        let prefix = escape(&format!("{}{start}", self.prefix), "");
        let form = self.access.listing();
        for _ in 0..PAGES {
            let text = self.page(&(form.query)(&prefix, token.as_deref().map(|token| escape(token, ""))))?;
            for content in text.split(form.object).skip(1) {
                let (Some(key), Some(size)) = (xml::text(content, form.name), xml::text(content, form.size)) else {
                    return Err(self.unusable(start, "an object has no name or no size"));
                };
                let size = size.parse().map_err(|_| self.unusable(start, "a size is no number"))?;
                if let Some(name) = key.strip_prefix(&self.prefix) {
                    let etag = xml::text(content, form.etag).unwrap_or_default();
                    objects.push(Object { name: name.to_string(), size, etag });
                }
            }
            token = xml::text(&text, form.next).filter(|token| !token.is_empty());
            if token.is_none() {
                return Ok(objects);
            }
        }
        Err(self.unusable(start, &format!("the list has more than {PAGES} pages")))
    }

    /// Deletes an object, if there is one.
    pub fn delete(&self, name: &str) -> Result<()> {
        let done = |answer: Answer| match answer.status() {
            404 => Ok(()),
            _ => answer.success().map(drop),
        };
        self.ask(Method::Delete, name, "", b"", 0, &done)
    }

    /// Gives up uploads in parts, of names that begin with `start`, that killed processes have left.
    pub fn give_up_uploads(&self, start: &str) -> Result<()> {
        if self.access.is_azure() {
            return Ok(());
        }
        let prefix = escape(&format!("{}{start}", self.prefix), "");
        let mut markers = (String::new(), String::new());
        for _ in 0..PAGES {
            let text = self.page(&format!("{}prefix={prefix}{}&uploads=", markers.0, markers.1))?;
            for upload in text.split("<Upload>").skip(1) {
                let (key, id) = (xml::text(upload, "Key"), xml::text(upload, "UploadId"));
                let name = key.as_deref().and_then(|key| key.strip_prefix(&self.prefix));
                if let (Some(name), Some(id)) = (name, id) {
                    self.give_up(name, &id)?;
                }
            }
            let (key, id) = (xml::text(&text, "NextKeyMarker"), xml::text(&text, "NextUploadIdMarker"));
            let (Some(key), true) = (key, xml::text(&text, "IsTruncated").as_deref() == Some("true")) else {
                return Ok(());
            };
            // The parameters of a signed address are sorted.
            let id = id.map_or(String::new(), |id| format!("&upload-id-marker={}", escape(&id, "")));
            markers = (format!("key-marker={}&", escape(&key, "")), id);
        }
        Err(self.unusable(start, &format!("the list of uploads has more than {PAGES} pages")))
    }

    fn give_up(&self, name: &str, id: &str) -> Result<()> {
        let query = format!("uploadId={}", escape(id, ""));
        let done = |answer: Answer| match answer.status() {
            404 => Ok(()),
            _ => answer.success().map(drop),
        };
        self.ask(Method::Delete, name, &query, b"", 0, &done)
    }

    /// Returns a page of a list of the bucket.
    fn page(&self, query: &str) -> Result<String> {
        let bytes = self.ask_at(Method::Get, &self.url(None, query)?, b"", limit(MAX_ANSWER), &read)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Returns the address of an object, or of the bucket.
    fn url(&self, name: Option<&str>, query: &str) -> Result<Url> {
        let base = self.client.url().as_str();
        let path = name.map_or(String::new(), |name| format!("/{}", escape(&format!("{}{name}", self.prefix), "/")));
        let query = [query, self.access.parameters()].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>();
        let query = if query.is_empty() { String::new() } else { format!("?{}", query.join("&")) };
        // The bucket itself has a slash at the end if its name is in the host.
        let slash = if path.is_empty() && base == self.client.url().origin() { "/" } else { "" };
        Url::new("the name of an object", &format!("{base}{path}{slash}{query}"))
    }

    /// Sends a request about an object, as [`Bucket::ask_at`] does. The answer has up to `received` bytes.
    fn ask<T>(
        &self,
        method: Method,
        name: &str,
        query: &str,
        body: &[u8],
        received: u64,
        receive: &dyn Fn(Answer) -> Result<T, Fault>,
    ) -> Result<T> {
        let timeout = limit(received + body.len() as u64);
        self.ask_at(method, &self.url(Some(name), query)?, body, timeout, receive)
    }

    /// Sends a signed request, and returns what `receive` makes of the answer. `timeout` limits one attempt. Retries after temporary faults.
    fn ask_at<T>(
        &self,
        method: Method,
        url: &Url,
        body: &[u8],
        timeout: Duration,
        receive: &dyn Fn(Answer) -> Result<T, Fault>,
    ) -> Result<T> {
        let (there, payload) = (self.client.at(url.clone())?, sha256(body));
        let attempt = || {
            let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
            let (name, request) = method.request(body);
            let signed = Signed { method: name, url, payload: &payload, length: body.len(), headers: &[], time };
            receive(there.send(self.access.authorize(&signed, request)?, timeout)?)
        };
        let pause = |time: Duration| {
            let end = Instant::now() + time;
            while Instant::now() < end {
                if self.check("waiting for a store").is_err() {
                    return false;
                }
                sleep(Duration::from_millis(20).min(time));
            }
            true
        };
        self.retry.run(pause, attempt).map_err(|fault| {
            if let Err(error) = self.check("using a store") {
                return error;
            }
            Error::External(format!("{}{}", self.access.redact(&fault.words), self.access.remedy(&fault)))
        })
    }

    fn unusable(&self, name: &str, why: &str) -> Error {
        Error::External(format!("the answer of the store about {} cannot be used: {why}", self.place(name)))
    }
}

/// The methods of requests.
#[derive(Clone, Copy)]
enum Method {
    Get,
    Put,
    Post,
    Delete,
}

impl Method {
    /// Returns the name of the method, and a request with this body.
    fn request(self, body: &[u8]) -> (&'static str, Request<'_>) {
        match self {
            Method::Get => ("GET", Request::get()),
            Method::Put => ("PUT", Request::put(body, body.len() as u64)),
            Method::Post => ("POST", Request::post(body)),
            Method::Delete => ("DELETE", Request::delete()),
        }
    }
}

/// Returns the time limit of a request and an answer of together `bytes` bytes.
fn limit(bytes: u64) -> Duration {
    TIMEOUT + Duration::from_secs(bytes / SLOWEST)
}

fn read(answer: Answer) -> Result<Vec<u8>, Fault> {
    answer.success()?.read()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(text: &str, variables: &[(&str, &str)]) -> Result<Bucket> {
        let variable =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string());
        Bucket::with_variables("checkpoint.upload_to", text, &variable)
    }

    const KEYS: [(&str, &str); 2] = [("AWS_ACCESS_KEY_ID", "id"), ("AWS_SECRET_ACCESS_KEY", "secret")];

    #[test]
    fn addresses_follow_from_the_bucket_and_the_variables() {
        let url = |text: &str, more: &[(&str, &str)]| {
            let bucket = open(text, &[&KEYS[..], more].concat()).unwrap();
            (
                bucket.url(Some("a b/c"), "").unwrap().as_str().to_string(),
                bucket.url(None, "x=1").unwrap().as_str().to_string(),
            )
        };
        let region = ("AWS_REGION", "eu-north-1");
        let (object, bucket) = url("s3://runs/first", &[region]);
        assert_eq!(object, "https://runs.s3.eu-north-1.amazonaws.com/first/a%20b/c");
        assert_eq!(bucket, "https://runs.s3.eu-north-1.amazonaws.com/?x=1");
        assert_eq!(url("s3://my.runs", &[]).0, "https://s3.us-east-1.amazonaws.com/my.runs/a%20b/c");
        let (object, bucket) = url("s3://runs/", &[("AWS_ENDPOINT_URL", "http://localhost:9000/")]);
        assert_eq!(object, "http://localhost:9000/runs/a%20b/c");
        assert_eq!(bucket, "http://localhost:9000/runs?x=1");
        assert_eq!(
            url("gs://my-runs/first", &[("GOOGLE_OAUTH_ACCESS_TOKEN", "token")]).0,
            "https://storage.googleapis.com/my-runs/first/a%20b/c"
        );
        let azure = [("AZURE_STORAGE_ACCOUNT", "otter"), ("AZURE_STORAGE_SAS_TOKEN", "?sv=1&sig=a%2Bb")];
        let (object, bucket) = url("az://runs/first", &azure);
        assert_eq!(object, "https://otter.blob.core.windows.net/runs/first/a%20b/c?sv=1&sig=a%2Bb");
        assert_eq!(bucket, "https://otter.blob.core.windows.net/runs?x=1&sv=1&sig=a%2Bb");
    }

    #[test]
    fn wrong_addresses_and_missing_keys_are_errors() {
        for (text, variables, word) in [
            ("ftp://runs", &KEYS[..], "s3://BUCKET/PREFIX"),
            ("gs://runs", &[], "GOOGLE_APPLICATION_CREDENTIALS"),
            ("az://runs", &KEYS, "AZURE_STORAGE_ACCOUNT"),
            ("az://runs", &[("AZURE_STORAGE_ACCOUNT", "otter")], "AZURE_STORAGE_KEY"),
            (
                "az://runs",
                &[("AZURE_STORAGE_ACCOUNT", "otter"), ("AZURE_STORAGE_KEY", "no base 64")],
                "AZURE_STORAGE_KEY",
            ),
            ("s3://", &KEYS, "bucket"),
            ("s3://Runs/x", &KEYS, "small letters"),
            ("s3://runs/a/../b", &KEYS, "prefix"),
            ("s3://runs/x", &KEYS[..1], "AWS_SECRET_ACCESS_KEY"),
        ] {
            let error = open(text, variables).err().unwrap();
            assert!(matches!(&error, Error::Config(found) if found.contains(word)), "{text}: {error}");
        }
    }
}
