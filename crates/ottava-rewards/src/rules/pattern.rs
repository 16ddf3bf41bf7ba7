//! The reward `regex`.

use super::{Rule, score_of};
use crate::sample::Sample;
use ottava_common::{Error, Result};
use regex::{Regex, RegexBuilder};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// 1 if the completion matches a regular expression, else 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RegexConfig {
    /// The regular expression, in the syntax of Rust's crate regex: no look-around and no back-references, so that matching takes linear time.
    pub pattern: String,
    /// "whole": the whole completion matches; "search": a part of it does.
    #[serde(default, rename = "match")]
    pub matching: RegexMatch,
    /// Whether the dot matches line ends.
    #[serde(default = "yes")]
    pub dot_matches_new_line: bool,
}

/// What a regular expression has to match.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RegexMatch {
    /// The whole completion.
    #[default]
    Whole,
    /// A part of the completion.
    Search,
}

fn yes() -> bool {
    true
}

impl RegexConfig {
    /// The rule. Errors with [`Error::Config`] if the pattern is none or too large.
    pub(crate) fn rule(&self) -> Result<Pattern> {
        let pattern = match self.matching {
            // Checked alone, so that no bracket of the pattern ends the group.
            RegexMatch::Whole => Regex::new(&self.pattern).map(|_| format!(r"\A(?:{})\z", self.pattern)),
            RegexMatch::Search => Ok(self.pattern.clone()),
        };
        let compile =
            |pattern: String| RegexBuilder::new(&pattern).dot_matches_new_line(self.dot_matches_new_line).build();
        let regex = pattern.and_then(compile);
        regex.map(Pattern).map_err(|error| Error::Config(format!("`pattern` is no regular expression: {error}")))
    }
}

/// The compiled rule.
pub(crate) struct Pattern(Regex);

impl Rule for Pattern {
    fn score(&self, sample: &Sample) -> Result<Option<f64>> {
        Ok(score_of(self.0.is_match(sample.completion)))
    }
}
