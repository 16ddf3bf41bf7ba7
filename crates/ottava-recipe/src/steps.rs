//! Ranges of optimizer steps, in the syntax of configuration files.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Steps, as `100..200` or `1..50, 900..1000`: each range holds its first number and not its last. Steps count from 1.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
pub struct Steps(Vec<Range<u64>>);

impl Steps {
    /// Returns whether `step` is in one of the ranges.
    pub fn contains(&self, step: u64) -> bool {
        self.0.iter().any(|range| range.contains(&step))
    }

    /// Returns whether the list of ranges is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromStr for Steps {
    type Err = String;

    fn from_str(text: &str) -> Result<Steps, String> {
        let range = |part: &str| {
            let (start, end) = part.split_once("..")?;
            let (start, end) = (start.trim().parse().ok()?, end.trim().parse().ok()?);
            (start < end).then_some(start..end)
        };
        let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
        let ranges = parts.map(|part| {
            range(part).ok_or_else(|| {
                format!("`{part}` is no range of steps; write \"100..200\" for the steps 100 to 199, and commas between several")
            })
        });
        Ok(Steps(ranges.collect::<Result<_, _>>()?))
    }
}

impl fmt::Display for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges = self.0.iter().map(|range| format!("{}..{}", range.start, range.end));
        f.write_str(&ranges.collect::<Vec<_>>().join(", "))
    }
}

impl TryFrom<String> for Steps {
    type Error = String;

    fn try_from(text: String) -> Result<Steps, String> {
        text.parse()
    }
}

impl From<Steps> for String {
    fn from(steps: Steps) -> String {
        steps.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_and_written() {
        let steps: Steps = "1..3, 10..11".parse().unwrap();
        assert_eq!((0..13).filter(|&step| steps.contains(step)).collect::<Vec<_>>(), [1, 2, 10]);
        assert_eq!(steps.to_string().parse::<Steps>().unwrap(), steps);
        assert!("".parse::<Steps>().unwrap().is_empty());
        for wrong in ["5", "5..", "..5", "7..7", "9..7", "a..b", "1..2..3"] {
            assert!(wrong.parse::<Steps>().unwrap_err().contains("is no range of steps"), "{wrong}");
        }
    }
}
