//! Tool calls in the text of an answer, in the formats of several families of models.

use crate::error::{ApiError, Result};
use ottava_data::ChatTemplate;
use serde_json::{Deserializer, Value, json};
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

/// The format in which a model writes tool calls, by its vLLM name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolCallParser {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>` for each call: Hermes, Qwen2.5 and Qwen3.
    Hermes,
    /// The whole text is `{"name": …, "parameters": …}`, or several such objects separated by semicolons: Llama 3.1 to 3.3.
    Llama3Json,
    /// `[TOOL_CALLS][{"name": …, "arguments": …}, …]` (earlier models of Mistral), or `[TOOL_CALLS]NAME[ARGS]{…}` for each call (newer models).
    Mistral,
}

const HERMES: [&str; 2] = ["<tool_call>", "</tool_call>"];
const LLAMA: &str = "<|python_tag|>";
const MISTRAL: &str = "[TOOL_CALLS]";
/// The marker before the arguments of a call in newer models of Mistral. Some of these models write an id between the name and this marker, after
/// [`MISTRAL_ID`].
const MISTRAL_ARGS: &str = "[ARGS]";
const MISTRAL_ID: &str = "[CALL_ID]";

impl ToolCallParser {
    const ALL: [(&'static str, ToolCallParser); 3] = [
        ("hermes", ToolCallParser::Hermes),
        ("llama3_json", ToolCallParser::Llama3Json),
        ("mistral", ToolCallParser::Mistral),
    ];

    /// Returns the name of the format.
    pub fn name(self) -> &'static str {
        ToolCallParser::ALL.iter().find(|(_, parser)| *parser == self).expect("all have a name").0
    }

    /// Returns the format whose marker `template` contains; `None` if the template contains the markers of several formats, or no marker.
    pub fn of_template(template: &ChatTemplate) -> Option<ToolCallParser> {
        let has = |parser: &ToolCallParser| {
            template.source().contains(match parser {
                ToolCallParser::Hermes => HERMES[0],
                ToolCallParser::Llama3Json => LLAMA,
                ToolCallParser::Mistral => MISTRAL,
            })
        };
        let mut found = ToolCallParser::ALL.into_iter().map(|(_, parser)| parser).filter(has);
        found.next().filter(|_| found.next().is_none())
    }

    /// Whether the marker of calls may be a special token. Texts usually leave out special tokens.
    pub fn marks_by_special_token(self) -> bool {
        self == ToolCallParser::Mistral
    }
}

impl FromStr for ToolCallParser {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<ToolCallParser, String> {
        let found = ToolCallParser::ALL.iter().find(|(known, _)| *known == name).map(|(_, parser)| *parser);
        found.ok_or_else(|| {
            let names: Vec<_> = ToolCallParser::ALL.iter().map(|(name, _)| *name).collect();
            format!("there is no parser {name:?}; {} are implemented", names.join(", "))
        })
    }
}

/// The form of calls in an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Calls {
    /// The model decides whether it calls tools.
    Free(ToolCallParser),
    /// The text is constrained to a list of calls.
    Required,
    /// The text is constrained to the arguments of a call of this function.
    Named(String),
}

/// A tool call.
#[derive(Debug, PartialEq)]
pub struct Call {
    name: String,
    /// The arguments as JSON.
    arguments: String,
}

/// The content and the calls that the last part of an answer has completed.
#[derive(Debug, Default, PartialEq)]
pub struct Found {
    pub content: String,
    pub calls: Vec<Call>,
}

/// Finds calls in a text that is received in parts.
#[derive(Debug)]
pub struct CallStream {
    form: Calls,
    /// The maximum number of calls. Text after the last call is dropped.
    most: usize,
    /// The received text that may become a part of a call.
    held: String,
    /// Whether `held` begins with a call that is not complete.
    inside: bool,
    /// The number of calls so far.
    count: usize,
    /// Whether there was content other than white space.
    content: bool,
}

impl CallStream {
    pub fn new(form: Calls, most: usize) -> CallStream {
        CallStream { form, most, held: String::new(), inside: false, count: 0, content: false }
    }

    /// Whether the maximum number of calls is reached.
    pub fn is_full(&self) -> bool {
        self.count >= self.most
    }

