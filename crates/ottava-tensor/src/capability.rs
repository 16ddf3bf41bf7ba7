//! The capabilities of GPUs by compute capability, from NVIDIA's documents (CUDA C++ Programming Guide, PTX ISA, cuBLAS: "FP8 data types
//! usage"). The needs of kernels are checked against these capabilities before a launch.
//!
//! For each compute capability, `CAPABILITIES` lists the features of GPUs, the scales of their FP8 products, their shared memory, and whether this
//! project's tests have run on such a GPU. Three kinds of work are checked against this table, before a launch and in every dry
//! run:
//!
//! - Kernels: the declaration of a kernel source (`kernels!`) names the features that the kernel `needs`, and `KernelModule::expect_on`
//!   checks these needs before the kernel is compiled. If a kernel has another path for GPUs that lack an instruction
//!   (`__CUDA_ARCH__` in `common.cuh`), it does not need the feature.
//! - Products and recipes: `Capability::expect_fp8_product`, and `Recipe::expect_on` of `ottava-recipe` for the products of a recipe.
//! - Attention: `AttentionBackend::choose` excludes backends that need a missing feature.
//!
//! `ottava plan --gpu NAME` prints what runs on a GPU. To support another GPU, add a row here and a model in `cuda/dry.rs`. If the GPU lacks the
//! needs of a kernel, add another kernel to the folder of the op.

use crate::error::{Error, Result};
use crate::granularity::Granularity;
use std::fmt;

/// A feature that a kernel or a product may need, and that some GPUs of [`CAPABILITIES`] lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Feature {
    /// Kernels that start before their predecessor ends (`griddepcontrol`).
    EarlyStart,
    /// Clusters of up to eight blocks, which write to each other's shared memory.
    Clusters,
    /// Copies of tensor boxes to shared memory by TMA (`cp.async.bulk.tensor`).
    BulkCopies,
    /// A TMA copy to the shared memory of several blocks of a cluster at once.
    Multicast,
    /// Products of a warp group with operands in shared memory (`wgmma`).
    Wgmma,
}

impl Feature {
    /// All features.
    pub const ALL: [Feature; 5] =
        [Feature::EarlyStart, Feature::Clusters, Feature::BulkCopies, Feature::Multicast, Feature::Wgmma];

    /// Returns the name in error messages.
    pub const fn name(self) -> &'static str {
        match self {
            Feature::EarlyStart => "early starts of kernels",
            Feature::Clusters => "clusters of blocks",
            Feature::BulkCopies => "bulk copies (TMA)",
            Feature::Multicast => "multicast in a cluster",
            Feature::Wgmma => "wgmma",
        }
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The capabilities of GPUs of one compute capability. All GPUs have BF16 and F16 products on tensor cores.
#[derive(Debug, PartialEq, Eq)]
pub struct Capability {
    /// The compute capability, major and minor.
    pub version: (i32, i32),
    /// The name of the architecture.
    pub architecture: &'static str,
    /// The features beyond compute capability 8.0.
    pub features: &'static [Feature],
    /// The granularities of scales for which cuBLASLt has FP8 products.
    pub fp8_products: &'static [Granularity],
    /// The maximum number of bytes of shared memory per block.
    pub shared_bytes: usize,
    /// Whether this project's tests and benchmarks have run on such a GPU.
    pub is_tested: bool,
}

use Feature::{BulkCopies, Clusters, EarlyStart, Multicast, Wgmma};
use Granularity::{Blocks1x128, Blocks128x128, MixedBlocks, Mx, PerRow, PerTensor};

/// All supported compute capabilities, in ascending order.
pub const CAPABILITIES: &[Capability] = &[
    Capability {
        version: (8, 0),
        architecture: "Ampere",
        features: &[],
        fp8_products: &[],
        shared_bytes: 163 << 10,
        is_tested: false,
    },
    Capability {
        version: (8, 6),
        architecture: "Ampere",
        features: &[],
        fp8_products: &[],
        shared_bytes: 99 << 10,
        is_tested: false,
    },
    Capability {
        version: (8, 9),
        architecture: "Ada",
        features: &[],
        fp8_products: &[PerTensor],
        shared_bytes: 99 << 10,
        is_tested: false,
    },
    Capability {
        version: (9, 0),
        architecture: "Hopper",
        features: &[EarlyStart, Clusters, BulkCopies, Multicast, Wgmma],
        fp8_products: &[PerTensor, PerRow, Blocks1x128, Blocks128x128, MixedBlocks],
        shared_bytes: 227 << 10,
        is_tested: true,
    },
    Capability {
        version: (10, 0),
        architecture: "Blackwell",
        features: &[EarlyStart, Clusters, BulkCopies, Multicast],
        fp8_products: &[PerTensor, Mx],
        shared_bytes: 227 << 10,
        is_tested: false,
    },
    Capability {
        version: (12, 0),
        architecture: "Blackwell",
        features: &[EarlyStart, Clusters, BulkCopies],
        fp8_products: &[PerTensor, Mx],
        shared_bytes: 99 << 10,
        is_tested: false,
    },
];

impl Capability {
    /// Returns the capabilities of GPUs of compute capability `version`.
    ///
    /// Errors with [`Error::Value`], which lists the supported versions, if `version` is not supported.
    pub fn find(version: (i32, i32)) -> Result<&'static Capability> {
        CAPABILITIES.iter().find(|known| known.version == version).ok_or_else(|| {
            let known = CAPABILITIES.iter().map(|known| format!("{}.{}", known.version.0, known.version.1));
            Error::Value(format!(
                "GPUs of compute capability {}.{} are not supported; those of {} are known",
                version.0,
                version.1,
                known.collect::<Vec<_>>().join(", ")
            ))
        })
    }

