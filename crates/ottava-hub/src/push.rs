//! Uploads the files of a folder as one commit.
//!
//! The Hub says which files Git LFS stores (`preupload`). Those are uploaded first, and only if the Hub does not have them, so a push that was
//! interrupted goes on with the files that are missing. The commit names all files, so readers see all of them or none.

use crate::api::{Hub, Missing, TIMEOUT, pause};
use crate::commit::Commit;
use crate::content::Content;
use crate::hash::Checksum;
use crate::upload::{Ended, SLOWEST, UNCOMMITTED, Upload};
use crate::{RepoId, Watch};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ottava_common::{Error, Result};
use ottava_http::{Answer, Fault, Request, Url, escape};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// The number of files in a question about their kinds.
const FILES: usize = 256;

/// The number of first bytes of a file that the Hub sees before it decides.
const SAMPLE: u64 = 512;

/// The media type of Git LFS.
const LFS: &str = "application/vnd.git-lfs+json";

/// What is pushed, besides the files.
#[derive(Clone, Debug, Default)]
pub struct PushOptions {
    /// Whether a new repository is private.
    pub private: bool,
    /// The first line of the commit.
    pub message: String,
}

/// The result of a push.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pushed {
    /// The commit.
    pub commit: String,
    /// The page of the repository.
    pub url: String,
    /// The number of bytes that were uploaded to Git LFS; files that the Hub had before are not counted.
    pub uploaded: u64,
    /// The number of files in the commit, without files that the Hub ignores.
    pub files: usize,
}

/// How the Hub stores a file.
#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Regular,
    Lfs,
    /// The repository excludes the file.
    Ignored,
}

/// A file of Git LFS.
struct LargeFile<'a> {
    path: &'a String,
    /// Its SHA-256.
    oid: String,
    size: u64,
    content: &'a Content,
}

impl Hub {
    /// Uploads `files` (paths in the repository and contents) as one commit on the branch of `id`. Creates the repository if it does not exist. Files
    /// of the repository that are not among `files` stay.
    ///
    /// Errors with [`Error::Config`] without a token, without a network, or if the Hub refuses the token; with [`Error::External`] if the Hub fails.
    pub fn push(
        &self,
        id: &RepoId,
        files: &BTreeMap<String, Content>,
        options: &PushOptions,
        watch: &mut dyn Watch,
    ) -> Result<Pushed> {
        if let Some(reason) = self.offline {
            return Err(Error::Config(format!("{id} cannot be pushed: {reason} is set, which forbids connections")));
        }
        if self.token.is_none() {
            let why = "a push needs a token with write access: make one at";
            return Err(Error::Config(format!("{why} {}/settings/tokens, and set HF_TOKEN to it", self.endpoint)));
        }
        self.create(id, options.private)?;
        let modes = self.modes(id, files)?;
        let is_of = |mode: Mode| -> Vec<(&String, &Content)> {
            files.iter().filter(|(path, _)| modes.get(*path) == Some(&mode)).collect()
        };
        let ignored: Vec<&str> = is_of(Mode::Ignored).iter().map(|(path, _)| path.as_str()).collect();
        if !ignored.is_empty() {
            tracing::warn!(
                "{} ignores these files (.gitignore of the repository): {}",
                self.endpoint,
                ignored.join(", ")
            );
        }
        let (mut large, mut commit) = (Vec::new(), Commit::new(&options.message));
        for (path, content) in is_of(Mode::Lfs) {
            let size = content.size()?;
            let hasher = Checksum::like(&"0".repeat(64), size).expect("64 digits are a SHA-256");
            let oid = hasher.of_reader(content.reader()?).map_err(Error::io(content.place()))?;
            large.push(LargeFile { path, oid, size, content });
        }
        let uploaded = self.upload_large(id, &large, watch)?;
        for (path, content) in is_of(Mode::Regular) {
            commit.add(path, &content.bytes(u64::MAX)?);
        }
        for LargeFile { path, oid, size, .. } in &large {
            commit.add_large(path, oid, *size);
        }
        let files = commit.files();
        let commit = self.send_commit(id, &commit)?;
        let url = self.endpoint.join(&format!("{}{}", id.kind.prefix(), id.name)).to_string();
        Ok(Pushed { commit, url, uploaded, files })
    }

