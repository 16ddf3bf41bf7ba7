//! The reward `exact`.

use super::extract::Extract;
use super::gold::golds;
use super::{Rule, score_of};
use crate::sample::Sample;
use ottava_common::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// 1 if the answer in the completion is the right answer, letter by letter, else 0. Spaces around both never count.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ExactConfig {
    /// The column of the data that holds the right answer, or a list of right answers.
    pub answer: String,
    /// Where in the completion the answer is: "whole", "boxed" (the last \boxed{}), "after:MARKER" (to the end of the line, after the last MARKER)
    /// or "tag:NAME" (the last `<NAME>…</NAME>`). A completion without it scores 0. The right answer is taken from its column in the same way, or is
    /// the whole column.
    pub extract: Extract,
    /// Whether capitals count as small letters.
    pub ignore_case: bool,
    /// Whether any run of spaces and line ends counts as one space.
    pub ignore_whitespace: bool,
    /// Whether signs other than letters, digits and spaces are dropped.
    pub ignore_punctuation: bool,
}

impl Default for ExactConfig {
    fn default() -> ExactConfig {
        ExactConfig {
            answer: "answer".into(),
            extract: Extract::Whole,
            ignore_case: false,
            ignore_whitespace: false,
            ignore_punctuation: false,
        }
    }
}

impl ExactConfig {
    fn normal(&self, text: &str) -> String {
        let mut text = text.to_string();
        if self.ignore_case {
            text = text.to_lowercase();
        }
        if self.ignore_punctuation {
            text.retain(|c| c.is_alphanumeric() || c.is_whitespace());
        }
        if self.ignore_whitespace {
            text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        }
        text.trim().to_string()
    }
}

impl Rule for ExactConfig {
    fn score(&self, sample: &Sample) -> Result<Option<f64>> {
        let golds = golds(sample, &self.answer)?;
        let Some(found) = self.extract.find(sample.completion).map(|found| self.normal(found)) else {
            return Ok(score_of(false));
        };
        Ok(score_of(golds.iter().any(|gold| self.normal(self.extract.find(gold).unwrap_or(gold)) == found)))
    }
}
