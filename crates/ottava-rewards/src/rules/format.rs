//! The reward `format`.

use super::{Rule, score_of};
use crate::sample::Sample;
use ottava_common::{Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// 1 if the completion consists of tags in their order, such as `<think>…</think><answer>…</answer>`, else 0. Each opening and closing tag must be
/// there exactly once, and only spaces and line ends may be before, between and after the tags.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FormatConfig {
    /// The names of the tags.
    pub tags: Vec<String>,
    /// Whether the prompt ends with the first opening tag, so that the completion begins inside of it.
    pub first_tag_in_prompt: bool,
}

impl Default for FormatConfig {
    fn default() -> FormatConfig {
        FormatConfig { tags: vec!["think".into(), "answer".into()], first_tag_in_prompt: false }
    }
}

impl FormatConfig {
    /// The rule. Errors with [`Error::Config`] without tags, and with a tag of the same name as another.
    pub(crate) fn rule(&self) -> Result<FormatConfig> {
        let is_repeated = |(at, tag): (usize, &String)| tag.is_empty() || self.tags[..at].contains(tag);
        match self.tags.is_empty() || self.tags.iter().enumerate().any(is_repeated) {
            true => Err(Error::Config("`tags` has to name one tag or several different ones".into())),
            false => Ok(self.clone()),
        }
    }

    fn matches(&self, completion: &str) -> bool {
        let mut rest = completion;
        for (number, tag) in self.tags.iter().enumerate() {
            let (open, close) = (format!("<{tag}>"), format!("</{tag}>"));
            if number > 0 || !self.first_tag_in_prompt {
                let Some(after) = rest.trim_start().strip_prefix(&open) else { return false };
                rest = after;
            }
            let Some((inside, after)) = rest.split_once(&close) else { return false };
            if self.tags.iter().any(|tag| inside.contains(&format!("<{tag}>")) || inside.contains(&format!("</{tag}>")))
            {
                return false;
            }
            rest = after;
        }
        rest.trim().is_empty()
    }
}

impl Rule for FormatConfig {
    fn score(&self, sample: &Sample) -> Result<Option<f64>> {
        Ok(score_of(self.matches(sample.completion)))
    }
}
