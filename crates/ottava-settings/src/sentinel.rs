//! The table `[sentinel]`.

use ottava_sentinel::{Bounds, MetricBounds, SentinelPolicy};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The `[sentinel]` table: comparisons of the recipe with BF16 during a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SentinelConfig {
    /// Steps between comparisons of the FP8 recipe with BF16, beginning with the first step; 0 never compares. A comparison runs forward and backward
    /// in both precisions with the same sequences and weights, without an update. Results are written to sentinel.jsonl and to TensorBoard.
    pub sentinel_steps: u64,
    /// Number of sequences per data-parallel rank that a comparison reads, from the step's first micro-batch.
    pub sentinel_sequences: usize,
    /// What happens after a finding: "report" (a warning), "pause" (save and end with exit code 76), "demote" (the linears with findings
    /// compute in BF16 for a while) or "bf16" (all linears compute in BF16 for a while).
    pub sentinel_policy: SentinelPolicy,
    /// Number of steps for which "demote" and "bf16" hold. Each repetition holds twice as long as the one before.
    pub sentinel_hold_steps: u64,
    /// The difference between the losses in FP8 and BF16, in nats per token, above which a comparison is a finding.
    pub sentinel_loss_gap: f64,
    /// The cosine between the gradients in FP8 and BF16 below which a comparison is a finding.
    pub sentinel_cosine: f64,
    /// A metric that each evaluation computes both in FP8 and in BF16, with the same weights, such as eval_loss or eval_words_acc of the task words;
    /// "" computes none. "demote" and "bf16" then compute all linears in BF16, until the difference is at most sentinel_metric_return.
    pub sentinel_metric: String,
    /// How much worse sentinel_metric may be in FP8 than in BF16; a larger difference is a finding.
    pub sentinel_metric_gap: f64,
    /// How much worse sentinel_metric may be in FP8 for a return to FP8, at most sentinel_metric_gap.
    pub sentinel_metric_return: f64,
    /// Steps between checks for unreliable hardware, beginning with the first step; 0 never checks. A check computes the first micro-batch
    /// of a step twice, and the run ends with an error if any bit differs. On a GPU, backward is checked only with precision.deterministic.
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
            sentinel_metric: String::new(),
            sentinel_metric_gap: 0.02,
            sentinel_metric_return: 0.01,
            repeat_steps: 0,
        }
    }
}

impl SentinelConfig {
    /// Whether a comparison precedes `step`.
    pub fn is_due(&self, step: u64) -> bool {
        self.sentinel_steps > 0 && (step - 1).is_multiple_of(self.sentinel_steps)
    }

    /// Whether a check for silent data corruption precedes `step`.
    pub fn repeats(&self, step: u64) -> bool {
        self.repeat_steps > 0 && (step - 1).is_multiple_of(self.repeat_steps)
    }

    /// Returns the step of the last comparison that is not after `step`. If the run never compares, returns `step`.
    pub fn check_before(&self, step: u64) -> u64 {
        match self.sentinel_steps {
            0 => step,
            steps => step - step.saturating_sub(1) % steps,
        }
    }

    /// Whether evaluations compute a metric in FP8 and in BF16.
    pub fn compares_metric(&self) -> bool {
        !self.sentinel_metric.is_empty()
    }

    /// Returns the bounds of the metric of evaluations.
    pub fn metric_bounds(&self) -> MetricBounds {
        MetricBounds { gap: self.sentinel_metric_gap, to_return: self.sentinel_metric_return }
    }

    /// Returns the bounds beyond which a comparison is a finding.
    pub fn bounds(&self) -> Bounds {
        Bounds { loss_gap: self.sentinel_loss_gap, cosine: self.sentinel_cosine }
    }
}
