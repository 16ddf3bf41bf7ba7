//! The operations of a commit, as the Hub reads them: one JSON value per line.

use crate::entry::Entry;
use crate::git_sha1;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

/// A commit that is sent to the Hub.
pub(crate) struct Commit {
    message: String,
    /// The operations.
    lines: Vec<Value>,
    /// The path and the checksum of each file.
    files: Vec<(String, String)>,
}

impl Commit {
    pub(crate) fn new(message: &str) -> Commit {
        Commit { message: message.to_string(), lines: Vec::new(), files: Vec::new() }
    }

    /// Adds a file with its content.
    pub(crate) fn add(&mut self, path: &str, bytes: &[u8]) {
        let value = json!({"path": path, "content": STANDARD.encode(bytes), "encoding": "base64"});
        self.lines.push(json!({"key": "file", "value": value}));
        self.files.push((path.to_string(), git_sha1(bytes)));
    }

    /// Adds a file of Git LFS, which is uploaded already.
    pub(crate) fn add_large(&mut self, path: &str, sha256: &str, size: u64) {
        let value = json!({"path": path, "algo": "sha256", "oid": sha256, "size": size});
        self.lines.push(json!({"key": "lfsFile", "value": value}));
        self.files.push((path.to_string(), sha256.to_string()));
    }

    /// Returns the number of files.
    pub(crate) fn files(&self) -> usize {
        self.files.len()
    }

    /// Returns the body of the request. `parent` is the commit that the branch must have.
    pub(crate) fn body(&self, parent: &str) -> String {
        let header = json!({"summary": self.message, "description": "", "parentCommit": parent});
        let header = json!({"key": "header", "value": header});
        [&header].into_iter().chain(&self.lines).map(|line| format!("{line}\n")).collect()
    }

    /// Whether `entries` have all files of this commit.
    pub(crate) fn is_in(&self, entries: &[Entry]) -> bool {
        let has = |(path, checksum): &(String, String)| {
            entries.iter().any(|entry| entry.path == *path && entry.checksum() == checksum)
        };
        self.files.iter().all(has)
    }
}
