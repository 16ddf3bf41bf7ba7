//! The comparison of a text with a right answer.

use ottava_common::{Error, Result};
use regex::Regex;
use serde::Deserialize;

/// The `[exact_match]` table.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ExactMatchConfig {
    /// Whether upper and lower case are equal.
    pub ignore_case: bool,
    /// Whether ASCII punctuation is removed.
    pub ignore_punctuation: bool,
    /// Whether the digits 0 to 9 are removed.
    pub ignore_numbers: bool,
    /// Regular expressions whose matches are removed, in the syntax of Rust's crate regex.
    pub regexes_to_ignore: Vec<String>,
}

/// A comparison with compiled expressions.
pub(crate) struct ExactMatch {
    config: ExactMatchConfig,
    ignored: Vec<Regex>,
}

impl ExactMatch {
    /// Compiles the expressions. Errors with [`Error::Config`] for a text that is none.
    pub(crate) fn new(config: &ExactMatchConfig) -> Result<ExactMatch> {
        let compile = |pattern: &String| {
            Regex::new(pattern).map_err(|error| {
                Error::Config(format!("`exact_match.regexes_to_ignore`: {pattern:?} is no regular expression: {error}"))
            })
        };
        Ok(ExactMatch {
            config: config.clone(),
            ignored: config.regexes_to_ignore.iter().map(compile).collect::<Result<_>>()?,
        })
    }

    /// Whether `text` equals `answer`.
    pub(crate) fn holds(&self, text: &str, answer: &str) -> bool {
        self.compared(text) == self.compared(answer)
    }

    /// Returns the part of a text that is compared.
    fn compared(&self, text: &str) -> String {
        let ExactMatchConfig { ignore_case, ignore_punctuation, ignore_numbers, .. } = self.config;
        let mut text = text.to_string();
        for regex in &self.ignored {
            text = regex.replace_all(&text, "").into_owned();
        }
        if ignore_case {
            text = text.to_lowercase();
        }
        let is_ignored =
            |c: char| ignore_punctuation && c.is_ascii_punctuation() || ignore_numbers && c.is_ascii_digit();
        text.retain(|c| !is_ignored(c));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_option_ignores_its_part() {
        let of = |config: ExactMatchConfig, text: &str| ExactMatch::new(&config).unwrap().holds(text, "Ab 1");
        let none = ExactMatchConfig::default();
        assert!(of(none.clone(), "Ab 1") && !of(none.clone(), "Ab 1 "));
        assert!(of(ExactMatchConfig { ignore_case: true, ..none.clone() }, "aB 1"));
        assert!(of(ExactMatchConfig { ignore_punctuation: true, ..none.clone() }, "A.b [1]"));
        assert!(of(ExactMatchConfig { ignore_numbers: true, ..none.clone() }, "Ab 22"));
        let ignored = ExactMatchConfig { regexes_to_ignore: vec!["x+".into(), r"\s".into()], ..none.clone() };
        assert!(of(ignored.clone(), "xxA b1x") && !of(ignored, "Ab 2"));
        let wrong = ExactMatchConfig { regexes_to_ignore: vec!["(".into()], ..none };
        let error = ExactMatch::new(&wrong).err().unwrap().to_string();
        assert!(error.contains("`exact_match.regexes_to_ignore`: \"(\" is no regular expression"), "{error}");
    }
}
