//! Finds which fields of messages templates read, and converts messages to the form that they read.

use std::collections::BTreeSet;

use ottava_jinja::json_text;
use serde_json::{Map, Value};

/// The fields that may hold the thinking of an answer.
const THINKING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// What content becomes if it is a list of parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Parts {
    /// It stays a list.
    Listed,
    /// It becomes one text.
    Joined,
    /// It becomes one text, and missing content becomes `null`, which some templates test.
    JoinedOrNull,
}

/// The fields of messages that templates read, found in the source of the templates.
pub(super) struct Reads {
    /// All words of the sources.
    words: BTreeSet<String>,
    /// The words of [`THINKING`] that the templates read as fields, and not only as variables.
    thinking: Vec<&'static str>,
    /// Whether the templates write whole messages with all fields.
    whole: bool,
    /// Whether the templates write the arguments of calls as JSON. Then arguments must be objects, as users of transformers pass them.
    parses_arguments: bool,
    /// Whether the templates accept content that is a list of parts.
    takes_parts: bool,
}

impl Reads {
    /// Analyses templates with these sources. `takes_parts` says whether they read lists of parts.
    pub(super) fn of<'a>(sources: impl Iterator<Item = &'a str>, takes_parts: bool) -> Reads {
        let (words, thinking) = (BTreeSet::new(), Vec::new());
        let mut reads = Reads { words, thinking, whole: false, parses_arguments: false, takes_parts };
        for source in sources {
            let words = source.split(|c: char| !(c.is_alphanumeric() || c == '_'));
            reads.words.extend(words.filter(|word| !word.is_empty()).map(str::to_string));
            let dense: String = source.chars().filter(|c| !c.is_whitespace() && !"'\"[]".contains(*c)).collect();
            reads.whole |= ["message|tojson", "messages|tojson", "{m|tojson", "-m|tojson", "message.items()"]
                .iter()
                .any(|use_| dense.contains(use_));
            // `.reasoning` is not read by a template that reads only `.reasoning_content`.
            let uses = |use_: &String| {
                dense.match_indices(use_.as_str()).any(|(at, _)| !dense[at + use_.len()..].starts_with('_'))
            };
            let is_field =
                |name: &&&str| [format!(".{name}"), format!("message{name}"), format!("{name}inm")].iter().any(uses);
            reads.thinking.extend(THINKING.iter().filter(is_field));
            // A template that tests the type accepts arguments as text and as objects.
            reads.parses_arguments |= dense.contains("arguments|tojson") && !dense.contains("argumentsisstring");
        }
        reads
    }

    pub(super) fn has(&self, field: &str) -> bool {
        self.whole
            || if THINKING.contains(&field) { self.thinking.contains(&field) } else { self.words.contains(field) }
    }

    /// Converts `message` to the form that the template reads. Fields that are `null` and an empty list of calls are removed, arguments of calls
    /// become objects, thinking moves to the field that the template reads, and content gets the form `content`.
    ///
    /// Errors with the reason if parts must be joined and a part is not a text.
    pub(super) fn settle(&self, message: &Value, content: Parts) -> Result<Value, String> {
        let Some(fields) = message.as_object() else { return Ok(message.clone()) };
        let has_value = |(name, value): &(&String, &Value)| {
            !(value.is_null() || (*name == "tool_calls" && value.as_array().is_some_and(Vec::is_empty)))
        };
        let mut fields: Map<String, Value> =
            fields.iter().filter(has_value).map(|(name, value)| (name.clone(), value.clone())).collect();
        self.settle_calls(&mut fields);
        if let Some(theirs) = THINKING.iter().find(|field| fields.contains_key(**field))
            && !self.has(theirs)
            && let Some(read) = self.thinking.first().filter(|read| !fields.contains_key(**read))
            && let Some(thinking) = fields.remove(*theirs)
        {
            fields.insert((*read).to_string(), thinking);
        }
        if let (Some(Value::Array(parts)), Parts::Joined | Parts::JoinedOrNull) = (fields.get("content"), content) {
            let joined = join_parts(parts)?;
            fields.insert("content".into(), joined.into());
        }
        if content == Parts::JoinedOrNull {
            fields.entry("content").or_insert(Value::Null);
        }
        Ok(Value::Object(fields))
    }

    /// Returns the forms of content that the template may accept, in the order in which they are tried.
    pub(super) fn forms(&self) -> &'static [Parts] {
        if self.takes_parts {
            &[Parts::Listed, Parts::Joined, Parts::JoinedOrNull]
        } else {
            &[Parts::Joined, Parts::JoinedOrNull]
        }
    }

    /// Removes `null` fields of calls, and parses arguments that are the JSON text of an object.
    fn settle_calls(&self, fields: &mut Map<String, Value>) {
        for call in fields.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            let Some(call) = call.as_object_mut() else { continue };
            call.retain(|_, value| !value.is_null());
            let call = match call.get_mut("function") {
                Some(Value::Object(function)) => function,
                _ => call,
            };
            call.retain(|_, value| !value.is_null());
            let text = call.get("arguments").and_then(Value::as_str).filter(|_| self.parses_arguments);
            if let Some(object @ Value::Object(_)) = text.and_then(|text| json_text::parse(text).ok()) {
                call.insert("arguments".into(), object);
            }
        }
    }
}

/// Joins the texts of parts. Each text is on its own line, as the server joins parts.
fn join_parts(parts: &[Value]) -> Result<String, String> {
    let text = |part: &Value| part.as_str().or_else(|| part.get("text")?.as_str()).map(str::to_string);
    let texts: Option<Vec<String>> = parts.iter().map(text).collect();
    let wrong = "`content` has a part that is no text, and the chat template takes texts only; images and audio are not implemented";
    texts.map(|texts| texts.join("\n")).ok_or_else(|| wrong.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn thinking_moves_to_the_field_that_the_template_reads() {
        let message = json!({"role": "assistant", "content": "b", "reasoning": "a"});
        for (source, field) in [
            ("{{ message.reasoning_content }}", "reasoning_content"),
            ("{{ message['reasoning_content'] is defined }}", "reasoning_content"),
            ("{{ message.reasoning }}{{ message.reasoning_content }}", "reasoning"),
            ("{{ message.thinking }}{{ reasoning_effort }}", "thinking"),
        ] {
            let settled = Reads::of(std::iter::once(source), true).settle(&message, Parts::Listed).unwrap();
            assert_eq!(settled[field], "a", "{source}: {settled}");
        }
    }
}
