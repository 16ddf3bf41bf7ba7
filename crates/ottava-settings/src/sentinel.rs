//! The table `[sentinel]`.

use ottava_sentinel::{Bounds, SentinelPolicy};
use serde::{Deserialize, Serialize};

/// The `[sentinel]` table: comparisons of the recipe with BF16 during a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SentinelConfig {
    /// Steps from one comparison to the next, beginning with the first step; 0 makes none.
    pub sentinel_steps: u64,
    /// Sequences of each data-parallel rank that a comparison reads, of the step's first micro-batch.
    pub sentinel_sequences: usize,
    /// What happens after a finding: `report`, `pause`, `demote` or `bf16`.
    pub sentinel_policy: SentinelPolicy,
    /// Steps for which `demote` and `bf16` hold; each time twice as long as the one before.
    pub sentinel_hold_steps: u64,
    /// The difference of the losses, in nats per token, beyond which a comparison is a finding.
    pub sentinel_loss_gap: f64,
    /// The cosine between gradients below which a comparison is a finding.
    pub sentinel_cosine: f64,
    /// Steps from one check for silent data corruption to the next, beginning with the first step: a micro-batch is computed twice, and the
    /// bits are compared; 0 makes none.
    pub repeat_steps: u64,
}

impl Default for SentinelConfig {
    fn default() -> SentinelConfig {
        SentinelConfig {
            sentinel_steps: 0,
            sentinel_sequences: 1,
            sentinel_policy: SentinelPolicy::Report,
            sentinel_hold_steps: 1000,
            sentinel_loss_gap: 0.05,
            sentinel_cosine: 0.8,
            repeat_steps: 0,
        }
    }
}

impl SentinelConfig {
    /// Whether `step` begins with a comparison.
    pub fn is_due(&self, step: u64) -> bool {
        self.sentinel_steps > 0 && (step - 1).is_multiple_of(self.sentinel_steps)
    }

    /// Whether `step` begins with a check for silent data corruption.
    pub fn repeats(&self, step: u64) -> bool {
        self.repeat_steps > 0 && (step - 1).is_multiple_of(self.repeat_steps)
    }

    /// The step of the last comparison before or in `step`; `step` itself if there are none.
    pub fn check_before(&self, step: u64) -> u64 {
        match self.sentinel_steps {
            0 => step,
            steps => step - step.saturating_sub(1) % steps,
        }
    }

    /// The bounds of findings.
    pub fn bounds(&self) -> Bounds {
        Bounds { loss_gap: self.sentinel_loss_gap, cosine: self.sentinel_cosine }
    }
}