    /// Creates the repository, unless it exists. A token may write to a repository without being allowed to create it, so the Hub is asked first.
    ///
    /// Errors with [`Error::Config`] if the repository exists and is public, and a `private` one is wanted.
    fn create(&self, id: &RepoId, private: bool) -> Result<()> {
        let known = self.endpoint.join(&format!("api/{}/{}", id.kind.plural(), id.name));
        let (status, info) = self.send(id, &known, TIMEOUT, Request::get)?;
        if (200..=299).contains(&status) {
            let page = format!("{}/{}{}", self.endpoint, id.kind.prefix(), id.name);
            return match private && info["private"] == false {
                true => Err(Error::Config(format!(
                    "{page} exists and is public, so `--private` has no effect; make it private at {page}/settings, or leave --private out"
                ))),
                false => Ok(()),
            };
        }
        let Some((owner, name)) = id.name.split_once('/') else {
            return Err(Error::Config(format!("`{}` has no owner; write OWNER/NAME", id.name)));
        };
        let kind = id.kind.plural().trim_end_matches('s');
        let body = json!({"name": name, "organization": owner, "type": kind, "private": private}).to_string();
        let request = || Request::post(body.as_bytes()).header("Content-Type", "application/json");
        match self.send(id, &self.endpoint.join("api/repos/create"), TIMEOUT, request)? {
            // Another process has created it.
            (409, _) => Ok(()),
            (status, answer) => self.expect_success(id, status, &answer),
        }
    }

    /// Sends the commit, and returns its name. After a fault, the commit may have been made or not, so it names its parent: the Hub refuses it if the
    /// branch has another commit meanwhile. The files of the branch then tell whether that commit is this one.
    fn send_commit(&self, id: &RepoId, commit: &Commit) -> Result<String> {
        let url = self.api(id, &format!("commit/{}", escape(id.revision(), "")));
        let mut before = self.head(id)?;
        let attempt = || {
            let body = commit.body(&before);
            let timeout = TIMEOUT * 5 + Duration::from_secs(body.len() as u64 / SLOWEST);
            let request = || Request::post(body.as_bytes()).header("Content-Type", "application/x-ndjson");
            let fault = match self.exchange(id, &url, timeout, request, status_and_json) {
                Ok(Err(error)) => return Ok(Err(error)),
                // The branch has another commit than `before`.
                Ok(Ok((409 | 412, _))) => Fault::passing(format!("{url} has got another commit meanwhile")),
                Ok(Ok((status, answer))) => {
                    let made = self.expect_success(id, status, &answer).map(|()| answer["commitOid"].clone());
                    let name = made.map(|name| name.as_str().map(str::to_string));
                    return Ok(name.and_then(|name| name.ok_or_else(|| self.unusable(id, "it names no commit"))));
                }
                Err(fault) => fault,
            };
            if fault.may_pass {
                let now = match self.head(id) {
                    Ok(now) => now,
                    Err(error) => return Ok(Err(error)),
                };
                if now != before && self.tree(id, &now).is_ok_and(|entries| commit.is_in(&entries)) {
                    return Ok(Ok(now));
                }
                before = now;
            }
            Err(fault)
        };
        self.retry.run(pause, attempt).unwrap_or_else(|fault| {
            Err(Error::External(format!("{}: {}; run the same command again", id.name, fault.words)))
        })
    }

    /// Asks for the newest commit of the branch.
    fn head(&self, id: &RepoId) -> Result<String> {
        self.commit(id).map_err(|missing| match missing {
            Missing::Refused(error) => error,
            Missing::Fault(fault) => Error::External(format!("{}: {}", id.name, fault.words)),
        })
    }

    /// Asks how each file is stored. Errors with [`Error::External`] if the answer leaves a file out.
    fn modes(&self, id: &RepoId, files: &BTreeMap<String, Content>) -> Result<BTreeMap<String, Mode>> {
        let (mut modes, all) = (BTreeMap::new(), files.iter().collect::<Vec<_>>());
        for some in all.chunks(FILES) {
            let mut asked = Vec::new();
            for (path, content) in some {
                let sample = STANDARD.encode(content.bytes(SAMPLE)?);
                asked.push(json!({"path": path, "size": content.size()?, "sample": sample}));
            }
            let url = self.api(id, &format!("preupload/{}", escape(id.revision(), "")));
            let answer = self.post(id, &url, json!({"files": asked}).to_string().as_bytes(), "application/json")?;
            for file in answer["files"].as_array().into_iter().flatten() {
                let mode = match (file["shouldIgnore"] == true, file["uploadMode"].as_str()) {
                    (true, _) => Mode::Ignored,
                    (false, Some("lfs")) => Mode::Lfs,
                    (false, Some("regular")) => Mode::Regular,
                    (false, _) => continue,
                };
                modes.insert(file["path"].as_str().unwrap_or_default().to_string(), mode);
            }
        }
        match files.keys().find(|path| !modes.contains_key(*path)) {
            Some(path) => Err(self.unusable(id, &format!("it does not say how {path} is stored; {UNCOMMITTED}"))),
            None => Ok(modes),
        }
    }