    /// Adds text. With `finished`, the text is the last part, and text that did not become a call is content.
    pub fn push(&mut self, text: &str, finished: bool) -> Found {
        self.held.push_str(text);
        let mut found = Found::default();
        match &self.form {
            // The new text cannot end a call, so the held text, which may be long, is not searched again.
            _ if self.inside && !finished && !text.contains(['}', ']', '>']) => {}
            Calls::Free(ToolCallParser::Hermes) => self.hermes(&mut found),
            Calls::Free(ToolCallParser::Mistral) => self.mistral(&mut found),
            Calls::Free(ToolCallParser::Llama3Json) => self.llama(&mut found),
            Calls::Required => self.inside = true,
            Calls::Named(name) if finished => {
                let (name, arguments) = (name.clone(), std::mem::take(&mut self.held));
                found.calls.push(Call { name, arguments });
            }
            Calls::Named(_) => {}
        }
        if finished {
            self.finish(&mut found);
        }
        found.calls.truncate(self.most - self.count);
        self.count += found.calls.len();
        found
    }

    /// Whether further calls may follow the earlier calls and the `found` calls. If not, drops the held text.
    fn goes_on(&mut self, found: &Found) -> bool {
        let goes_on = self.count + found.calls.len() < self.most;
        if !goes_on {
            self.held.clear();
            self.inside = false;
        }
        goes_on
    }

    fn finish(&mut self, found: &mut Found) {
        let held = std::mem::take(&mut self.held);
        let calls = match &self.form {
            Calls::Free(ToolCallParser::Hermes) if self.inside => one(held[HERMES[0].len()..].trim()),
            Calls::Required => list(held.trim()),
            _ => None,
        };
        self.settle(&held, calls, found);
    }

    /// Adds `calls`; if `text` did not contain valid calls, adds `text` as content.
    fn settle(&mut self, text: &str, calls: Option<Vec<Call>>, found: &mut Found) {
        match calls {
            Some(calls) => found.calls.extend(calls),
            None => self.add_content(text, found),
        }
    }

    /// Calls [`CallStream::settle`] for the held text up to `end`, and removes this text.
    fn settle_held(&mut self, end: usize, calls: Option<Vec<Call>>, found: &mut Found) {
        let rest = self.held.split_off(end);
        let text = std::mem::replace(&mut self.held, rest);
        self.settle(&text, calls, found);
        self.inside = false;
    }

    /// Adds content. White space after calls is dropped.
    fn add_content(&mut self, text: &str, found: &mut Found) {
        if self.count + found.calls.len() == 0 || !text.trim().is_empty() {
            self.content |= !text.trim().is_empty();
            found.content.push_str(text);
        }
    }

    /// Moves text before `marker` to the content. Returns whether the held text now begins with the marker.
    fn reach(&mut self, marker: &str, found: &mut Found) -> bool {
        let at = self.held.find(marker);
        let before = at.unwrap_or_else(|| {
            // The end of the text may be the beginning of the marker.
            let starts = (1..marker.len()).rev().filter(|&n| self.held.ends_with(&marker[..n]));
            self.held.len() - starts.max().unwrap_or(0)
        });
        // White space before a call is not content.
        let before = self.held[..before].trim_end().len();
        let rest = self.held.split_off(before);
        let text = std::mem::replace(&mut self.held, rest);
        if !text.is_empty() {
            self.add_content(&text, found);
        }
        if at.is_some() {
            self.held = self.held.trim_start().to_string();
        }
        at.is_some()
    }

    fn hermes(&mut self, found: &mut Found) {
        while self.goes_on(found) {
            self.inside = self.inside || self.reach(HERMES[0], found);
            let Some(end) = self.inside.then(|| self.held.find(HERMES[1])).flatten() else { return };
            let calls = one(self.held[HERMES[0].len()..end].trim());
            self.settle_held(end + HERMES[1].len(), calls, found);
        }
    }

    fn mistral(&mut self, found: &mut Found) {
        while self.goes_on(found) {
            self.inside = self.inside || self.reach(MISTRAL, found);
            let Some(text) = self.inside.then(|| &self.held[MISTRAL.len()..]) else { return };
            let (name, start) = match text.split_once(MISTRAL_ARGS) {
                // The marker may also be part of a JSON string.
                Some((name, _)) if !text.trim_start().starts_with(['[', '{']) => {
                    (Some(name), name.len() + MISTRAL_ARGS.len())
                }
                _ => (None, 0),
            };
            let Some((value, end)) = first_value(&text[start..]) else { return };
            let calls = match name {
                Some(name) => call_named(name.split(MISTRAL_ID).next().unwrap_or(name).trim(), &value),
                None => calls_of(&value),
            };
            self.settle_held(MISTRAL.len() + start + end, calls, found);
        }
    }

