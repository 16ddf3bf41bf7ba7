//! What templates read of messages, and messages in that form.

use std::collections::BTreeSet;

use serde_json::Value;

/// Fields that hold the thinking of an answer.
const THINKING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// The fields of messages that templates read, found in their source.
pub(super) struct Reads {
    /// All words of the source.
    words: BTreeSet<String>,
    /// Those of [`THINKING`] that are read as fields, and not only as variables.
    thinking: Vec<&'static str>,
    /// Whether whole messages are written, with all fields.
    whole: bool,
    /// Whether arguments of calls are written as JSON, and so have to be objects, as transformers' users pass them.
    parses_arguments: bool,
}

impl Reads {
    pub(super) fn of<'a>(sources: impl Iterator<Item = &'a str>) -> Reads {
        let mut reads = Reads { words: BTreeSet::new(), thinking: Vec::new(), whole: false, parses_arguments: false };
        for source in sources {
            let words = source.split(|c: char| !(c.is_alphanumeric() || c == '_'));
            reads.words.extend(words.filter(|word| !word.is_empty()).map(str::to_string));
            let dense: String = source.chars().filter(|c| !c.is_whitespace() && !"'\"[]".contains(*c)).collect();
            reads.whole |= ["message|tojson", "messages|tojson", "{m|tojson", "-m|tojson", "message.items()"]
                .iter()
                .any(|use_| dense.contains(use_));
            let is_field = |name: &&&str| {
                [format!(".{name}"), format!("message{name}"), format!("{name}inm")]
                    .iter()
                    .any(|use_| dense.contains(use_))
            };
            reads.thinking.extend(THINKING.iter().filter(is_field));
            // A template that looks at the type takes both.
            reads.parses_arguments |= dense.contains("arguments|tojson") && !dense.contains("argumentsisstring");
        }
        reads
    }

    pub(super) fn has(&self, field: &str) -> bool {
        self.whole
            || if THINKING.contains(&field) { self.thinking.contains(&field) } else { self.words.contains(field) }
    }

    /// `message` in the form that the template reads: arguments of calls as objects, and its thinking in the field that it has for it.
    pub(super) fn settle(&self, message: &Value) -> Value {
        let mut message = if self.parses_arguments { with_parsed_arguments(message) } else { message.clone() };
        if let Some(fields) = message.as_object_mut()
            && let Some(theirs) =
                THINKING.iter().find(|field| fields.get(**field).is_some_and(|value| !value.is_null()))
            && !self.has(theirs)
            && let Some(read) = self.thinking.first().filter(|read| !fields.contains_key(**read))
        {
            let thinking = fields.remove(*theirs).expect("the field was found above");
            fields.insert((*read).to_string(), thinking);
        }
        message
    }
}

/// `message` with the arguments of its calls as objects, where they are objects written as text.
fn with_parsed_arguments(message: &Value) -> Value {
    let mut message = message.clone();
    for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        let call = if call.get("function").is_some() { &mut call["function"] } else { call };
        let text = call.get("arguments").and_then(Value::as_str);
        if let Some(object @ Value::Object(_)) = text.and_then(|text| serde_json::from_str(text).ok()) {
            call["arguments"] = object;
        }
    }
    message
}