    /// Uploads the files of Git LFS that the Hub lacks. Returns their bytes.
    fn upload_large(&self, id: &RepoId, files: &[LargeFile], watch: &mut dyn Watch) -> Result<u64> {
        let mut missing: Vec<&LargeFile> = Vec::new();
        for some in files.chunks(FILES) {
            let answer = self.batch(id, some.iter().map(|file| (&file.oid, file.size)))?;
            for object in answer["objects"].as_array().into_iter().flatten() {
                let Some(file) = some.iter().find(|file| object["oid"] == file.oid.as_str()) else { continue };
                if let Some(message) = object["error"]["message"].as_str() {
                    return Err(Error::Config(format!("{} refuses {}: {message}", self.endpoint, file.path)));
                }
                if object["actions"]["upload"].is_object() {
                    missing.push(file);
                }
            }
        }
        let total = missing.iter().map(|file| file.size).sum();
        let mut before = 0;
        for file in &missing {
            // Only the last call has equal numbers.
            let mut look = |done: u64| {
                if before + done < total {
                    watch.at(&id.name, before + done, total);
                }
            };
            self.upload_file(id, file, &mut look)?;
            before += file.size;
        }
        if total > 0 {
            watch.at(&id.name, total, total);
        }
        Ok(total)
    }

    /// Uploads one file to addresses that are asked for now, because addresses expire while other files are uploaded. If they expire during the upload,
    /// they are asked for once more.
    fn upload_file(&self, id: &RepoId, file: &LargeFile, look: &mut dyn FnMut(u64)) -> Result<()> {
        let LargeFile { path, oid, size, content } = file;
        for is_last in [false, true] {
            let answer = self.batch(id, [(oid, *size)].into_iter())?;
            let object = answer["objects"]
                .as_array()
                .and_then(|objects| objects.iter().find(|found| found["oid"] == oid.as_str()));
            let Some(actions) = object.map(|object| &object["actions"]).filter(|actions| actions["upload"].is_object())
            else {
                // Another process has uploaded it.
                return Ok(());
            };
            let upload = Upload::new(actions, oid, *size, content);
            match upload.map_err(|why| self.unusable(id, &format!("{path}: {why}")))?.run(self, look) {
                Err(Ended::Expired(_)) if !is_last => tracing::info!("{path}: the address for the upload has expired"),
                ended => return ended.map_err(Error::from),
            }
        }
        unreachable!("the last upload returns")
    }

    /// Asks for the addresses of files of Git LFS, by their SHA-256 and their sizes.
    fn batch<'a>(&self, id: &RepoId, files: impl Iterator<Item = (&'a String, u64)>) -> Result<Value> {
        let objects: Vec<_> = files.map(|(oid, size)| json!({"oid": oid, "size": size})).collect();
        let transfers = ["basic", "multipart"];
        let body = json!({"operation": "upload", "transfers": transfers, "objects": objects, "hash_algo": "sha256"});
        let url = self.endpoint.join(&format!("{}{}.git/info/lfs/objects/batch", id.kind.prefix(), id.name));
        self.post(id, &url, body.to_string().as_bytes(), LFS)
    }

    /// Posts `body`, and returns the answer. Errors unless it is a success.
    fn post(&self, id: &RepoId, url: &Url, body: &[u8], kind: &str) -> Result<Value> {
        let request = || Request::post(body).header("Content-Type", kind).header("Accept", kind);
        let (status, answer) = self.send(id, url, TIMEOUT, request)?;
        self.expect_success(id, status, &answer)?;
        Ok(answer)
    }

    fn expect_success(&self, id: &RepoId, status: u16, answer: &Value) -> Result<()> {
        let why = answer["error"].as_str().or(answer["message"].as_str()).unwrap_or("it gives no reason");
        let token = self.token.as_ref().map_or("HF_TOKEN", |token| token.place());
        match status {
            200..=299 => Ok(()),
            401 | 403 => Err(Error::Config(format!(
                "{} refuses to write to {}: {why} (status {status}); the token of {token} needs write access to `{}`",
                self.endpoint,
                id.name,
                id.name.split('/').next().unwrap_or_default()
            ))),
            _ => Err(Error::External(format!(
                "{} refuses the push to {}: {why} (status {status})",
                self.endpoint, id.name
            ))),
        }
    }

    /// Sends a request that may be repeated, and returns the status and the answer. Retries after temporary faults.
    fn send<'a>(
        &self,
        id: &RepoId,
        url: &Url,
        timeout: Duration,
        request: impl Fn() -> Request<'a>,
    ) -> Result<(u16, Value)> {
        let attempt = || self.exchange(id, url, timeout, &request, status_and_json);
        self.retry
            .run(pause, attempt)
            .unwrap_or_else(|fault| Err(Error::External(format!("{}: {}; {UNCOMMITTED}", id.name, fault.words))))
    }
}

/// Returns the status and the JSON of an answer; a fault for statuses that may pass.
fn status_and_json(answer: Answer) -> Result<Result<(u16, Value)>, Fault> {
    match answer.status() {
        408 | 429 | 500..=599 => Err(answer.success().err().unwrap_or_else(|| Fault::passing("no answer"))),
        status => Ok(Ok((status, serde_json::from_slice(&answer.read()?).unwrap_or_default()))),
    }
}