    fn llama(&mut self, found: &mut Found) {
        while self.goes_on(found) {
            let calls = self.count + found.calls.len();
            let begins = self.held.trim_start();
            let separator = if calls > 0 { ";" } else { LLAMA };
            let text = begins.strip_prefix(separator).unwrap_or(begins).trim_start();
            if text.is_empty() || (!self.content && separator.starts_with(text)) {
                return;
            }
            let is_call = !self.content && text.starts_with('{');
            let call = is_call.then(|| first_value(text).map(|(value, end)| (calls_of(&value), end)));
            match call {
                // The call may not be complete.
                Some(None) => {
                    self.inside = true;
                    return;
                }
                Some(Some((Some(calls), end))) => {
                    found.calls.extend(calls);
                    self.held = text[end..].to_string();
                    self.inside = false;
                }
                _ => {
                    let text = std::mem::take(&mut self.held);
                    self.inside = false;
                    return self.add_content(&text, found);
                }
            }
        }
    }
}

/// Returns the JSON value at the beginning of `text`, and the end of the value; `None` if the value is incomplete or invalid.
fn first_value(text: &str) -> Option<(Value, usize)> {
    let mut values = Deserializer::from_str(text).into_iter::<Value>();
    let value = values.next()?.ok()?;
    Some((value, values.byte_offset()))
}

/// Returns the calls in a value: an object, or a list of objects.
fn calls_of(value: &Value) -> Option<Vec<Call>> {
    match value {
        Value::Array(list) if !list.is_empty() => list.iter().map(call).collect(),
        value => Some(vec![call(value)?]),
    }
}

fn call(value: &Value) -> Option<Call> {
    let arguments = value.get("arguments").or_else(|| value.get("parameters")).filter(|value| value.is_object())?;
    Some(Call { name: value.get("name")?.as_str()?.into(), arguments: arguments.to_string() })
}

/// Returns the call of the function `name` with these arguments; `None` if `name` cannot be a name, or if the arguments are not an object.
fn call_named(name: &str, arguments: &Value) -> Option<Vec<Call>> {
    let is_name = !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || c == '[');
    (is_name && arguments.is_object()).then(|| vec![Call { name: name.into(), arguments: arguments.to_string() }])
}

/// Returns the call in a text that is one JSON object.
fn one(text: &str) -> Option<Vec<Call>> {
    Some(vec![call(&serde_json::from_str(text).ok()?)?])
}

/// Returns the calls in a text that is one JSON list.
fn list(text: &str) -> Option<Vec<Call>> {
    calls_of(&serde_json::from_str(text).ok()?)
}

/// Formats calls for OpenAI's API. Each id is unique in the server and has nine digits and letters, which templates of Mistral require. If calls have
/// an index (in a stream), `from` is the number of earlier calls.
pub fn as_json(calls: &[Call], from: Option<usize>) -> Vec<Value> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let call = |(number, call): (usize, &Call)| {
        let id = format!("c{:08x}", COUNT.fetch_add(1, Ordering::Relaxed) & 0xffff_ffff);
        let function = json!({"name": call.name, "arguments": call.arguments});
        match from {
            Some(from) => json!({"index": from + number, "id": id, "type": "function", "function": function}),
            None => json!({"id": id, "type": "function", "function": function}),
        }
    };
    calls.iter().enumerate().map(call).collect()
}

/// Which tools an answer may or must call.
#[derive(Debug, PartialEq)]
pub enum ToolChoice {
    /// No calls.
    None,
    /// The model decides whether it calls tools.
    Auto,
    /// At least one call.
    Required,
    /// A call of this function.
    Named(String),
}

impl ToolChoice {
    /// Reads `tool_choice` of a request with `tools`.
    pub fn read(value: Option<&Value>, tools: &[Value]) -> Result<ToolChoice> {
        let wrong = |message: String| Err(ApiError::field("tool_choice", message));
        let choice = match value {
            None => ToolChoice::Auto,
            Some(Value::String(choice)) => match choice.as_str() {
                "none" => ToolChoice::None,
                "auto" => ToolChoice::Auto,
                "required" => ToolChoice::Required,
                other => {
                    return wrong(format!("`tool_choice` is {other:?}; it is none, auto, required or a function"));
                }
            },
            Some(value) => match value["function"]["name"].as_str().filter(|_| value["type"] == "function") {
                Some(name) => ToolChoice::Named(name.into()),
                None => {
                    let form = r#"{"type": "function", "function": {"name": NAME}}"#;
                    return wrong(format!("`tool_choice` is not none, auto, required or {form}"));
                }
            },
        };
        match &choice {
            ToolChoice::Required if tools.is_empty() => {
                wrong("`tool_choice` is required, and there are no `tools`".into())
            }
            ToolChoice::Named(name) if !tools.iter().any(|tool| tool["function"]["name"] == *name) => {
                wrong(format!("`tool_choice` is the function {name:?}, which is not among the `tools`"))
            }
            _ => Ok(choice),
        }
    }

