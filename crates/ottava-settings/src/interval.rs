//! How often a run evaluates and saves.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;

/// The spelling of [`Interval::End`] in a file.
const END: &str = "end";

/// The steps from one evaluation or checkpoint to the next. The last step of a run always ends with an evaluation or a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interval {
    /// A number of steps, at least 1.
    Every(u64),
    /// Only the end of the run: `"end"`.
    End,
}

impl Interval {
    /// Whether an evaluation or a checkpoint is due after `step`.
    pub fn is_due(self, step: u64) -> bool {
        match self {
            Interval::Every(steps) => step.is_multiple_of(steps),
            Interval::End => false,
        }
    }
}

impl JsonSchema for Interval {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Interval".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "const": END}]})
    }
}

impl Serialize for Interval {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Interval::Every(steps) => steps.serialize(to),
            Interval::End => END.serialize(to),
        }
    }
}

impl<'de> Deserialize<'de> for Interval {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Interval, D::Error> {
        match toml::Value::deserialize(from)? {
            toml::Value::Integer(steps) if steps > 0 => Ok(Interval::Every(steps as u64)),
            toml::Value::String(word) if word == END => Ok(Interval::End),
            other => Err(D::Error::custom(format!("{other} is no number of steps from 1 up, and not \"{END}\""))),
        }
    }
}
