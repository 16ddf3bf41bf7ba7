//! GEMM algorithms that were chosen by timing. This program contains the choices for known shapes, and a cache on disk holds further choices.

use super::spec::GemmSpec;
use crate::cuda::nvrtc::{cache_folder, hex, replace};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// An opaque algorithm (`cublasLtMatmulAlgo_t`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Algorithm(pub(super) [u64; 8]);

impl Algorithm {
    /// A placeholder for an algorithm that is not chosen yet.
    pub(super) const NONE: Algorithm = Algorithm([0; 8]);
}

/// The name of the rule that selects the competing proposals. A changed rule makes earlier choices invalid.
const RULES: &str = "small-clusters";

/// The files that `examples/measure_products.rs` of ottava-train wrote, by name.
const MEASURED: [(&str, &str); 1] = [(
    "NVIDIA-H200-cublaslt-13.1.0-small-clusters.json",
    include_str!("measured/NVIDIA-H200-cublaslt-13.1.0-small-clusters.json"),
)];

/// The bytes of algorithms in hexadecimal, by the text of their spec.
type Table = BTreeMap<String, String>;

/// The algorithms for one GPU model and library version.
pub(super) struct Choices {
    file: PathBuf,
    /// The choices in the file.
    known: Table,
    /// The choices that this program contains. A choice in the file takes precedence.
    measured: Table,
}

impl Choices {
    pub(super) fn load(version: &str, gpu: &str) -> Choices {
        let gpu: String = gpu.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let name = format!("{gpu}-cublaslt-{version}-{RULES}.json");
        let file = cache_folder().join("gemm").join(&name);
        let known = Choices::read(&file);
        Choices { file, known, measured: measured(&name) }
    }

    /// Reads the choices of a file. Returns an empty table if the file is missing or damaged.
    fn read(file: &std::path::Path) -> Table {
        std::fs::read(file).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
    }

    /// Returns the text of a product that leaves `spared` multiprocessors to other kernels.
    pub(super) fn key(spec: &GemmSpec, alignment: u32, spared: usize) -> String {
        let beside = if spared > 0 { format!(", sparing {spared} multiprocessors") } else { String::new() };
        format!("{spec:?} aligned to {alignment}{beside}")
    }

    /// Returns the choice of the product `key`: with `timed`, the choice of the file or else of the program, and without, the choice of the program,
    /// which is the same on every machine.
    pub(super) fn get(&self, key: &str, timed: bool) -> Option<Algorithm> {
        let known = if timed { self.known.get(key) } else { None };
        let text = known.or_else(|| self.measured.get(key))?;
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
        // This merges the choices that other processes wrote. If two processes write at once, one choice is lost, and a later run times that product
        // again.
        self.known.extend(Choices::read(&self.file));
        self.known.insert(key, algorithm.0.iter().map(|word| hex(&word.to_be_bytes())).collect());
        let text = serde_json::to_vec_pretty(&self.known).unwrap_or_default();
        if let Err(error) = replace(&self.file, &text) {
            tracing::warn!("{} was not kept: {error}", self.file.display());
        }
    }
}

/// Returns the choices that this program contains under the file name `name`.
fn measured(name: &str) -> Table {
    let found = MEASURED.iter().find(|(file, _)| *file == name);
    found.map(|(_, text)| serde_json::from_str(text).expect("a file of the source tree")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::cuda::cublaslt::spec::ScaleMode;

    #[test]
    fn choices_survive_the_disk_and_damaged_files_are_ignored() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("gemm/choices.json");
        let mut choices = Choices { file: file.clone(), known: Table::new(), measured: Table::new() };
        let algorithm = Algorithm([1, u64::MAX, 0, 3, 4, 5, 6, 0xdead_beef]);
        choices.insert("spec".to_string(), algorithm);

        let mut again = Choices {
            known: Choices::read(&file),
            ..Choices { file: file.clone(), known: Table::new(), measured: Table::new() }
        };
        assert_eq!(again.get("spec", true).map(|found| found.0), Some(algorithm.0));
        assert!(again.get("spec", false).is_none(), "the choice of another run");
        assert!(again.get("another", true).is_none());
        for damage in ["", "0123", "g123456789abcdef"] {
            again.known.insert("spec".to_string(), damage.to_string());
            assert!(again.get("spec", true).is_none(), "{damage:?}");
        }
        std::fs::write(&file, "{\"spec\": 3").expect("a file");
        assert!(Choices::read(&file).is_empty());
    }

    /// If a field of `GemmSpec` is renamed, no product is found.
    #[test]
    fn products_of_known_models_are_found_without_timing() {
        let (file, known) = (PathBuf::new(), Table::new());
        let choices = Choices { file, known, measured: measured(MEASURED[0].0) };
        let bf16 = GemmSpec::contiguous([8192, 12_288, 4096], DType::BF16, DType::BF16, DType::BF16);
        let fp8 = GemmSpec::contiguous([8192, 12_288, 4096], DType::E4M3, DType::E4M3, DType::BF16);
        let fp8 = GemmSpec { fast_accumulation: true, scale: ScaleMode::PerTensor, ..fp8 };
        let wgrad = GemmSpec::contiguous([12_288, 4096, 8192], DType::E5M2, DType::E4M3, DType::F32);
        let wgrad = GemmSpec { fast_accumulation: true, scale: ScaleMode::PerTensor, accumulate: true, ..wgrad };
        let unscaled = GemmSpec::contiguous([256, 4096, 14_336], DType::E4M3, DType::E4M3, DType::F32);
        let unscaled = GemmSpec { fast_accumulation: true, ..unscaled };
        for spec in [bf16, fp8, wgrad, unscaled] {
            for timed in [false, true] {
                assert!(choices.get(&Choices::key(&spec, 256, 0), timed).is_some(), "{spec:?}");
            }
        }
        let other = GemmSpec { m: 8193, ..bf16 };
        assert!(choices.get(&Choices::key(&other, 256, 0), true).is_none());
        assert!(measured("another GPU").is_empty());
    }
}
