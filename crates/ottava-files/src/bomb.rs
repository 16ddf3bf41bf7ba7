//! How much a compressed file may unpack to.

/// A compressed file may unpack to this many times its size (text seldom passes 20) or to [`FREE_BYTES`], and no further.
const MAX_RATIO: u64 = 200;

/// Unpacked bytes that are always allowed, so that small files of repeated text pass.
const FREE_BYTES: u64 = 16 << 20;

/// The bytes that a compressed file of `size` bytes may unpack to.
pub fn most_unpacked_bytes(size: u64) -> u64 {
    FREE_BYTES.max(size.saturating_mul(MAX_RATIO))
}

/// The error of a file that unpacks to more than [`most_unpacked_bytes`].
pub fn bomb() -> String {
    format!("it unpacks to more than {MAX_RATIO} times its size; unpack it yourself if you trust it")
}
