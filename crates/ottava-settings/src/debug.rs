//! The table `[debug]`.

use serde::{Deserialize, Serialize};

/// The `[debug]` table: tensors whose statistics and values a run records.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DebugConfig {
    /// The steps that begin with a record.
    pub debug_steps: Vec<u64>,
    /// Patterns (`*`, `?`) of the names of tensors: `CAST` for what a cast reads, `BLOCK.output`, `BLOCK.grad_input` and `PARAMETER.gradient`.
    pub debug_tensors: Vec<String>,
    /// Whether the tensors are written to files too.
    pub dump_tensors: bool,
}

impl Default for DebugConfig {
    fn default() -> DebugConfig {
        DebugConfig { debug_steps: Vec::new(), debug_tensors: vec!["*".into()], dump_tensors: false }
    }
}

impl DebugConfig {
    /// Whether `step` begins with a record.
    pub fn is_due(&self, step: u64) -> bool {
        self.debug_steps.contains(&step)
    }
}
