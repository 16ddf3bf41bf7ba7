//! The table `[lora]`.

use crate::lora::{Lora, Targets};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The `[lora]` table: adapters beside the linears of a frozen model, as PEFT's `LoraConfig`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoraConfig {
    /// Rank of the adapters; 0 trains all weights instead.
    pub r: usize,
    /// The adapters' products are multiplied by `lora_alpha / r`.
    pub lora_alpha: f64,
    /// The linears that have adapters: `all-linear`, or a list of names.
    pub target_modules: Targets,
    /// Dropout before adapters: 0.
    pub lora_dropout: f64,
    /// Whether the factor is `lora_alpha / sqrt(r)`.
    pub use_rslora: bool,
    /// Whether adapters also have a magnitude for each output.
    pub use_dora: bool,
    /// A folder of PEFT whose adapters the run starts from; empty for new ones.
    pub init_from: PathBuf,
}

impl Default for LoraConfig {
    fn default() -> LoraConfig {
        LoraConfig {
            r: 0,
            lora_alpha: 16.0,
            target_modules: Targets::AllLinear,
            lora_dropout: 0.0,
            use_rslora: false,
            use_dora: false,
            init_from: PathBuf::new(),
        }
    }
}

impl LoraConfig {
    /// The adapters; `None` where all weights are trained.
    pub fn adapters(&self) -> Option<Lora> {
        let LoraConfig { r, lora_alpha: alpha, use_rslora, use_dora, .. } = *self;
        (r > 0).then(|| Lora { r, alpha, use_rslora, use_dora, targets: self.target_modules.clone() })
    }
}
