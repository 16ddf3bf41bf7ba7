//! Reasoning in the text of an answer, in the formats of several families of models.

use crate::channels::{Channels, Others};
use crate::format::{Format, Parts, Step, before, may_become};
use ottava_data::ChatTemplate;
use ottava_engine::ReasoningMarks;
use std::fmt;
use std::str::FromStr;

/// How a model marks its reasoning.
#[derive(Clone, Copy)]
pub struct ReasoningParser(&'static Row);

/// Where an answer begins.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Beginning {
    /// Before reasoning, if it has any.
    #[default]
    Before,
    Within,
    /// After reasoning, or in a message that has none.
    After,
}

/// A row of the table of formats.
struct Row {
    /// The name of the format, and other names with which clients of vLLM and SGLang know it.
    names: &'static [&'static str],
    marks: Marks,
}

/// The marks of reasoning.
enum Marks {
    /// Reasoning is between two markers, at the beginning of the text.
    Between(&'static str, &'static str),
    /// The text has channels, and reasoning is one of them.
    Channels,
}

/// The formats. A template has the format of the first row whose marks it contains.
static ROWS: &[Row] = &[
    Row { names: &["gpt_oss", "openai_gptoss", "gpt-oss"], marks: Marks::Channels },
    Row { names: &["mistral"], marks: Marks::Between("[THINK]", "[/THINK]") },
    Row { names: &["seed_oss"], marks: Marks::Between("<seed:think>", "</seed:think>") },
    Row {
        names: &[
            "think",
            "qwen3",
            "deepseek_r1",
            "deepseek_v3",
            "glm45",
            "kimi_k2",
            "minimax_m2",
            "olmo3",
            "hunyuan_a13b",
            "ernie45",
            "step3",
        ],
        marks: Marks::Between("<think>", "</think>"),
    },
];

impl ReasoningParser {
    /// Returns the name of the format.
    pub fn name(self) -> &'static str {
        self.0.names[0]
    }

    /// Returns the format whose marks `template` contains.
    pub fn of_template(template: &ChatTemplate) -> Option<ReasoningParser> {
        let has = |row: &&Row| match row.marks {
            Marks::Between(_, close) => template.source().contains(close),
            Marks::Channels => template.source().contains("<|channel|>"),
        };
        ROWS.iter().find(has).map(ReasoningParser)
    }

    /// Whether the text consists of channels, which also have calls.
    pub fn has_channels(self) -> bool {
        matches!(self.0.marks, Marks::Channels)
    }

    /// The markers, which texts without special tokens must keep.
    pub fn markers(self) -> Vec<&'static str> {
        match self.0.marks {
            Marks::Between(open, close) => vec![open, close],
            Marks::Channels => Channels::MARKERS.to_vec(),
        }
    }

    /// Where the answer after `prompt` begins. If the answer continues a message, `continued` is the text of the message.
    pub fn beginning(self, prompt: &str, continued: Option<&str>) -> Beginning {
        let Marks::Between(open, close) = self.0.marks else {
            return if continued.is_some() { Beginning::After } else { Beginning::Before };
        };
        let prompt = prompt.trim_end();
        match continued {
            Some(text) if text.rfind(open) > text.rfind(close) => Beginning::Within,
            Some(_) => Beginning::After,
            None if prompt.ends_with(open) => Beginning::Within,
            None if prompt.ends_with(close) => Beginning::After,
            None => Beginning::Before,
        }
    }

    /// The marks of the reasoning before a constrained text; `None` if there is no reasoning.
    pub fn before_constraint(self, beginning: Beginning) -> Option<ReasoningMarks<'static>> {
        match (&self.0.marks, beginning) {
            (_, Beginning::After) => None,
            (Marks::Between(_, close), Beginning::Within) => Some(ReasoningMarks { open: None, close, then: None }),
            (Marks::Between(open, close), Beginning::Before) => {
                Some(ReasoningMarks { open: Some(*open), close, then: None })
            }
            (Marks::Channels, _) => Some(Channels::BEFORE_FINAL),
        }
    }

    /// Reads a text in this format. If `opened`, it begins within reasoning. If the text has channels, `others` says how the other messages are read.
    pub fn format(self, opened: bool, others: Others) -> Box<dyn Format> {
        match self.0.marks {
            Marks::Between(open, close) => {
                let place = if opened { Place::Opened } else { Place::Start };
                Box::new(Between { open, close, place })
            }
            Marks::Channels => Box::new(Channels::new(others)),
        }
    }
}

impl FromStr for ReasoningParser {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<ReasoningParser, String> {
        ROWS.iter().find(|row| row.names.contains(&name)).map(ReasoningParser).ok_or_else(|| {
            let names: Vec<_> = ROWS.iter().flat_map(|row| row.names).copied().collect();
            format!("there is no parser {name:?}; {} are implemented", names.join(", "))
        })
    }
}

impl fmt::Debug for ReasoningParser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Reasoning between two markers.
struct Between {
    open: &'static str,
    close: &'static str,
    place: Place,
}

#[derive(PartialEq)]
enum Place {
    /// At the beginning of a text that may begin with the first marker.
    Start,
    /// At the beginning of a text that begins within reasoning. Some models write the first marker again.
    Opened,
    Inside,
    After,
}

impl Format for Between {
    fn read(&mut self, text: &str, last: bool, parts: &mut Parts) -> Step {
        match self.place {
            Place::Start | Place::Opened => {
                let begins = text.trim_start();
                if begins.starts_with(self.open) {
                    self.place = Place::Inside;
                    return Step::Read(text.len() - begins.len() + self.open.len());
                }
                if may_become(begins, self.open) && !last {
                    return Step::Wait;
                }
                match self.place {
                    Place::Opened => self.place = Place::Inside,
                    _ => self.place = Place::After,
                }
                Step::Read(0)
            }
            Place::Inside => match before(text, &[self.close], last, |text| parts.reasoning(text)) {
                Err(step) => step,
                Ok(close) => {
                    parts.end_reasoning();
                    self.place = Place::After;
                    Step::Read(close.len())
                }
            },
            Place::After => Step::Next,
        }
    }

    fn is_reasoning(&self) -> bool {
        matches!(self.place, Place::Opened | Place::Inside)
    }
}
