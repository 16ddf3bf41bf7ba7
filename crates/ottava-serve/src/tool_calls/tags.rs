//! Calls whose parameters are between tags: Qwen3-Coder, GLM-4.5 to 4.7, MiniMax-M2.
//!
//! The values of parameters are texts without quotes. The schema of the function says which of them are texts; all others are JSON. The arguments of
//! the call become a JSON object.

use super::tools::Tools;
use crate::format::{Format, Parts, Search, Step, before, first, may_become, partial, start_of};
use crate::json::text as json;
use serde_json::Value;

/// The tags of a family.
pub struct Names {
    /// The tags around calls, if there are such tags.
    around: Option<[&'static str; 2]>,
    /// The tag before the name of a function.
    call: &'static str,
    /// The texts that end the name.
    name_end: &'static [&'static str],
    /// Whether the text that ends the name belongs to the tag of the name. Otherwise it begins the parameters, or ends the call.
    name_has_end: bool,
    /// Around the key of a parameter.
    key: [&'static str; 2],
    /// Before the value, if there is such a tag, and after the value.
    value: [&'static str; 2],
    /// At the end of a call.
    end: &'static str,
}

/// `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.
pub static QWEN3_CODER: Names = Names {
    around: Some(["<tool_call>", "</tool_call>"]),
    call: "<function=",
    name_end: &[">"],
    name_has_end: true,
    key: ["<parameter=", ">"],
    value: ["", "</parameter>"],
    end: "</function>",
};

/// `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, with or without line breaks.
pub static GLM: Names = Names {
    around: None,
    call: "<tool_call>",
    name_end: &["<arg_key>", "</tool_call>"],
    name_has_end: false,
    key: ["<arg_key>", "</arg_key>"],
    value: ["<arg_value>", "</arg_value>"],
    end: "</tool_call>",
};

/// `<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>`.
pub static MINIMAX: Names = Names {
    around: Some(["<minimax:tool_call>", "</minimax:tool_call>"]),
    call: "<invoke name=",
    name_end: &[">"],
    name_has_end: true,
    key: ["<parameter name=", ">"],
    value: ["", "</parameter>"],
    end: "</invoke>",
};

/// The maximum length of a name or key, in bytes.
const MOST_NAME: usize = 256;

/// Reads calls between tags.
pub struct Tags {
    names: &'static Names,
    tools: Tools,
    place: Place,
    /// The name of the function.
    name: String,
    /// Whether the call has a parameter.
    has_parameter: bool,
}

enum Place {
    Outside,
    /// Between the parameters of a call.
    Parameters,
    /// Within the value of a parameter that is a text. The beginning of the text may have been read.
    Text {
        has_begun: bool,
    },
    /// Within the value of a parameter, with the search for its end.
    Value(Search),
}

impl Tags {
    /// A text that has not begun, with calls of `tools`.
    pub fn new(names: &'static Names, tools: &Tools) -> Tags {
        Tags { names, tools: tools.clone(), place: Place::Outside, name: String::new(), has_parameter: false }
    }

    fn outside(&mut self, text: &str, last: bool, parts: &mut Parts) -> Step {
        let Names { around, call, name_end, name_has_end, .. } = *self.names;
        let markers: Vec<_> = around.into_iter().flatten().chain([call]).collect();
        let marker = match before(text, &markers, last, |text| parts.content(text)) {
            Ok(marker) => marker,
            Err(step) => return step,
        };
        if marker != call {
            let inside = text[marker.len()..].trim_start();
            let opens = around.is_some_and(|[open, _]| open == marker);
            return match opens && !inside.starts_with(call) {
                true if may_become(inside, call) && !last => Step::Wait,
                true => {
                    parts.content(marker);
                    Step::Read(marker.len())
                }
                false => Step::Read(marker.len()),
            };
        }
        let rest = &text[call.len()..];
        let found = first(rest, name_end);
        let name = rest[..found.map_or(rest.len() - partial(rest, name_end), |(at, _)| at)].trim();
        let is_name = name.len() <= MOST_NAME && !name.contains(|c: char| c.is_whitespace() || c == '<' || c == '{');
        match found {
            Some((at, end)) if is_name && !name.is_empty() => {
                self.name = name.trim_matches('"').to_string();
                self.has_parameter = false;
                self.place = Place::Parameters;
                parts.call(&self.name, None);
                parts.arguments("{");
                Step::Read(call.len() + at + if name_has_end { end.len() } else { 0 })
            }
            None if is_name && !last => Step::Wait,
            _ => {
                parts.content(call);
                Step::Read(call.len())
            }
        }
    }

    fn parameters(&mut self, text: &str, last: bool, parts: &mut Parts) -> Step {
        let Names { key: [key, key_end], value: [value, _], end, .. } = *self.names;
        let marker = match before(text, &[key, end], last, |_| {}) {
            Ok(marker) => marker,
            Err(step) => return step,
        };
        if marker == end {
            parts.arguments("}");
            parts.end_call();
            self.place = Place::Outside;
            return Step::Read(end.len());
        }
        let rest = &text[key.len()..];
        let longest = MOST_NAME + key_end.len();
        let Some(at) = start_of(rest, longest).find(key_end) else {
            return match rest.len() >= longest || last {
                // It is no key.
                true => Step::Read(key.len()),
                false => Step::Wait,
            };
        };
        let (name, rest) = (&rest[..at], &rest[at + key_end.len()..]);
        let begin = if value.is_empty() { rest } else { rest.trim_start() };
        let Some(inside) = begin.strip_prefix(value) else {
            return match may_become(begin, value) && !last {
                true => Step::Wait,
                // A key without a value is left out.
                false => Step::Read(text.len() - begin.len()),
            };
        };
        let name = name.trim().trim_matches('"');
        let comma = if self.has_parameter { ", " } else { "" };
        parts.arguments(&format!("{comma}{}: ", json(&name)));
        self.has_parameter = true;
        self.place = match self.tools.is_text(&self.name, name) {
            true => Place::Text { has_begun: false },
            false => Place::Value(Search::default()),
        };
        Step::Read(text.len() - inside.len())
    }

    /// Reads a value that is a text. Line breaks at its beginning and end belong to the format.
    fn text(&mut self, has_begun: bool, text: &str, last: bool, parts: &mut Parts) -> Step {
        let end = self.names.value[1];
        if !has_begun {
            if text.is_empty() && !last {
                return Step::Wait;
            }
            parts.arguments("\"");
            self.place = Place::Text { has_begun: true };
            return Step::Read(usize::from(text.starts_with('\n')));
        }
        let found = text.find(end);
        let mut upto = found.unwrap_or_else(|| if last { text.len() } else { text.len() - partial(text, &[end]) });
        if found.is_some() || !last {
            upto = text[..upto].strip_suffix('\n').map_or(upto, str::len);
        }
        let quoted = json(&&text[..upto]);
        parts.arguments(&quoted[1..quoted.len() - 1]);
        match found {
            Some(at) => {
                parts.arguments("\"");
                self.place = Place::Parameters;
                Step::Read(at + end.len())
            }
            None if upto == 0 => Step::Wait,
            None => Step::Read(upto),
        }
    }
}

impl Format for Tags {
    fn read(&mut self, text: &str, last: bool, parts: &mut Parts) -> Step {
        match &mut self.place {
            Place::Outside => self.outside(text, last, parts),
            Place::Parameters => self.parameters(text, last, parts),
            &mut Place::Text { has_begun } => self.text(has_begun, text, last, parts),
            Place::Value(search) => {
                let end = self.names.value[1];
                match search.find(text, end) {
                    Some(at) => {
                        parts.arguments(&value(text[..at].trim()));
                        self.place = Place::Parameters;
                        Step::Read(at + end.len())
                    }
                    // The answer ends within the value.
                    None if last && !text.is_empty() => {
                        *search = Search::default();
                        parts.arguments(text.trim());
                        Step::Read(text.len())
                    }
                    None => Step::Wait,
                }
            }
        }
    }
}

/// Returns the JSON text of a value that need not be a text.
fn value(text: &str) -> String {
    match text {
        "True" => "true".into(),
        "False" => "false".into(),
        "None" => "null".into(),
        text if serde_json::from_str::<Value>(text).is_ok() => text.to_string(),
        text => json(&text),
    }
}
