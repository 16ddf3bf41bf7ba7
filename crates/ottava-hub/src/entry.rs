//! The files of a repository, as the Hub lists them.

use ottava_common::fs::is_relative_path;

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The path below the repository.
    pub path: String,
    /// The size in bytes.
    pub size: u64,
    /// The name of the blob in Git.
    pub(crate) oid: String,
    /// The SHA-256 of a file of Git LFS.
    pub(crate) sha256: Option<String>,
}

impl Entry {
    /// Creates an entry. Returns `None` if `path` could leave the folder of a snapshot, or if a checksum is no hexadecimal number.
    pub(crate) fn new(path: &str, size: u64, oid: String, sha256: Option<String>) -> Option<Entry> {
        let is_hex = |text: &str| text.len() >= 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let is_valid = is_relative_path(path) && is_hex(&oid) && sha256.as_deref().is_none_or(is_hex);
        is_valid.then(|| Entry { path: path.to_string(), size, oid, sha256 })
    }

    /// Returns the checksum that names the file in the cache: its SHA-256 for Git LFS, else its name in Git.
    pub(crate) fn checksum(&self) -> &str {
        self.sha256.as_deref().unwrap_or(&self.oid)
    }

    /// Returns the name without its folder.
    pub(crate) fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or(&self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_cannot_leave_the_folder() {
        let entry = |path: &str| Entry::new(path, 1, "a".repeat(40), None);
        assert!(entry("a/b.json").is_some());
        for path in ["", "/etc/passwd", "../a", "a/../../b", "a//b", "a\\b", "."] {
            assert!(entry(path).is_none(), "{path}");
        }
        assert!(Entry::new("a", 1, "../../x".into(), None).is_none());
        assert!(Entry::new("a", 1, "a".repeat(40), Some("/".repeat(64))).is_none());
    }
}
