//! The disk cache of GEMM algorithms chosen by timing.

use crate::cuda::nvrtc::{cache_folder, hex, replace};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// An opaque algorithm (`cublasLtMatmulAlgo_t`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Algorithm(pub(super) [u64; 8]);

impl Algorithm {
    /// Placeholder before one is chosen.
    pub(super) const NONE: Algorithm = Algorithm([0; 8]);
}

/// Which proposals compete; a change of that makes earlier choices invalid.
const RULES: &str = "small-clusters";

/// Algorithms for one GPU model and library version, cached on disk.
pub(super) struct Choices {
    file: PathBuf,
    /// Spec as text, and the algorithm's bytes in hexadecimal.
    known: BTreeMap<String, String>,
}

impl Choices {
    pub(super) fn load(version: &str, gpu: &str) -> Choices {
        let gpu: String = gpu.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let file = cache_folder().join("gemm").join(format!("{gpu}-cublaslt-{version}-{RULES}.json"));
        let known = Choices::read(&file);
        Choices { file, known }
    }

    /// The content of a file; empty if it is missing or damaged.
    fn read(file: &std::path::Path) -> BTreeMap<String, String> {
        std::fs::read(file).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
    }

    pub(super) fn get(&self, key: &str) -> Option<Algorithm> {
        let text = self.known.get(key)?;
        let words = text.as_bytes().as_chunks::<16>();
        let mut algorithm = Algorithm::NONE;
        if words.0.len() != algorithm.0.len() || !words.1.is_empty() {
            return None;
        }
        for (word, digits) in algorithm.0.iter_mut().zip(words.0) {
            *word = u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
        }
        Some(algorithm)
    }

    pub(super) fn insert(&mut self, key: String, algorithm: Algorithm) {
        // Merge what other processes wrote. If two write at once, one choice is lost and timed again in a later run.
        self.known.extend(Choices::read(&self.file));
        self.known.insert(key, algorithm.0.iter().map(|word| hex(&word.to_be_bytes())).collect());
        let text = serde_json::to_vec_pretty(&self.known).unwrap_or_default();
        if let Err(error) = replace(&self.file, &text) {
            tracing::warn!("{} was not kept: {error}", self.file.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_survive_the_disk_and_damaged_files_are_ignored() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("gemm/choices.json");
        let mut choices = Choices { file: file.clone(), known: BTreeMap::new() };
        let algorithm = Algorithm([1, u64::MAX, 0, 3, 4, 5, 6, 0xdead_beef]);
        choices.insert("spec".to_string(), algorithm);

        let mut again = Choices { file: file.clone(), known: Choices::read(&file) };
        assert_eq!(again.get("spec").map(|found| found.0), Some(algorithm.0));
        assert!(again.get("another").is_none());
        for damage in ["", "0123", "g123456789abcdef"] {
            again.known.insert("spec".to_string(), damage.to_string());
            assert!(again.get("spec").is_none(), "{damage:?}");
        }
        std::fs::write(&file, "{\"spec\": 3").expect("a file");
        assert!(Choices::read(&file).is_empty());
    }
}
