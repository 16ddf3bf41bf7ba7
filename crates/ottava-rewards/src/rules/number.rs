//! The reward `number`.

use super::extract::Extract;
use super::gold::golds;
use super::{Rule, score_of};
use crate::math::{Rational, Tolerance, equal_values};
use crate::sample::Sample;
use ottava_common::Result;
use regex::Regex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::LazyLock;

/// 1 if the last number of the answer in the completion equals the right number, else 0. Not scored if the right answer has no number.
///
/// A number has digits with or without separators of thousands, an optional fraction, exponent, denominator and percent sign: -1,234.5, 1.5e3, 3/4,
/// \frac{3}{4}, $5 and 50%. If only one of two numbers has a percent sign, 50% equals 50 and 1/2.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NumberConfig {
    /// The column of the data that holds the right answer, or a list of right answers.
    pub answer: String,
    /// Where in the completion the answer is: "whole", "boxed" (the last \boxed{}), "after:MARKER" (to the end of the line, after the last MARKER, as
    /// in "after:####") or "tag:NAME" (the last `<NAME>…</NAME>`). A completion without it scores 0. The right answer is taken from its column in the
    /// same way, or is the whole column.
    pub extract: Extract,
    /// The largest difference from the right number, relative to the larger of 1 and the right number's absolute value; 0 compares exact fractions.
    pub tolerance: f64,
}

impl Default for NumberConfig {
    fn default() -> NumberConfig {
        NumberConfig { answer: "answer".into(), extract: Extract::Whole, tolerance: 0.0 }
    }
}

impl Rule for NumberConfig {
    fn score(&self, sample: &Sample) -> Result<Option<f64>> {
        let golds = golds(sample, &self.answer)?;
        let last = |text: &str| last_number(self.extract.find(text).unwrap_or(text));
        let golds: Vec<_> = golds.iter().filter_map(|gold| last(gold)).collect();
        if golds.is_empty() {
            return Ok(None);
        }
        let found = self.extract.find(sample.completion).and_then(last_number);
        let is_right = |found: (Rational, bool)| {
            golds.iter().any(|gold| equal_values(found.clone(), gold.clone(), Tolerance(self.tolerance)))
        };
        Ok(score_of(found.is_some_and(is_right)))
    }
}

/// The last number in `text`, and whether a percent sign follows it; `None` without one, or if it is too large.
fn last_number(text: &str) -> Option<(Rational, bool)> {
    static NUMBER: LazyLock<Regex> = LazyLock::new(|| {
        let decimal = r"(?<decimal>(?:\d{1,3}(?:,\d{3})+\b|\d+)(?:\.\d+)?|\.\d+)";
        let fraction = r"\\[dt]?frac\{(?<above>\d+)\}\{(?<below>\d+)\}";
        let pattern = format!(
            r"(?<sign>[-−]?)[$€£]?(?:{fraction}|{decimal}(?:[eE](?<exponent>[+-]?\d{{1,6}})\b)?(?:/(?<divisor>\d+))?)(?<percent>\s?\\?%)?"
        );
        Regex::new(&pattern).expect("a valid pattern")
    });
    let captures = NUMBER.captures_iter(text).last()?;
    let part = |name: &str| captures.name(name).map_or("", |part| part.as_str());
    let has = |name: &str| captures.name(name).is_some();
    let over = |value: Rational, name: &str| value.times(&Rational::decimal(part(name), "", 0)?.inverse()?);
    let value = if has("above") {
        over(Rational::decimal(part("above"), "", 0)?, "below")?
    } else {
        let digits = part("decimal").replace(',', "");
        let (whole, fraction) = digits.split_once('.').unwrap_or((&digits, ""));
        let value = Rational::decimal(whole, fraction, part("exponent").parse().unwrap_or(0))?;
        if has("divisor") { over(value, "divisor")? } else { value }
    };
    // In 3-5 and in x-5, the sign belongs to no number.
    let begin = captures.get(0).map_or(0, |all| all.start());
    let is_negative = !part("sign").is_empty() && !text[..begin].ends_with(char::is_alphanumeric);
    Some((if is_negative { value.negative() } else { value }, has("percent")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_number_is_found() {
        for (text, numerator, denominator, percent) in [
            ("The answer is 42.", 42, 1, false),
            ("1, 2 and 3", 3, 1, false),
            ("-1,234.5 m", -2469, 2, false),
            ("cost: $1,234,567!", 1_234_567, 1, false),
            ("12,34", 34, 1, false),
            ("1,2345", 2345, 1, false),
            (".25", 1, 4, false),
            ("1.5e3", 1500, 1, false),
            ("2E-2", 1, 50, false),
            ("3e", 3, 1, false),
            ("3/4", 3, 4, false),
            ("\\frac{3}{4}", 3, 4, false),
            ("-\\dfrac{6}{8}", -3, 4, false),
            ("50%", 50, 1, true),
            ("12.5\\%", 25, 2, true),
            ("3-5", 5, 1, false),
            ("x = −5", -5, 1, false),
            ("-$5", -5, 1, false),
            ("10.", 10, 1, false),
            ("v1.2.3", 3, 10, false),
        ] {
            let expected = Rational::integer(numerator).times(&Rational::integer(denominator).inverse().unwrap());
            assert_eq!(last_number(text), Some((expected.unwrap(), percent)), "{text}");
        }
        for text in ["", "none", "-", "%", "$", "3/0", "1e999999", &"9".repeat(5000)] {
            assert_eq!(last_number(text), None, "{text}");
        }
    }
}
