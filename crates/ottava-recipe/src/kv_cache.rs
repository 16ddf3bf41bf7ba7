//! The format of the KV cache.

use ottava_common::error::{Error, Result};
use ottava_tensor::DType;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The format of the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum KvCacheDtype {
    /// The model's compute type.
    #[default]
    Auto,
    /// BF16.
    Bfloat16,
    /// E4M3 with one F32 scale per token and head: 1.03 bytes per value if heads have 128 channels.
    Fp8,
}

impl KvCacheDtype {
    /// Returns the type of the cache for a model that computes in `compute`.
    pub fn resolve(self, compute: DType) -> DType {
        match self {
            KvCacheDtype::Auto => compute,
            KvCacheDtype::Bfloat16 => DType::BF16,
            KvCacheDtype::Fp8 => DType::E4M3,
        }
    }
}

impl std::str::FromStr for KvCacheDtype {
    type Err = Error;
    fn from_str(text: &str) -> Result<KvCacheDtype> {
        match text {
            "auto" => Ok(KvCacheDtype::Auto),
            "bfloat16" => Ok(KvCacheDtype::Bfloat16),
            "fp8" => Ok(KvCacheDtype::Fp8),
            _ => {
                Err(Error::Config(format!("there is no KV cache of type `{text}`; the types are auto, bfloat16, fp8")))
            }
        }
    }
}
