//! Where in a completion the answer is.

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// The part of a text that is the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Extract {
    /// The whole text.
    Whole,
    /// The contents of the last `\boxed{…}`.
    Boxed,
    /// What follows the last occurrence of a marker in its line.
    After(String),
    /// The contents of the last `<NAME>…</NAME>`.
    Tag(String),
}

impl Extract {
    /// The answer in `text`, without spaces around it, in time linear in `text`.
    pub(crate) fn find<'a>(&self, text: &'a str) -> Option<&'a str> {
        let found = match self {
            Extract::Whole => text,
            Extract::Boxed => boxed(text)?,
            Extract::After(marker) => {
                let (_, after) = text.rsplit_once(marker.as_str())?;
                after.lines().next().unwrap_or_default()
            }
            Extract::Tag(name) => {
                let (before, _) = text.rsplit_once(&format!("</{name}>"))?;
                before.rsplit_once(&format!("<{name}>"))?.1
            }
        };
        Some(found.trim())
    }
}

/// The contents of the last `\boxed{…}`, whose braces match.
fn boxed(text: &str) -> Option<&str> {
    let after = text.rsplit_once("\\boxed")?.1.trim_start().strip_prefix('{')?;
    let (mut depth, mut is_escaped) = (1, false);
    for (at, byte) in after.bytes().enumerate() {
        match byte {
            b'{' if !is_escaped => depth += 1,
            b'}' if !is_escaped => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(&after[..at]);
        }
        is_escaped = byte == b'\\' && !is_escaped;
    }
    None
}

impl TryFrom<String> for Extract {
    type Error = String;

    fn try_from(text: String) -> Result<Extract, String> {
        match text.split_once(':') {
            None if text == "whole" => Ok(Extract::Whole),
            None if text == "boxed" => Ok(Extract::Boxed),
            Some(("after", marker)) if !marker.is_empty() => Ok(Extract::After(marker.into())),
            Some(("tag", name)) if !name.is_empty() => Ok(Extract::Tag(name.into())),
            _ => Err(format!("`{text}` is none of \"whole\", \"boxed\", \"after:MARKER\" and \"tag:NAME\"")),
        }
    }
}

impl From<Extract> for String {
    fn from(extract: Extract) -> String {
        match extract {
            Extract::Whole => "whole".into(),
            Extract::Boxed => "boxed".into(),
            Extract::After(marker) => format!("after:{marker}"),
            Extract::Tag(name) => format!("tag:{name}"),
        }
    }
}

impl JsonSchema for Extract {
    fn schema_name() -> Cow<'static, str> {
        "Extract".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        schemars::json_schema!({ "type": "string", "pattern": "^(whole|boxed|after:.+|tag:.+)$" })
    }
}
