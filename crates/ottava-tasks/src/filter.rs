//! The part of a generated text that is compared with the right answer.

use crate::space::is_python_space;
use ottava_common::{Error, Result};
use regex::Regex;
use serde::Deserialize;

/// The `[filter]` table, the filter `regex` of lm-evaluation-harness.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FilterConfig {
    /// The regular expression, in the syntax of Rust's crate regex. Without a group, the whole match is taken; otherwise, the first group that is not
    /// empty.
    pub regex_pattern: String,
    /// Which match is taken: 0 is the first match, -1 the last match.
    #[serde(default)]
    pub group_select: i64,
    /// The text if nothing matches.
    #[serde(default = "invalid")]
    pub fallback: String,
}

fn invalid() -> String {
    "[invalid]".into()
}

/// A filter with its compiled expression.
pub(crate) struct Filter {
    config: FilterConfig,
    regex: Regex,
}

impl Filter {
    /// Compiles the expression. Errors with [`Error::Config`] if it is none.
    pub(crate) fn new(config: &FilterConfig) -> Result<Filter> {
        let regex = Regex::new(&config.regex_pattern)
            .map_err(|error| Error::Config(format!("`filter.regex_pattern` is no regular expression: {error}")))?;
        Ok(Filter { config: config.clone(), regex })
    }

    /// Returns the taken part of `text` without white space at its ends.
    pub(crate) fn apply(&self, text: &str) -> String {
        let matches: Vec<_> = self.regex.captures_iter(text).collect();
        let at = match self.config.group_select {
            from_end @ ..0 => matches.len().checked_sub(from_end.unsigned_abs() as usize),
            from_start => Some(from_start as usize),
        };
        let taken = at.and_then(|at| matches.get(at)).and_then(|found| match found.len() {
            1 => found.get(0),
            2 => found.get(1),
            _ => found.iter().skip(1).flatten().find(|group| !group.is_empty()),
        });
        // A lone group that took part in no match is an empty text, as in Python.
        let is_empty = |at: usize| matches.get(at).is_some_and(|found| found.len() == 2);
        match (taken, at) {
            (Some(part), _) => part.as_str().trim_matches(is_python_space).to_string(),
            (None, Some(at)) if is_empty(at) => String::new(),
            _ => self.config.fallback.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values from `RegexFilter` of lm-evaluation-harness 0.4.13; a match beyond the last one is an error there.
    #[test]
    fn a_match_and_a_group_are_taken() {
        for (pattern, select, text, expected) in [
            (r"\d+", 0, "a 12 b 34", "12"),
            (r"\d+", -1, "a 12 b 34", "34"),
            (r"\d+", -3, "a 12 b 34", "[invalid]"),
            (r"\d+", 2, "a 12 b 34", "[invalid]"),
            (r"answer is(.*)\.", 0, "The answer is 7 . Yes", "7"),
            (r"(-?[$0-9.,]{2,})|(-?[0-9]+)", -1, "12,5 and 7", "7"),
            (r"(a)?b(c)?", 0, "b", "[invalid]"),
            (r"(a)?b", 0, "b", ""),
            (r"x", 0, "b", "[invalid]"),
        ] {
            let config = FilterConfig { regex_pattern: pattern.into(), group_select: select, fallback: invalid() };
            assert_eq!(Filter::new(&config).unwrap().apply(text), expected, "{pattern} {select}");
        }
    }
}
