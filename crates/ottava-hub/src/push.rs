//! Uploads the files of a folder as one commit.
//!
//! The Hub says which files Git LFS stores (`preupload`). Those are uploaded first, and only if the Hub does not have them, so a push that was
//! interrupted goes on with the files that are missing. The commit names all files, so readers see all of them or none.

use crate::api::{Hub, TIMEOUT, escape, pause};
use crate::content::Content;
use crate::hash::Checksum;
use crate::upload::{UNCOMMITTED, Upload};
use crate::{RepoId, Watch};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ottava_common::{Error, Result};
use ottava_http::{Client, Fault, Request, Url};
use serde_json::{Value, json};
use std::collections::BTreeMap;

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
        let is_of = |mode: &str| -> Vec<(&String, &Content)> {
            files.iter().filter(|(path, _)| modes.get(*path).is_some_and(|found| found == mode)).collect()
        };
        let mut large = Vec::new();
        for (path, content) in is_of("lfs") {
            let size = content.size()?;
            let hasher = Checksum::like(&"0".repeat(64), size).expect("64 digits are a SHA-256");
            let oid = hasher.of_reader(content.reader()?).map_err(Error::io(content.place()))?;
            large.push((path, oid, size, content));
        }
        let uploaded = self.upload_large(id, &large, watch)?;
        let mut lines = vec![json!({"key": "header", "value": {"summary": options.message, "description": ""}})];
        for (path, content) in is_of("regular") {
            let text = STANDARD.encode(content.bytes(u64::MAX)?);
            lines.push(json!({"key": "file", "value": {"path": path, "content": text, "encoding": "base64"}}));
        }
        for (path, oid, size, _) in &large {
            let value = json!({"path": path, "algo": "sha256", "oid": oid, "size": size});
            lines.push(json!({"key": "lfsFile", "value": value}));
        }
        let body: String = lines.iter().map(|line| format!("{line}\n")).collect();
        let url = self.api(id, &format!("commit/{}", escape(id.revision(), "")));
        let answer = self.post(id, url, body.as_bytes(), "application/x-ndjson")?;
        let commit = answer["commitOid"].as_str().ok_or_else(|| self.unusable(id, "it names no commit"))?.to_string();
        let url = self.endpoint.join(&format!("{}{}", id.kind.prefix(), id.name)).to_string();
        Ok(Pushed { commit, url, uploaded })
    }

    /// Creates the repository, unless it exists.
    fn create(&self, id: &RepoId, private: bool) -> Result<()> {
        let (owner, name) = id.name.split_once('/').expect("a name has an owner");
        let kind = id.kind.plural().trim_end_matches('s');
        let body = json!({"name": name, "organization": owner, "type": kind, "private": private}).to_string();
        let url = self.endpoint.join("api/repos/create");
        match self.send(id, url, body.as_bytes(), "application/json")? {
            // The repository exists.
            (409, _) => Ok(()),
            (status, answer) => self.expect_success(id, status, &answer),
        }
    }

    /// Asks how each file is stored: `regular` or `lfs`. Files that the Hub ignores are left out.
    fn modes(&self, id: &RepoId, files: &BTreeMap<String, Content>) -> Result<BTreeMap<String, String>> {
        let (mut modes, all) = (BTreeMap::new(), files.iter().collect::<Vec<_>>());
        for some in all.chunks(FILES) {
            let mut asked = Vec::new();
            for (path, content) in some {
                let sample = STANDARD.encode(content.bytes(SAMPLE)?);
                asked.push(json!({"path": path, "size": content.size()?, "sample": sample}));
            }
            let url = self.api(id, &format!("preupload/{}", escape(id.revision(), "")));
            let answer = self.post(id, url, json!({"files": asked}).to_string().as_bytes(), "application/json")?;
            for file in answer["files"].as_array().into_iter().flatten().filter(|file| file["shouldIgnore"] != true) {
                if let (Some(path), Some(mode)) = (file["path"].as_str(), file["uploadMode"].as_str()) {
                    modes.insert(path.to_string(), mode.to_string());
                }
            }
        }
        Ok(modes)
    }

    /// Uploads the files of Git LFS that the Hub lacks. Returns their bytes.
    fn upload_large(
        &self,
        id: &RepoId,
        files: &[(&String, String, u64, &Content)],
        watch: &mut dyn Watch,
    ) -> Result<u64> {
        if files.is_empty() {
            return Ok(0);
        }
        let objects: Vec<_> = files.iter().map(|(_, oid, size, _)| json!({"oid": oid, "size": size})).collect();
        let transfers = ["basic", "multipart"];
        let body = json!({"operation": "upload", "transfers": transfers, "objects": objects, "hash_algo": "sha256"});
        let url = self.endpoint.join(&format!("{}{}.git/info/lfs/objects/batch", id.kind.prefix(), id.name));
        let answer = self.post(id, url, body.to_string().as_bytes(), LFS)?;
        let mut uploads: Vec<Upload> = Vec::new();
        for object in answer["objects"].as_array().into_iter().flatten() {
            let file = files.iter().find(|(_, oid, ..)| object["oid"] == oid.as_str());
            let Some((path, oid, size, content)) = file else { continue };
            if let Some(message) = object["error"]["message"].as_str() {
                return Err(Error::Config(format!("{} refuses {path}: {message}", self.endpoint)));
            }
            if object["actions"]["upload"].is_object() {
                let upload = Upload::new(&object["actions"], oid, *size, content);
                uploads.push(upload.map_err(|why| self.unusable(id, &format!("{path}: {why}")))?);
            }
        }
        let total = uploads.iter().map(|upload| upload.size).sum();
        let mut before = 0;
        for upload in &uploads {
            upload.run(self, &mut |done| watch.at(&id.name, (before + done).min(total), total))?;
            before += upload.size;
        }
        if total > 0 {
            watch.at(&id.name, total, total);
        }
        Ok(total)
    }

    /// Posts `body`, and returns the answer. Errors unless it is a success.
    fn post(&self, id: &RepoId, url: Url, body: &[u8], kind: &str) -> Result<Value> {
        let (status, answer) = self.send(id, url, body, kind)?;
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

    /// Posts `body`, and returns the status and the answer. Retries after temporary faults.
    fn send(&self, id: &RepoId, url: Url, body: &[u8], kind: &str) -> Result<(u16, Value)> {
        let there = self.client()?.at(url)?;
        let attempt = || send_once(&there, body, kind);
        self.retry
            .run(pause, attempt)
            .map_err(|fault| Error::External(format!("{}: {}; {UNCOMMITTED}", id.name, fault.words)))
    }
}

fn send_once(there: &Client, body: &[u8], kind: &str) -> Result<(u16, Value), Fault> {
    let request = Request::post(body).header("Content-Type", kind).header("Accept", kind.replace("x-ndjson", "json"));
    let answer = there.send(request, TIMEOUT)?;
    match answer.status() {
        408 | 429 | 500..=599 => Err(answer.success().err().unwrap_or_else(|| Fault::passing("no answer"))),
        status => Ok((status, serde_json::from_slice(&answer.read()?).unwrap_or_default())),
    }
}
