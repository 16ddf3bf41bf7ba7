//! The table `[debug]`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The `[debug]` table: tensors whose statistics and values a run records.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DebugConfig {
    /// Steps before which statistics of tensors are written to tensors.jsonl: mean, standard deviation, norms, amax, mean squared error of the cast,
    /// dynamic range and a histogram of exponents. The statistics come from an additional forward and backward of the first
    /// sentinel.sentinel_sequences sequences in the step's first micro-batch.
    pub debug_steps: Vec<u64>,
    /// Patterns (*, ?) for names of tensors: "CAST" (the input of a cast, such as "*.down_proj.input"), "BLOCK.output", "BLOCK.grad_input"
    /// (such as "model.layers.0.grad_input") and "PARAMETER.gradient".
    pub debug_tensors: Vec<String>,
    /// Also write the tensors to dumps/step-STEP.safetensors. `ottava inspect --what-if` reads this file to compute the cast errors of
    /// other formats.
    pub dump_tensors: bool,
}

impl Default for DebugConfig {
    fn default() -> DebugConfig {
        DebugConfig { debug_steps: Vec::new(), debug_tensors: vec!["*".into()], dump_tensors: false }
    }
}

impl DebugConfig {
    /// Whether statistics of tensors are recorded before `step`.
    pub fn is_due(&self, step: u64) -> bool {
        self.debug_steps.contains(&step)
    }
}
