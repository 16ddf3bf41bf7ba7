//! The types of tasks.

use serde::Deserialize;

/// What a model computes for the items of a task. The names are the output types of lm-evaluation-harness.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskType {
    /// The log-likelihood of each choice after the prompt.
    MultipleChoice,
    /// The most likely text after the prompt.
    GenerateUntil,
    /// The log-likelihood of a text.
    LoglikelihoodRolling,
}

impl TaskType {
    /// Returns the name in files.
    pub const fn as_str(self) -> &'static str {
        match self {
            TaskType::MultipleChoice => "multiple_choice",
            TaskType::GenerateUntil => "generate_until",
            TaskType::LoglikelihoodRolling => "loglikelihood_rolling",
        }
    }
}
