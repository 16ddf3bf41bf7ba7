//! The limit of the unpacked size of compressed files.

/// The maximum ratio of unpacked to packed bytes, beyond [`FREE_BYTES`]. The ratio of text is rarely more than 20.
const MAX_RATIO: u64 = 200;

/// The unpacked bytes that are always allowed, so that small files of repeated text can be read.
const FREE_BYTES: u64 = 16 << 20;

/// Returns the maximum number of bytes to which a compressed file of `size` bytes may unpack.
pub fn most_unpacked_bytes(size: u64) -> u64 {
    FREE_BYTES.max(size.saturating_mul(MAX_RATIO))
}

/// Returns the error for a file that unpacks to more than [`most_unpacked_bytes`].
pub fn bomb() -> String {
    format!("it unpacks to more than {MAX_RATIO} times its size; unpack it yourself if you trust it")
}