    /// Returns the JSON schema to which the text of an answer with `most` calls must conform.
    ///
    /// Errors if a tool has no name.
    pub fn schema(&self, tools: &[Value], most: usize) -> Result<Option<Value>> {
        match self {
            ToolChoice::None | ToolChoice::Auto => Ok(None),
            ToolChoice::Named(name) => Ok(tools.iter().find(|tool| tool["function"]["name"] == *name).map(parameters)),
            ToolChoice::Required => {
                let call = |(number, tool): (usize, &Value)| {
                    let missing = || ApiError::field("tools", format!("tool {number} has no `function.name`"));
                    let name = tool["function"]["name"].as_str().ok_or_else(missing)?;
                    Ok(json!({
                        "type": "object",
                        "properties": {"name": {"const": name}, "parameters": parameters(tool)},
                        "required": ["name", "parameters"],
                        "additionalProperties": false,
                    }))
                };
                let calls = tools.iter().enumerate().map(call).collect::<Result<Vec<_>>>()?;
                let mut list = json!({"type": "array", "minItems": 1, "items": {"anyOf": calls}});
                if most < usize::MAX {
                    list["maxItems"] = most.into();
                }
                Ok(Some(list))
            }
        }
    }
}

/// Returns the JSON schema of the arguments of a tool. As in OpenAI's API, a tool without parameters has the arguments `{}`.
fn parameters(tool: &Value) -> Value {
    let names_none = |(name, value): (&String, &Value)| match name.as_str() {
        "type" => value == "object",
        "properties" => value.as_object().is_some_and(|properties| properties.is_empty()),
        "required" => value.as_array().is_some_and(Vec::is_empty),
        name => ["title", "description", "$schema"].contains(&name),
    };
    match tool["function"].get("parameters") {
        Some(Value::Object(schema)) if !schema.iter().all(names_none) => schema.clone().into(),
        None | Some(Value::Null | Value::Object(_)) => {
            json!({"type": "object", "properties": {}, "additionalProperties": false})
        }
        Some(other) => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns content and calls of a text. Asserts that the result is the same for the whole text, for every division into two parts, and for single
    /// characters.
    fn parsed(form: &Calls, most: usize, text: &str) -> (String, Vec<(String, String)>) {
        let run = |parts: &[&str]| {
            let mut stream = CallStream::new(form.clone(), most);
            let (mut content, mut calls) = (String::new(), Vec::new());
            for (i, part) in parts.iter().enumerate() {
                let found = stream.push(part, i + 1 == parts.len());
                content.push_str(&found.content);
                calls.extend(found.calls.into_iter().map(|call| (call.name, call.arguments)));
            }
            assert_eq!((stream.count, stream.is_full()), (calls.len(), calls.len() == most));
            (content, calls)
        };
        let whole = run(&[text]);
        for (at, _) in text.char_indices() {
            assert_eq!(run(&[&text[..at], &text[at..]]), whole, "cut at {at}");
        }
        let ends: Vec<_> = text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]).collect();
        assert_eq!(run(&ends), whole);
        whole
    }

    #[test]
    fn calls_are_found_in_each_format_however_the_text_is_cut() {
        use ToolCallParser::{Hermes, Llama3Json, Mistral};
        let arguments = r#"{"depth": 3, "to": "é\"}</"}"#;
        let dive = format!(r#"{{"name": "dive", "arguments": {arguments}}}"#);
        let other = dive.replace("arguments", "parameters");
        let call = ("dive".to_string(), r#"{"depth":3,"to":"é\"}</"}"#.to_string());
        for (parser, text, content, calls) in [
            (Hermes, format!("<tool_call>\n{dive}\n</tool_call>"), "", 1),
            (
                Hermes,
                format!("Yes: <x>\n<tool_call>{dive}</tool_call>\n<tool_call>{dive}</tool_call>\n"),
                "Yes: <x>",
                2,
            ),
            (Hermes, format!("<tool_call>{dive}"), "", 1),
            (Hermes, "<tool_call>{\"name\": </tool_call> no".into(), "<tool_call>{\"name\": </tool_call> no", 0),
            (Hermes, "<tool_call>{\"na".into(), "<tool_call>{\"na", 0),
            (Hermes, "a < b <tool".into(), "a < b <tool", 0),
            (Hermes, "text \n".into(), "text \n", 0),
            (Llama3Json, other.clone(), "", 1),
            (Llama3Json, format!("<|python_tag|>{other}; {other}"), "", 2),
            (Llama3Json, format!("I call {other}"), &format!("I call {other}"), 0),
            (Llama3Json, "{\"a\": 1}".into(), "{\"a\": 1}", 0),
            (Llama3Json, "{\"name".into(), "{\"name", 0),
            (Mistral, format!("[TOOL_CALLS] [{dive}, {dive}]"), "", 2),
            (Mistral, format!("Well [1] [TOOL_CALLS][{dive}]"), "Well [1]", 1),
            (Mistral, format!("[TOOL_CALLS][{dive}"), &format!("[TOOL_CALLS][{dive}"), 0),
            (Mistral, format!("Well [TOOL_CALLS]dive[ARGS]{arguments}"), "Well", 1),
            (Mistral, format!("[TOOL_CALLS]dive[ARGS]{arguments}\n[TOOL_CALLS] dive [ARGS] {arguments}"), "", 2),
            (Mistral, format!("[TOOL_CALLS]dive[CALL_ID]a1b2c3d4e[ARGS]{arguments}"), "", 1),
            (Mistral, "[TOOL_CALLS]dive[ARGS]{\"depth\"".into(), "[TOOL_CALLS]dive[ARGS]{\"depth\"", 0),
            (Mistral, "[TOOL_CALLS][ARGS]{} no".into(), "[TOOL_CALLS][ARGS]{} no", 0),
            (Mistral, "[TOOL_CALLS]a [TOOL_CALLS]b[ARGS]{}".into(), "[TOOL_CALLS]a [TOOL_CALLS]b[ARGS]{}", 0),
            (Mistral, "[TOOL_CALLS]dive[ARGS]3 no".into(), "[TOOL_CALLS]dive[ARGS]3 no", 0),
        ] {
            let (found, names) = parsed(&Calls::Free(parser), usize::MAX, &text);
            assert_eq!((found.as_str(), names.len()), (content, calls), "{parser:?}: {text}");
            assert!(names.iter().all(|found| *found == call), "{parser:?}: {names:?}");
        }
        let required = |text: &str| parsed(&Calls::Required, usize::MAX, text);
        assert_eq!(required(&format!("[{other}]")), (String::new(), vec![call]));
        // The text ends at the limit of tokens.
        assert_eq!(required("[{\"name\""), ("[{\"name\"".into(), vec![]));
        let named = parsed(&Calls::Named("dive".into()), usize::MAX, "{\"depth\"");
        assert_eq!(named, (String::new(), vec![("dive".into(), "{\"depth\"".into())]));
    }

    #[test]
    fn what_comes_after_the_last_call_that_there_may_be_is_dropped() {
        use ToolCallParser::{Hermes, Llama3Json, Mistral};
        let object = |name: &str| format!(r#"{{"name": "{name}", "arguments": {{}}}}"#);
        let [dive, rise] = ["dive", "rise"].map(object);
        for (parser, text) in [
            (Hermes, format!("Yes <tool_call>{dive}</tool_call> and <tool_call>{rise}</tool_call> so")),
            (Llama3Json, format!("{dive}; {rise}")),
            (Mistral, format!("Yes [TOOL_CALLS][{dive}, {rise}] so")),
            (Mistral, "Yes [TOOL_CALLS]dive[ARGS]{} and [TOOL_CALLS]rise[ARGS]{}".into()),
        ] {
            let content = if parser == Llama3Json { "" } else { "Yes" };
            let expected = (content.to_string(), vec![("dive".to_string(), "{}".to_string())]);
            assert_eq!(parsed(&Calls::Free(parser), 1, &text), expected, "{parser:?}: {text}");
            let (_, calls) = parsed(&Calls::Free(parser), usize::MAX, &text);
            assert_eq!(calls.len(), 2, "{parser:?}: {text}");
        }
    }
}
