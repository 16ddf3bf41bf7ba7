//! Tool calls in the text of an answer, in the formats of several families of models.

mod hermes;
mod json;
mod list;
mod llama;
mod marked;
mod mistral;
mod pythonic;
mod tags;
mod tools;

use crate::channels::{Channels, Others};
use crate::format::{Format, Parts, Step};
use ottava_data::ChatTemplate;
use std::fmt;
use std::str::FromStr;

pub use tools::Tools;

/// The format in which a model writes tool calls, by its vLLM name.
#[derive(Clone, Copy)]
pub struct ToolCallParser(&'static Row);

/// A row of the table of formats.
struct Row {
    /// The name of the format, and other names with which clients of vLLM and SGLang know it.
    names: &'static [&'static str],
    /// A template that contains one of the first texts, and none of the second texts, has this format.
    template: (&'static [&'static str], &'static [&'static str]),
    /// The markers, which texts without special tokens must keep.
    markers: &'static [&'static str],
    /// Makes a reader of a text.
    new: fn(&Tools) -> Box<dyn Format>,
}

/// The formats.
static ROWS: &[Row] = &[
    Row {
        names: &["hermes", "qwen", "qwen25"],
        template: (&["<tool_call>"], &["<function=", "<arg_key>", "<minimax:tool_call>"]),
        markers: &["<tool_call>", "</tool_call>"],
        new: |_| Box::new(hermes::Hermes::default()),
    },
    Row {
        names: &["qwen3_coder", "qwen3_xml"],
        template: (&["<function="], &["<|python_tag|>"]),
        markers: &["<tool_call>", "</tool_call>"],
        new: |tools| Box::new(tags::Tags::new(&tags::QWEN3_CODER, tools)),
    },
    Row {
        names: &["glm45", "glm47"],
        template: (&["<arg_key>"], &[]),
        markers: &["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
        new: |tools| Box::new(tags::Tags::new(&tags::GLM, tools)),
    },
    Row {
        names: &["minimax_m2", "minimax"],
        template: (&["<minimax:tool_call>"], &[]),
        markers: &["<minimax:tool_call>", "</minimax:tool_call>"],
        new: |tools| Box::new(tags::Tags::new(&tags::MINIMAX, tools)),
    },
    Row {
        names: &["llama3_json", "llama4_json", "llama3"],
        template: (&["<|python_tag|>"], &["<|python_start|>"]),
        markers: &["<|python_tag|>"],
        new: |_| Box::new(llama::Llama::default()),
    },
    Row {
        names: &["llama4_pythonic", "pythonic"],
        template: (&["<|python_start|>"], &[]),
        markers: &["<|python_start|>", "<|python_end|>"],
        new: |_| Box::new(pythonic::Pythonic::default()),
    },
    Row {
        names: &["mistral"],
        template: (&["[TOOL_CALLS]"], &[]),
        markers: &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
        new: |_| Box::new(mistral::Mistral::default()),
    },
    Row {
        names: &["deepseek_v3", "deepseek_v31", "deepseekv3", "deepseekv31"],
        template: (&["<｜tool▁call▁begin｜>"], &[]),
        markers: marked::DEEPSEEK.markers,
        new: |_| Box::new(marked::Marked::new(&marked::DEEPSEEK)),
    },
    Row {
        names: &["kimi_k2"],
        template: (&["<|tool_call_begin|>"], &[]),
        markers: marked::KIMI.markers,
        new: |_| Box::new(marked::Marked::new(&marked::KIMI)),
    },
    Row {
        names: &["openai", "gpt_oss", "gpt-oss"],
        template: (&["<|channel|>"], &[]),
        markers: &Channels::MARKERS,
        new: |_| Box::new(Channels::new(Others::Calls)),
    },
];

impl ToolCallParser {
    /// Returns the name of the format.
    pub fn name(self) -> &'static str {
        self.0.names[0]
    }

    /// Returns the format whose marker `template` contains; `None` if the template contains the markers of several formats, or no marker.
    pub fn of_template(template: &ChatTemplate) -> Option<ToolCallParser> {
        let source = template.source();
        let contains = |texts: &[&str]| texts.iter().any(|text| source.contains(text));
        let mut found = ROWS.iter().filter(|row| contains(row.template.0) && !contains(row.template.1));
        found.next().filter(|_| found.next().is_none()).map(ToolCallParser)
    }

    /// The markers of calls, which may be special tokens. Texts usually leave out special tokens.
    pub fn markers(self) -> &'static [&'static str] {
        self.0.markers
    }
}

impl FromStr for ToolCallParser {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<ToolCallParser, String> {
        ROWS.iter().find(|row| row.names.contains(&name)).map(ToolCallParser).ok_or_else(|| {
            let names: Vec<_> = ROWS.iter().flat_map(|row| row.names).copied().collect();
            format!("there is no parser {name:?}; {} are implemented", names.join(", "))
        })
    }
}

impl PartialEq for ToolCallParser {
    fn eq(&self, other: &ToolCallParser) -> bool {
        self.name() == other.name()
    }
}

impl fmt::Debug for ToolCallParser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
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

impl Calls {
    /// Makes a reader of a text with calls of these tools.
    pub fn format(&self, tools: &Tools) -> Box<dyn Format> {
        match self {
            Calls::Free(parser) => (parser.0.new)(tools),
            Calls::Required => Box::new(list::List::default()),
            Calls::Named(name) => Box::new(Named { name: name.clone(), has_begun: false }),
        }
    }
}

/// The whole text is the arguments of one call.
struct Named {
    name: String,
    has_begun: bool,
}

impl Format for Named {
    fn read(&mut self, text: &str, last: bool, parts: &mut Parts) -> Step {
        if !self.has_begun && (last || !text.is_empty()) {
            self.has_begun = true;
            parts.call(&self.name, None);
        }
        match text.is_empty() {
            true => Step::Wait,
            false => {
                parts.arguments(text);
                Step::Read(text.len())
            }
        }
    }
}
