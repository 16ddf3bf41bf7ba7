use crate::ops::random::hash;
use rayon::prelude::*;

/// The number of words per task.
const CHUNK: usize = 1 << 14;

pub(super) fn checksum(bytes: &[u8]) -> u64 {
    let chunks = bytes.par_chunks(CHUNK * size_of::<u64>()).enumerate();
    chunks.map(|(chunk, bytes)| sum(bytes, (chunk * CHUNK) as u64)).reduce(|| 0, u64::wrapping_add)
}

/// Returns the sum over the words of `bytes`. The first word has the number `first`.
fn sum(bytes: &[u8], first: u64) -> u64 {
    let word = |bytes: &[u8]| {
        let mut padded = [0; size_of::<u64>()];
        padded[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(padded)
    };
    let words = bytes.chunks(size_of::<u64>()).map(word).zip(first..);
    words.fold(0, |sum, (word, i)| sum.wrapping_add(hash(word.wrapping_add(i.wrapping_mul(0x9E37_79B9_7F4A_7C15)))))
}
