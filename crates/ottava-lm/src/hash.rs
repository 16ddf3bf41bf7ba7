//! SHA-256 in the two forms we need: of bytes at hand, and of everything that passes through a reader.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::{Error, Result};

/// FNV-1a of `name`, from `seed`: a number of its own for each tensor that does not depend on what other tensors there are.
pub fn name_hash(seed: u64, name: &str) -> u64 {
    name.bytes().fold(seed ^ 0xCBF2_9CE4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01B3))
}

/// The SHA-256 of `bytes`, in lower-case hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// The size and SHA-256 of the file at `path`.
pub fn sha256_file(path: &Path) -> Result<(u64, String)> {
    let mut file = File::open(path).map_err(Error::io(path))?;
    let (mut hasher, mut size, mut buffer) = (Sha256::new(), 0, vec![0; 1 << 20]);
    loop {
        let count = file.read(&mut buffer).map_err(Error::io(path))?;
        if count == 0 {
            return Ok((size, hex(&hasher.finalize())));
        }
        hasher.update(&buffer[..count]);
        size += count as u64;
    }
}

/// `bytes` in lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_agree_with_the_published_example() {
        // FIPS 180-4, "abc".
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(sha256(b"abc"), expected);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "abc").unwrap();
        assert_eq!(sha256_file(file.path()).unwrap(), (3, expected.into()));
    }
}
