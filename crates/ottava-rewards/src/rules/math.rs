//! The reward `math`.

use super::extract::Extract;
use super::gold::golds;
use super::{Rule, score_of};
use crate::math::{Answer, Tolerance, Units, parse, tokens};
use crate::sample::Sample;
use ottava_common::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// 1 if the answer in the completion is mathematically equal to the right answer, else 0. Not scored if the right answer is no number, tuple, interval
/// or set of the grammar in docs/rewards.md, and the completion's answer is another text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MathConfig {
    /// The column of the data that holds the right answer, or a list of right answers.
    pub answer: String,
    /// Where in the completion the answer is: "boxed" (the last \boxed{}), "whole", "after:MARKER" (to the end of the line, after the last MARKER) or
    /// "tag:NAME" (the last `<NAME>…</NAME>`). A completion without it scores 0. The right answer is taken from its column in the same way, or is
    /// the whole column.
    pub extract: Extract,
    /// The largest difference from a right number, relative to the larger of 1 and the right number's absolute value; 0 compares exactly.
    pub tolerance: f64,
    /// Words after a number that are dropped, in addition to the list in docs/rewards.md.
    pub units: Vec<String>,
}

impl Default for MathConfig {
    fn default() -> MathConfig {
        MathConfig { answer: "answer".into(), extract: Extract::Boxed, tolerance: 0.0, units: Vec::new() }
    }
}

impl MathConfig {
    fn parse(&self, text: &str) -> Option<Answer> {
        parse(&tokens(text)?, &Units(&self.units))
    }

    /// Whether `found` equals `gold`; `None` if that is not decided.
    fn equals(&self, found: &str, gold: &str) -> Option<bool> {
        let is_same_text = tokens(found).is_some_and(|found| tokens(gold) == Some(found));
        match self.parse(gold) {
            _ if is_same_text => Some(true),
            Some(gold) => Some(self.parse(found).is_some_and(|found| found.equals(&gold, Tolerance(self.tolerance)))),
            None => None,
        }
    }
}

impl Rule for MathConfig {
    fn score(&self, sample: &Sample) -> Result<Option<f64>> {
        let golds = golds(sample, &self.answer)?;
        let golds = golds.iter().map(|gold| self.extract.find(gold).unwrap_or(gold));
        let Some(found) = self.extract.find(sample.completion) else { return Ok(score_of(false)) };
        let decisions: Vec<_> = golds.map(|gold| self.equals(found, gold)).collect();
        Ok(match decisions.contains(&Some(true)) {
            false if decisions.contains(&None) => None,
            is_right => score_of(is_right),
        })
    }
}
