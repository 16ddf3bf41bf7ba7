//! The table `[memory]`: recomputation and offloading.

use crate::auto;
use ottava_recipe::recompute::{Recompute, SavedActivations};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The `[memory]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MemoryConfig {
    /// Activations that backward recomputes instead of reading saved ones: "none", "norm-swiglu" (outputs of norms, SwiGLU and attention),
    /// "attention" (also Q, K and V), "full" (everything but each block's input), or "auto" (the fastest of these policies that fits the
    /// device). If saved_activations is "exact", every policy gives the same bits.
    #[serde(with = "auto")]
    #[schemars(with = "auto::Auto<Recompute>")]
    pub recompute: Option<Recompute>,
    /// Whether FP8 codes of weights are kept for the whole step: true, false (each product casts the weight that it reads), or "auto" (the
    /// default of optimizer.storage; with adapters, true).
    #[serde(with = "auto")]
    #[schemars(with = "auto::Auto<bool>")]
    pub weight_codes: Option<bool>,
    /// How inputs of norms and SwiGLU are saved for backward: "exact", or "float8" (E4M3 with a power of two per 16 values). "float8" takes
    /// about half the memory and changes gradients slightly.
    pub saved_activations: SavedActivations,
    /// Fraction of the blocks, from the last one, that keep moments and master weights in host memory: 0 to 1, or "auto" (the smallest
    /// fraction that fits). Offloading changes no bit of the results. The offload settings have no effect on a CPU.
    #[serde(with = "auto")]
    #[schemars(with = "auto::Auto<f64>")]
    pub offload_optimizer: Option<f64>,
    /// Share of the blocks whose weights are offloaded, and prefetched one block ahead: 0 to 1, or "auto" (the smallest share that fits, if
    /// offloading the optimizer is not enough). Each product casts the offloaded weights that it reads. With parallel.zero 1 to 3, each
    /// rank offloads its slices, as FP8 codes if ranks gather codes, and each forward and backward gathers the slices.
    #[serde(with = "auto")]
    #[schemars(with = "auto::Auto<f64>")]
    pub offload_parameters: Option<f64>,
    /// Whether the inputs of blocks are offloaded between forward and backward. Needs recompute = "full".
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
