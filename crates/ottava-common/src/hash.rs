//! SHA-256 of bytes, files, chunks of files and readers, JSON files that contain their own checksum, and hashes of names and numbers.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use rayon::prelude::*;
use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{Error, Result, input, interrupt};

/// Returns the FNV-1a hash of `name` from `seed`: a number for each tensor that does not depend on other tensors.
pub fn name_hash(seed: u64, name: &str) -> u64 {
    name.bytes().fold(seed ^ 0xCBF2_9CE4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01B3))
}

/// The increment of SplitMix64's state.
pub const MIX_STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Applies the finaliser of SplitMix64 (Steele, Lea and Flood 2014): every bit of the input affects every bit of the result.
pub fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(MIX_STEP);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns the SHA-256 of `bytes` in lower-case hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Returns the SHA-256 of the concatenation of `parts`.
pub fn sha256_of(parts: &[&[u8]]) -> [u8; 32] {
    parts.iter().fold(Sha256::new(), |hasher, part| hasher.chain_update(part)).finalize().into()
}

/// Returns the size and the SHA-256 of the regular file at `path`.
pub fn sha256_file(path: &Path) -> Result<(u64, String)> {
    HashedFile::open(path).map_err(Error::io(path))?.finish().map_err(Error::io(path))
}

/// The number of bytes of a chunk of [`sha256_of_chunks`]. A thread hashes a chunk in less than a millisecond, so work that waits for a thread waits briefly.
const CHUNK: usize = 1 << 20;

/// The beginning of a hash of chunks, which tells it from the SHA-256 of a whole file.
const CHUNKS: &str = "chunks:";

/// Returns the size of the regular file at `path`, and a hash that all processors compute together: `chunks:` and the SHA-256 of the SHA-256s of its chunks
/// of 1 MiB, in their order. The last chunk may be shorter. Does not stop for a signal.
///
/// # Errors
/// Errors of [`input::open`], errors of reading, and [`io::ErrorKind::UnexpectedEof`] if the file gets shorter meanwhile.
pub fn sha256_of_chunks(path: &Path) -> io::Result<(u64, String)> {
    let (file, size) = input::open(path)?;
    let mut hashes = vec![[0_u8; 32]; size.div_ceil(CHUNK as u64) as usize];
    let buffer = || vec![0; CHUNK];
    hashes.par_iter_mut().enumerate().try_for_each_init(buffer, |buffer, (i, hash)| -> io::Result<()> {
        let from = i as u64 * CHUNK as u64;
        let bytes = &mut buffer[..CHUNK.min((size - from) as usize)];
        file.read_exact_at(bytes, from)?;
        *hash = Sha256::digest(bytes).into();
        Ok(())
    })?;
    Ok((size, format!("{CHUNKS}{}", hex(&Sha256::digest(hashes.as_flattened())))))
}

/// A regular file that is hashed while it is read. Clones share the file and the position in it.
#[derive(Clone)]
pub struct HashedFile(Arc<Mutex<Hashed>>);

struct Hashed {
    file: File,
    hasher: Sha256,
    size: u64,
}

impl HashedFile {
    /// Opens the file as [`input::open`] does.
    pub fn open(path: &Path) -> io::Result<HashedFile> {
        let (file, _) = input::open(path)?;
        Ok(HashedFile(Arc::new(Mutex::new(Hashed { file, hasher: Sha256::new(), size: 0 }))))
    }

    /// Reads the rest of the file, and returns its size and the SHA-256 of everything that was read. Errors with [`io::ErrorKind::Other`] if a signal
    /// asks the process to stop.
    pub fn finish(mut self) -> io::Result<(u64, String)> {
        let mut buffer = vec![0; 1 << 20];
        while self.read(&mut buffer)? > 0 {
            interrupt::check("reading files").map_err(io::Error::other)?;
        }
        let hashed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok((hashed.size, hex(&hashed.hasher.clone().finalize())))
    }
}

impl Read for HashedFile {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut hashed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = hashed.file.read(buffer)?;
        hashed.hasher.update(&buffer[..count]);
        hashed.size += count as u64;
        Ok(count)
    }
}

const CHECKSUM_START: &str = "{\n  \"checksum\": \"";
const CHECKSUM_END: &str = "\",\n";

/// Renders a JSON object. Its first key is the SHA-256 of all bytes after the line of this key, so [`unseal`] detects any flipped bit.
pub fn seal(value: &impl Serialize) -> String {
    let body = serde_json::to_string_pretty(value).expect("numbers, strings and maps are JSON");
    let rest = body.strip_prefix("{\n").expect("a pretty object starts so");
    format!("{CHECKSUM_START}{}{CHECKSUM_END}{rest}\n", sha256(format!("{rest}\n").as_bytes()))
}

/// Parses a text that [`seal`] rendered. Errors with the reason if the text is damaged.
pub fn unseal(text: &[u8]) -> Result<Value, String> {
    let damaged = || "it is damaged: its checksum does not match".to_string();
    let text = std::str::from_utf8(text).map_err(|_| "it is damaged: not UTF-8".to_string())?;
    let after = text.strip_prefix(CHECKSUM_START).ok_or_else(damaged)?;
    let (checksum, rest) = after.split_once(CHECKSUM_END).ok_or_else(damaged)?;
    if checksum != sha256(rest.as_bytes()) {
        return Err(damaged());
    }
    let mut value: Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
    value.as_object_mut().ok_or_else(damaged)?.shift_remove("checksum");
    Ok(value)
}

/// Returns `bytes` in lower-case hexadecimal.
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

    #[test]
    fn a_hash_of_chunks_depends_on_each_byte_and_on_the_order_of_chunks() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let hash = |bytes: &[u8]| {
            std::fs::write(file.path(), bytes).unwrap();
            sha256_of_chunks(file.path()).unwrap()
        };
        let bytes: Vec<u8> = (0..2 * CHUNK + 5).map(|i| (i / CHUNK + i % 251) as u8).collect();
        let of_chunks: Vec<[u8; 32]> = bytes.chunks(CHUNK).map(|chunk| sha256_of(&[chunk])).collect();
        let expected = format!("chunks:{}", hex(&sha256_of(&[of_chunks.as_flattened()])));
        assert_eq!(hash(&bytes), (bytes.len() as u64, expected.clone()));
        for at in [0, CHUNK - 1, CHUNK, 2 * CHUNK, 2 * CHUNK + 4] {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert_ne!(hash(&changed).1, expected, "byte {at}");
        }
        let swapped = [&bytes[CHUNK..2 * CHUNK], &bytes[..CHUNK], &bytes[2 * CHUNK..]].concat();
        assert_ne!(hash(&swapped).1, expected);
        assert_eq!(hash(b""), (0, format!("chunks:{}", sha256(b""))));
    }
}
