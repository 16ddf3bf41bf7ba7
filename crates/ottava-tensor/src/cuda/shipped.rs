//! Kernels that were compiled when the program was built. The first step does not wait for NVRTC to compile them.
//!
//! A pack consists of the length of its index (U64, little endian), the index as JSON, and the deflated cubins. The key of a cubin is a digest of its
//! text and its compiler options. If the source of a kernel has changed, its key is not found, and NVRTC compiles it.

use flate2::Compression;
use flate2::read::{DeflateDecoder, DeflateEncoder};
use std::collections::BTreeMap;
use std::io::Read;
use std::ops::Range;
use std::sync::OnceLock;

/// The pack of this program. It is empty if the program was built without a pack.
static PACK: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.pack"));

/// The range of the deflated bytes of each cubin, by key. Ranges begin after the index.
type Index = BTreeMap<String, Range<usize>>;

/// Packs cubins by their keys.
pub(super) fn pack(cubins: impl Iterator<Item = (String, Vec<u8>)>) -> Vec<u8> {
    let (mut index, mut data) = (Index::new(), Vec::new());
    for (key, cubin) in cubins {
        let begin = data.len();
        DeflateEncoder::new(cubin.as_slice(), Compression::best()).read_to_end(&mut data).expect("reading from memory");
        index.insert(key, begin..data.len());
    }
    let index = serde_json::to_vec(&index).expect("an index is written without fail");
    [(index.len() as u64).to_le_bytes().as_slice(), &index, &data].concat()
}

/// Returns the cubin of this program with the given key, if the program has one.
pub(super) fn find(key: &str) -> Option<Vec<u8>> {
    static OPENED: OnceLock<(Index, &[u8])> = OnceLock::new();
    let (index, data) = OPENED.get_or_init(|| open(PACK).unwrap_or_default());
    inflate(data, index.get(key)?)
}

/// Returns the index and the data of a pack, and `None` if the pack is empty or damaged.
fn open(pack: &[u8]) -> Option<(Index, &[u8])> {
    let (length, rest) = pack.split_first_chunk()?;
    let (index, data) = rest.split_at_checked(u64::from_le_bytes(*length).try_into().ok()?)?;
    Some((serde_json::from_slice(index).ok()?, data))
}

fn inflate(data: &[u8], range: &Range<usize>) -> Option<Vec<u8>> {
    let mut cubin = Vec::new();
    DeflateDecoder::new(data.get(range.clone())?).read_to_end(&mut cubin).ok()?;
    Some(cubin)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cubins_are_found_by_what_they_were_compiled_from() {
        let cubins = [("a", vec![7; 100_000]), ("b", (0..=255).collect())].map(|(key, cubin)| (key.to_string(), cubin));
        let packed = pack(cubins.clone().into_iter());
        assert!(packed.len() < 2_000, "{}", packed.len());
        let (index, data) = open(&packed).unwrap();
        for (key, cubin) in cubins {
            assert_eq!(inflate(data, &index[&key]), Some(cubin));
        }
        assert!(!index.contains_key("c"));
        assert!(open(&[]).is_none());
        assert!(open(&packed[..20]).is_none());
        assert_eq!(inflate(data, &(0..data.len() + 1)), None);
    }
}
