//! The tables `[optimizer]` and `[memory]`: formats of the optimizer, recomputation and offloading.

use crate::auto;
use ottava_recipe::level::{Formats, Gradients, Level, Masters, States};
use ottava_recipe::recompute::{Recompute, SavedActivations};
use serde::{Deserialize, Serialize};

/// The optimizers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerName {
    /// AdamW.
    #[default]
    Adamw,
    /// Muon for the matrices of the blocks, AdamW for the rest.
    Muon,
    /// Lion.
    Lion,
}

impl OptimizerName {
    /// The spelling in configuration files.
    pub const fn as_str(self) -> &'static str {
        match self {
            OptimizerName::Adamw => "adamw",
            OptimizerName::Muon => "muon",
            OptimizerName::Lion => "lion",
        }
    }
}

/// The `[optimizer]` table. `None`, written `auto`, takes the level's format.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// `adamw`, `muon` or `lion`.
    pub name: OptimizerName,
    /// Formats of master weights, gradients and states together: `O0`, `O1`, `O2`, `O3`, `coat` or `bf16`.
    pub level: Level,
    /// Master weights, where the model computes in 16 bits: `float32`, `float16`, `remainder` or `none`.
    #[serde(with = "auto")]
    pub master_weights: Option<Masters>,
    /// Gradients of the blocks' matrices: `float32`, `bfloat16` (where the model computes in that) or `float8`.
    #[serde(with = "auto")]
    pub gradient_dtype: Option<Gradients>,
    /// Moments of AdamW, momentum of Muon and Lion: `float32`, `bfloat16`, `float8` or `coat`.
    #[serde(with = "auto")]
    pub state_dtype: Option<States>,
}

impl OptimizerConfig {
    /// The formats, with `auto` resolved.
    pub fn formats(&self) -> Formats {
        let Formats { masters, gradients, states } = self.level.formats();
        Formats {
            masters: self.master_weights.unwrap_or(masters),
            gradients: self.gradient_dtype.unwrap_or(gradients),
            states: self.state_dtype.unwrap_or(states),
        }
    }
}

/// The `[memory]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MemoryConfig {
    /// The operands that backward recomputes: `none`, `norm-swiglu`, `attention` or `full`; `None`, written `auto`, is the cheapest policy that fits
    /// the device. Results are the same bits.
    #[serde(with = "auto")]
    pub recompute: Option<Recompute>,
    /// Whether FP8 codes of weights are stored for the whole step; `auto` follows the optimizer's level. Without them, each product casts
    /// its
    /// weight.
    #[serde(with = "auto")]
    pub weight_codes: Option<bool>,
    /// Format of the inputs of norms and SwiGLU that are saved for backward: `exact` or `float8`.
    pub saved_activations: SavedActivations,
    /// Share of the blocks, from 0 to 1, whose optimizer states and master weights are offloaded to the host and fetched for each
    /// update; `None`, written `auto`, is the smallest share that fits.
    #[serde(with = "auto")]
    pub offload_optimizer: Option<f64>,
    /// Share of the blocks whose weights are offloaded to the host and prefetched for forward and backward; `None`, written `auto`, is
    /// the smallest share that fits where offloading the optimizer is not enough. With ZeRO stages 1 to 3, each rank offloads its slices, which
    /// each forward and backward gathers.
    #[serde(with = "auto")]
    pub offload_parameters: Option<f64>,
    /// Whether the inputs of blocks are offloaded to the host between forward and backward. Needs `recompute = "full"`.
    pub offload_residuals: bool,
}

impl Default for MemoryConfig {
    fn default() -> MemoryConfig {
        MemoryConfig {
            recompute: Some(Recompute::None),
            weight_codes: None,
            saved_activations: SavedActivations::default(),
            offload_optimizer: Some(0.0),
            offload_parameters: Some(0.0),
            offload_residuals: false,
        }
    }
}
