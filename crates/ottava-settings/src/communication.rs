//! The table `[parallel.communication]`: formats in which ranks send, and how long they wait.

use crate::auto;
use ottava_parallel::{ReduceFormat, SentActivations};
use ottava_recipe::storage::Gradients;
use ottava_tensor::comm::Limits;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The maximum timeout, thirty days. Such a timeout is never reached.
const MAX_TIMEOUT: u64 = 30 * 86_400;

/// The `[parallel.communication]` table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CommunicationConfig {
    /// Type in which ranks send gradients of matrices: "auto" is the type of `optimizer.gradient_dtype`. "float8" sends E4M3 codes with one scale per
    /// 128 values, which take half the bytes of bfloat16. The receiver adds the dequantized values in float32. The metric `reduce_error` is the
    /// relative error of these casts.
    #[serde(with = "auto")]
    #[schemars(with = "auto::Auto<Gradients>")]
    pub reduce_dtype: Option<Gradients>,
    /// Type in which pipeline ranks send activations and their gradients to each other, and in which tensor- and expert-parallel ranks send partial
    /// sums. "auto" is the compute type. "float8" sends E4M3 codes with one scale per 128 values, which take half the bytes of bfloat16.
    pub activation_dtype: SentActivations,
    /// Whether each rank adds the cast error of the sent gradients to the gradients that it sends next. Needs `reduce_dtype = "float8"`. The errors
    /// take two bytes per weight, and start at zero when a run resumes.
    pub error_feedback: bool,
    /// Seconds within which all ranks must join.
    pub join_timeout: u64,
    /// Seconds without any message from a rank's process, not even a heartbeat, after which the rank counts as lost.
    pub silence_timeout: u64,
    /// Seconds that ranks wait in a collective for a live rank before the job ends. Progress in reading, tokenizing, loading and saving
    /// restarts this limit. The job also ends if a process waits longer than this for its GPU.
    pub collective_timeout: u64,
}

impl Default for CommunicationConfig {
    fn default() -> CommunicationConfig {
        let limits = Limits::default();
        CommunicationConfig {
            reduce_dtype: None,
            activation_dtype: SentActivations::default(),
            error_feedback: false,
            join_timeout: limits.join.as_secs(),
            silence_timeout: limits.silence.as_secs(),
            collective_timeout: limits.collective.as_secs(),
        }
    }
}

impl CommunicationConfig {
    /// Returns the time limits of ranks that wait for each other.
    pub fn limits(&self) -> Limits {
        let [join, silence, collective] =
            [self.join_timeout, self.silence_timeout, self.collective_timeout].map(Duration::from_secs);
        Limits { join, silence, collective }
    }

    /// Returns the format in which gradients are sent if they are stored as `gradients`.
    pub fn reduction(&self, gradients: Gradients) -> ReduceFormat {
        match self.reduce_dtype.unwrap_or(gradients) {
            Gradients::Float8 => ReduceFormat::Float8 { feedback: self.error_feedback },
            Gradients::Float32 | Gradients::Bfloat16 => ReduceFormat::Stored,
        }
    }

    fn activation_problem(&self, scales_loss: bool, is_divided: bool) -> Option<String> {
        if self.activation_dtype == SentActivations::Auto {
            return None;
        }
        if !is_divided {
            return Some(
                "`parallel.communication.activation_dtype` is \"float8\", but `parallel.tensor`, `pipeline` and `expert` are all 1, so it has no effect; remove it".into(),
            );
        }
        scales_loss.then(|| {
            "`parallel.communication.activation_dtype` is \"float8\", which supports only BF16 and F32 activations, but recipe fp16 computes in F16; remove it, or choose another recipe".into()
        })
    }

    /// Returns the first conflict of settings, or `None`. `gradients` is the format of stored gradients; `sends_activations` says whether ranks send
    /// each other activations.
    pub(super) fn problem(&self, gradients: Gradients, scales_loss: bool, sends_activations: bool) -> Option<String> {
        let timeouts = [
            ("join_timeout", self.join_timeout),
            ("silence_timeout", self.silence_timeout),
            ("collective_timeout", self.collective_timeout),
        ];
        if let Some((key, seconds)) = timeouts.into_iter().find(|(_, seconds)| !(1..=MAX_TIMEOUT).contains(seconds)) {
            return Some(format!("`parallel.communication.{key}` is {seconds}; set it to 1 to {MAX_TIMEOUT} seconds"));
        }
        let sent = self.reduce_dtype.unwrap_or(gradients);
        if sent != gradients && sent != Gradients::Float8 {
            return Some(format!(
                "`parallel.communication.reduce_dtype` is {}, and gradients are {}; set `optimizer.gradient_dtype`, or `parallel.communication.reduce_dtype` to \"auto\" or \"float8\"",
                sent.as_str(),
                gradients.as_str()
            ));
        }
        if let Some(problem) = self.activation_problem(scales_loss, sends_activations) {
            return Some(problem);
        }
        match (self.error_feedback, sent) {
            (true, Gradients::Float32 | Gradients::Bfloat16) => Some(
                "`parallel.communication.error_feedback` is true, but only gradients that are sent as float8 lose something; set `parallel.communication.reduce_dtype = \"float8\"`".into(),
            ),
            (true, Gradients::Float8) if scales_loss => Some(
                "`parallel.communication.error_feedback` is true, and the loss scale of recipe fp16 changes between the steps that it connects; set it to false".into(),
            ),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activations_are_sent_as_codes_only_where_ranks_send_them() {
        let of = |is_divided, scales_loss| {
            let config = CommunicationConfig { activation_dtype: SentActivations::Float8, ..Default::default() };
            config.problem(Gradients::Bfloat16, scales_loss, is_divided)
        };
        assert_eq!(of(true, false), None);
        assert!(of(false, false).unwrap().contains("it has no effect"));
        assert!(of(true, true).unwrap().contains("recipe fp16"));
    }

    #[test]
    fn formats_on_the_way_are_those_that_were_asked_for() {
        let of =
            |reduce_dtype, error_feedback| CommunicationConfig { reduce_dtype, error_feedback, ..Default::default() };
        let coded = |feedback| ReduceFormat::Float8 { feedback };
        assert_eq!(of(None, false).reduction(Gradients::Bfloat16), ReduceFormat::Stored);
        assert_eq!(of(None, true).reduction(Gradients::Float8), coded(true));
        assert_eq!(of(Some(Gradients::Float8), false).reduction(Gradients::Float32), coded(false));
        let problem = |config: CommunicationConfig, gradients, scales| {
            config.problem(gradients, scales, false).unwrap_or_default()
        };
        assert_eq!(problem(of(Some(Gradients::Float8), true), Gradients::Float32, false), "");
        let other = problem(of(Some(Gradients::Bfloat16), false), Gradients::Float32, false);
        assert!(
            other.starts_with("`parallel.communication.reduce_dtype` is bfloat16, and gradients are float32;"),
            "{other}"
        );
        assert!(problem(of(None, true), Gradients::Float32, false).contains("reduce_dtype = \"float8\""));
        assert!(problem(of(None, true), Gradients::Float8, true).contains("loss scale"));
    }
}
