//! The table `[parallel]`: what ranks divide, and what they send.

use super::auto;
use crate::level::Gradients;
use crate::parallel::{ReduceFormat, Zero};
use serde::{Deserialize, Serialize};

/// The `[parallel]` table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ParallelConfig {
    /// Ranks that share the rows of a step; 0 means all that were started.
    pub data: usize,
    /// ZeRO stage: 0 divides nothing among ranks, 1 master weights and optimizer states, 2 also the gradients of each micro-batch,
    /// 3 also weights.
    pub zero: Zero,
    /// Type in which ranks send gradients of matrices: that of `optimizer.gradient_dtype`, or `float8`, which halves the bytes of
    /// `bfloat16`; `None`, written `auto`, is the former.
    #[serde(with = "auto")]
    pub reduce_dtype: Option<Gradients>,
    /// Whether each rank adds what the cast to `float8` has lost to the gradients that it sends next. Takes two bytes per weight; starts
    /// from zero in a resumed run.
    pub error_feedback: bool,
}

impl ParallelConfig {
    /// How gradients travel that are stored as `gradients`.
    pub fn reduction(&self, gradients: Gradients) -> ReduceFormat {
        match self.reduce_dtype.unwrap_or(gradients) {
            Gradients::Float8 => ReduceFormat::Float8 { feedback: self.error_feedback },
            Gradients::Float32 | Gradients::Bfloat16 => ReduceFormat::Stored,
        }
    }

    /// What does not go together, with gradients that are stored as `gradients`; `None` if all does.
    pub(super) fn problem(&self, gradients: Gradients, scales_loss: bool) -> Option<String> {
        let sent = self.reduce_dtype.unwrap_or(gradients);
        if sent != gradients && sent != Gradients::Float8 {
            return Some(format!(
                "`parallel.reduce_dtype` is {}, and gradients are {}; set `optimizer.gradient_dtype`, or `parallel.reduce_dtype` to \"auto\" or \"float8\"",
                sent.as_str(),
                gradients.as_str()
            ));
        }
        match (self.error_feedback, sent) {
            (true, Gradients::Float32 | Gradients::Bfloat16) => Some(
                "`parallel.error_feedback` is true, but only gradients that are sent as float8 lose something; set `parallel.reduce_dtype = \"float8\"`".into(),
            ),
            (true, Gradients::Float8) if scales_loss => Some(
                "`parallel.error_feedback` is true, and the loss scale of recipe fp16 changes between the steps that it connects; set it to false".into(),
            ),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_on_the_way_are_those_that_were_asked_for() {
        let of = |reduce_dtype, error_feedback| ParallelConfig { reduce_dtype, error_feedback, ..Default::default() };
        let coded = |feedback| ReduceFormat::Float8 { feedback };
        assert_eq!(of(None, false).reduction(Gradients::Bfloat16), ReduceFormat::Stored);
        assert_eq!(of(None, true).reduction(Gradients::Float8), coded(true));
        assert_eq!(of(Some(Gradients::Float8), false).reduction(Gradients::Float32), coded(false));
        let problem = |config: ParallelConfig, gradients, scales| config.problem(gradients, scales).unwrap_or_default();
        assert_eq!(problem(of(Some(Gradients::Float8), true), Gradients::Float32, false), "");
        let other = problem(of(Some(Gradients::Bfloat16), false), Gradients::Float32, false);
        assert!(other.starts_with("`parallel.reduce_dtype` is bfloat16, and gradients are float32;"), "{other}");
        assert!(problem(of(None, true), Gradients::Float32, false).contains("reduce_dtype = \"float8\""));
        assert!(problem(of(None, true), Gradients::Float8, true).contains("loss scale"));
    }
}
