//! What a run keeps in memory, and how: the tables `[optimizer]` and `[memory]`.

use super::{RunConfig, auto};
use crate::level::{Formats, Gradients, Level, Masters, Share, States};
use crate::param::{Kept, Purpose};
use crate::recompute::{Recompute, SavedActivations};
use serde::{Deserialize, Serialize};

/// The `[optimizer]` table. What is `None`, written `auto`, is as the level has it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// What is kept in which format: `O0`, `O1`, `O2`, `O3`, `coat` or `bf16`.
    pub level: Level,
    /// Weights that are updated, where the model computes in 16 bits: `float32`, `float16`, `remainder` or `none`.
    #[serde(with = "auto")]
    pub master_weights: Option<Masters>,
    /// Gradients of the blocks' matrices: `float32`, `bfloat16` (where the model computes in that) or `float8`.
    #[serde(with = "auto")]
    pub gradient_dtype: Option<Gradients>,
    /// Moments of AdamW: `float32`, `bfloat16`, `float8` or `coat`.
    #[serde(with = "auto")]
    pub state_dtype: Option<States>,
}

impl OptimizerConfig {
    /// What is kept in which format.
    pub fn formats(&self) -> Formats {
        let Formats { masters, gradients, states } = self.level.formats();
        Formats {
            masters: self.master_weights.unwrap_or(masters),
            gradients: self.gradient_dtype.unwrap_or(gradients),
            states: self.state_dtype.unwrap_or(states),
        }
    }
}

/// The `[memory]` table: what is kept and how, and what is made again when it is needed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MemoryConfig {
    /// What backward computes again: `none`, `norm-swiglu`, `attention` or `full`; `None`, written `auto`, is the cheapest of these that
    /// fits the device. Results are the same bits.
    #[serde(with = "auto")]
    pub recompute: Option<Recompute>,
    /// Whether FP8 codes of weights are kept for the whole step; `auto` is as the optimizer's level has it. Without, each product
    /// casts the weight that it reads.
    #[serde(with = "auto")]
    pub weight_codes: Option<bool>,
    /// How the inputs of norms and SwiGLU are kept for backward: `exact` or `float8`.
    pub saved_activations: SavedActivations,
    /// The share of the blocks, from 0 to 1, whose moments and masters are in the host's memory, and visit the GPU for each update;
    /// `None`, written `auto`, is the least that makes the run fit.
    #[serde(with = "auto")]
    pub offload_optimizer: Option<f64>,
    /// The same of weights, which visit the GPU for each forward and backward of their block, ahead of time; `None`, written `auto`, is
    /// the least that makes the run fit where offloading the optimizer is not enough.
    #[serde(with = "auto")]
    pub offload_parameters: Option<f64>,
    /// Whether the inputs of blocks wait for backward in the host's memory. Only where they are all that is kept: with `recompute` full.
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

impl RunConfig {
    /// Whether FP8 codes of weights are kept for the whole step.
    pub fn weight_codes(&self) -> bool {
        self.memory.weight_codes.unwrap_or(self.optimizer.level.weight_codes())
    }

    /// What a model that is trained so is built for, once [`Settled`](crate::plan::Settled) has chosen what was left open.
    pub fn purpose(&self) -> Purpose {
        Purpose::Train(Kept {
            formats: self.optimizer.formats(),
            weight_codes: self.weight_codes(),
            recompute: self.memory.recompute.expect("`auto` is settled before anything is built"),
            saved_activations: self.memory.saved_activations,
            offload_optimizer: Share::of(self.memory.offload_optimizer.expect("settled as well")),
            offload_parameters: Share::of(self.memory.offload_parameters.expect("settled as well")),
            offload_residuals: self.memory.offload_residuals,
        })
    }
}
