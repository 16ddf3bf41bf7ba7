//! The checksums of files on the Hub.

use ottava_common::hash::hex;
use ottava_common::interrupt;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::io::{self, Read};

/// Returns the name that Git gives to a file with this content.
pub fn git_sha1(bytes: &[u8]) -> String {
    Checksum::of_git(bytes.len() as u64).update(bytes).finish()
}

/// A checksum that is computed from the parts of a file.
pub(crate) enum Checksum {
    /// The name of a blob in Git.
    Git(Sha1),
    /// The SHA-256 of files that Git LFS stores.
    Lfs(Sha256),
}

impl Checksum {
    fn of_git(size: u64) -> Checksum {
        Checksum::Git(Sha1::new_with_prefix(format!("blob {size}\0")))
    }

    /// Starts the checksum whose kind the length of the `expected` checksum says, of a file of `size` bytes. Returns `None` for other texts.
    pub(crate) fn like(expected: &str, size: u64) -> Option<Checksum> {
        match expected.len() {
            _ if !expected.bytes().all(|byte| byte.is_ascii_hexdigit()) => None,
            40 => Some(Checksum::of_git(size)),
            64 => Some(Checksum::Lfs(Sha256::new())),
            _ => None,
        }
    }

    fn update(mut self, bytes: &[u8]) -> Checksum {
        match &mut self {
            Checksum::Git(hasher) => hasher.update(bytes),
            Checksum::Lfs(hasher) => hasher.update(bytes),
        }
        self
    }

    fn finish(self) -> String {
        match self {
            Checksum::Git(hasher) => hex(&hasher.finalize()),
            Checksum::Lfs(hasher) => hex(&hasher.finalize()),
        }
    }

    /// Reads `file` to its end and returns the checksum. A request to stop ends the reading with an error.
    pub(crate) fn of_reader(mut self, mut file: impl Read) -> io::Result<String> {
        let mut buffer = vec![0; 1 << 20];
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok(self.finish()),
                count => self = self.update(&buffer[..count]),
            }
            interrupt::check("checking files").map_err(io::Error::other)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_agree_with_git_and_sha256sum() {
        // `printf hello | git hash-object --stdin`, and `printf hello | sha256sum`.
        assert_eq!(git_sha1(b"hello"), "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0");
        let sha256 = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
        assert_eq!(Checksum::like(sha256, 5).unwrap().of_reader(&b"hello"[..]).unwrap(), sha256);
        assert!(Checksum::like("W/etag", 5).is_none());
    }
}