    /// Returns the features among `needs` that these GPUs lack.
    pub fn lacks(&self, needs: &[Feature]) -> Vec<Feature> {
        needs.iter().copied().filter(|need| !self.features.contains(need)).collect()
    }

    /// Errors with [`Error::Value`] if cuBLASLt has no FP8 products of operands with these scales.
    pub fn expect_fp8_product(&self, scales: Granularity) -> Result<()> {
        if self.fp8_products.contains(&scales) {
            return Ok(());
        }
        let known: Vec<_> = self.fp8_products.iter().map(Granularity::to_string).collect();
        let known = match known.is_empty() {
            true => "none".to_string(),
            false => known.join("; "),
        };
        Err(Error::Value(format!(
            "cuBLASLt has no FP8 products with {scales} scales on {self}; supported scales: {known}"
        )))
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} GPUs of compute capability {}.{}", self.architecture, self.version.0, self.version.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_order_and_names_each_feature() {
        assert!(CAPABILITIES.is_sorted_by(|a, b| a.version < b.version), "each capability once, in order");
        for feature in Feature::ALL {
            assert!(CAPABILITIES.iter().any(|known| known.features.contains(&feature)), "no GPU has {feature}");
        }
        let tested: Vec<_> = CAPABILITIES.iter().filter(|known| known.is_tested).map(|known| known.version).collect();
        assert_eq!(tested, [(9, 0)]);
    }

    #[test]
    fn what_a_gpu_lacks_is_named() {
        let of = |version| Capability::find(version).unwrap();
        assert_eq!(of((12, 0)).lacks(&[Wgmma, BulkCopies]), [Wgmma]);
        assert!(of((9, 0)).lacks(&Feature::ALL).is_empty());
        let message = |version, scales| of(version).expect_fp8_product(scales).unwrap_err().to_string();
        assert_eq!(
            message((9, 0), Mx),
            "cuBLASLt has no FP8 products with mx scales on Hopper GPUs of compute capability 9.0; supported scales: per-tensor; per-row; 1x128; \
             128x128; 1x128, transposed 128x128"
        );
        assert!(
            message((8, 0), PerTensor).ends_with("capability 8.0; supported scales: none"),
            "{}",
            message((8, 0), PerTensor)
        );
        of((8, 9)).expect_fp8_product(PerTensor).unwrap();
        let unknown = Capability::find((7, 5)).unwrap_err().to_string();
        assert!(
            unknown.starts_with("GPUs of compute capability 7.5 are not supported; those of 8.0, 8.6"),
            "{unknown}"
        );
    }
}
