//! The repositories of the server.

use crate::git_sha1;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ottava_common::hash::sha256;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The bytes of a part of a file that is uploaded in parts.
pub(super) const PART: u64 = 100_000;

/// Why a commit with another parent than the newest commit is refused.
pub(super) const MOVED: &str = "A commit has happened since. Please refresh and try again.";

/// A file of a repository.
#[derive(Clone, Debug)]
pub struct Stored {
    /// Its path.
    pub path: String,
    /// Its content.
    pub bytes: Vec<u8>,
    pub(super) oid: String,
    pub(super) sha256: Option<String>,
}

impl Stored {
    /// Whether the server stores files with this path by Git LFS.
    pub(super) fn is_lfs(path: &str) -> bool {
        [".safetensors", ".bin", ".parquet", ".gguf"].iter().any(|ending| path.ends_with(ending))
    }

    fn new(path: &str, bytes: &[u8]) -> Stored {
        let sha256 = Stored::is_lfs(path).then(|| sha256(bytes));
        Stored { path: path.to_string(), bytes: bytes.to_vec(), oid: git_sha1(bytes), sha256 }
    }

    /// Returns the entry of the file in a listing.
    pub(super) fn listed(&self) -> Value {
        let mut entry = json!({"type": "file", "path": self.path, "size": self.bytes.len(), "oid": self.oid});
        if let Some(sha256) = &self.sha256 {
            entry["lfs"] = json!({"oid": sha256, "size": self.bytes.len(), "pointerSize": 134});
        }
        entry
    }
}

/// A repository with its newest commit. Older commits have names only.
pub struct Repo {
    commits: Vec<String>,
    pub(super) private: bool,
    pub(super) files: Vec<Stored>,
}

#[derive(Default)]
pub(super) struct Store {
    repos: BTreeMap<String, Repo>,
    /// Contents of files of Git LFS by their SHA-256.
    pub(super) lfs: BTreeMap<String, Vec<u8>>,
    parts: BTreeMap<(String, usize), Vec<u8>>,
}

impl Store {
    pub(super) fn repo(&self, name: &str) -> Option<&Repo> {
        self.repos.get(name)
    }

    /// Returns the branch with this name or newest commit, and the commit. Other branches than `main` are stored as `NAME@BRANCH`.
    pub(super) fn at(&self, name: &str, revision: &str) -> Option<(&Repo, &str)> {
        let branch = |key: &String| match key.strip_prefix(name)? {
            "" => Some("main".to_string()),
            rest => rest.strip_prefix('@').map(str::to_string),
        };
        self.repos.iter().find_map(|(key, repo)| {
            let (branch, newest) = (branch(key)?, repo.commits.last()?);
            (revision == branch || revision == newest).then_some((repo, newest.as_str()))
        })
    }

    /// Adds files as a commit, and returns the commit.
    pub(super) fn commit(&mut self, name: &str, files: &[(&str, &[u8])]) -> String {
        let stored: Vec<Stored> = files.iter().map(|(path, bytes)| Stored::new(path, bytes)).collect();
        for file in &stored {
            if let Some(sha256) = &file.sha256 {
                self.lfs.insert(sha256.clone(), file.bytes.clone());
            }
        }
        self.add(name, stored)
    }

    fn add(&mut self, name: &str, files: Vec<Stored>) -> String {
        let repo = self.repos.entry(name.to_string()).or_insert_with(|| Repo {
            commits: Vec::new(),
            private: false,
            files: Vec::new(),
        });
        for file in files {
            repo.files.retain(|known| known.path != file.path);
            repo.files.push(file);
        }
        repo.files.sort_by(|a, b| a.path.cmp(&b.path));
        let names: Vec<&str> = repo.files.iter().map(|file| file.oid.as_str()).collect();
        let commit = git_sha1(format!("{name} {} {names:?}", repo.commits.len()).as_bytes());
        repo.commits.push(commit.clone());
        commit
    }

    pub(super) fn set_private(&mut self, name: &str, private: bool) {
        if let Some(repo) = self.repos.get_mut(name) {
            repo.private = private;
        }
    }

    /// Stores an uploaded file, or its part `number`.
    pub(super) fn upload(&mut self, oid: &str, number: Option<usize>, bytes: Vec<u8>) {
        match number {
            Some(number) => drop(self.parts.insert((oid.to_string(), number), bytes)),
            None if sha256(&bytes) == oid => drop(self.lfs.insert(oid.to_string(), bytes)),
            None => {}
        }
    }

    /// Joins the parts of a file. Returns whether they are the file.
    pub(super) fn complete(&mut self, oid: &str, body: &str) -> bool {
        let asked: Value = serde_json::from_str(body).unwrap_or_default();
        let numbers = asked["parts"].as_array().into_iter().flatten().filter_map(|part| part["partNumber"].as_u64());
        let parts: Option<Vec<_>> =
            numbers.map(|number| self.parts.remove(&(oid.to_string(), number as usize))).collect();
        let bytes = parts.unwrap_or_default().concat();
        let is_whole = sha256(&bytes) == oid;
        if is_whole {
            self.lfs.insert(oid.to_string(), bytes);
        }
        is_whole
    }

    /// Applies the lines of a commit, and returns the commit.
    pub(super) fn apply(&mut self, name: &str, body: &str) -> Result<String, String> {
        let (mut files, mut has_header) = (Vec::new(), false);
        for line in body.lines() {
            let line: Value = serde_json::from_str(line).map_err(|error| error.to_string())?;
            let value = &line["value"];
            let path = value["path"].as_str().unwrap_or_default();
            match line["key"].as_str() {
                Some("header") => {
                    has_header = value["summary"].is_string();
                    let newest = self.repos.get(name).and_then(|repo| repo.commits.last());
                    if value["parentCommit"].as_str().is_some_and(|parent| newest.is_none_or(|newest| newest != parent))
                    {
                        return Err(MOVED.into());
                    }
                }
                Some("file") => {
                    let bytes = STANDARD.decode(value["content"].as_str().unwrap_or_default());
                    files.push(Stored::new(path, &bytes.map_err(|error| error.to_string())?));
                }
                Some("lfsFile") => {
                    let oid = value["oid"].as_str().unwrap_or_default();
                    let bytes = self.lfs.get(oid).ok_or_else(|| format!("{path}: {oid} was not uploaded"))?;
                    files.push(Stored { sha256: Some(oid.to_string()), ..Stored::new(path, bytes) });
                }
                Some("deletedFile") => {
                    if let Some(repo) = self.repos.get_mut(name) {
                        repo.files.retain(|file| file.path != path);
                    }
                }
                other => return Err(format!("unknown operation {other:?}")),
            }
        }
        if !has_header {
            return Err("no header".into());
        }
        Ok(self.add(name, files))
    }
}
