//! Calls with special tokens around the name and after the arguments: DeepSeek-V3 and V3.1, Kimi K2.

use super::json::{Scan, arguments};
use crate::format::{Format, Parts, Step, before, may_become, start_of};

/// The tokens of a family.
pub struct Tokens {
    /// All tokens: the begin of the list of calls, its end, the begin of a call, the end of its head, and its end.
    pub markers: &'static [&'static str; 5],
    /// Reads the text between the begin of a call and its arguments.
    head: fn(&str) -> Head,
}

/// The maximum length of the text between the begin of a call and its arguments, in bytes.
const MOST_HEAD: usize = 1024;

/// What the text after the begin of a call is.
enum Head {
    More,
    No,
    /// The name, the id and the length of the head, after which the arguments begin.
    Is(String, Option<String>, usize),
}

/// The tokens of DeepSeek. V3 writes `function`, the separator, the name, and the arguments as a block of code. V3.1 writes the name, the separator
/// and the arguments.
pub static DEEPSEEK: Tokens = Tokens {
    markers: &[
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
    ],
    head: |text| {
        const BLOCK: &str = "```json";
        let Some((kind, rest)) = text.split_once("<｜tool▁sep｜>") else { return Head::More };
        if kind.trim() != "function" {
            return Head::of(kind.trim(), None, text, rest);
        }
        let Some((name, rest)) = rest.split_once('\n') else { return Head::More };
        let block = rest.trim_start();
        match block.strip_prefix(BLOCK) {
            Some(rest) => Head::of(name.trim(), None, text, rest),
            None if may_become(block, BLOCK) => Head::More,
            None => Head::No,
        }
    },
};

/// The tokens of Kimi K2, which writes `functions.NAME:NUMBER` as the id of a call.
pub static KIMI: Tokens = Tokens {
    markers: &[
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ],
    head: |text| {
        let Some((id, rest)) = text.split_once("<|tool_call_argument_begin|>") else { return Head::More };
        let id = id.trim();
        let name = id.rsplit_once(':').map_or(id, |(name, _)| name);
        Head::of(name.strip_prefix("functions.").unwrap_or(name), Some(id.to_string()), text, rest)
    },
};

impl Head {
    /// The head at the beginning of `text`, if an object begins in `rest`.
    fn of(name: &str, id: Option<String>, text: &str, rest: &str) -> Head {
        let object = rest.trim_start();
        match object.chars().next() {
            None => Head::More,
            Some('{') if !name.is_empty() => Head::Is(name.to_string(), id, text.len() - object.len()),
            Some(_) => Head::No,
        }
    }
}

/// Reads calls between tokens.
pub struct Marked {
    tokens: &'static Tokens,
    place: Place,
}

enum Place {
    Outside,
    Arguments(Scan),
    /// After the arguments of a call.
    Ending,
}

impl Marked {
    /// A text that has not begun.
    pub fn new(tokens: &'static Tokens) -> Marked {
        Marked { tokens, place: Place::Outside }
    }
}

impl Format for Marked {
    fn read(&mut self, text: &str, last: bool, parts: &mut Parts) -> Step {
        let &[begin, end, call, _, call_end] = self.tokens.markers;
        match &mut self.place {
            Place::Outside => match before(text, &[begin, end, call], last, |text| parts.content(text)) {
                Err(step) => step,
                Ok(marker) if marker != call => Step::Read(marker.len()),
                Ok(_) => match (self.tokens.head)(start_of(&text[call.len()..], MOST_HEAD)) {
                    Head::More if !last && text.len() < call.len() + MOST_HEAD => Step::Wait,
                    Head::More | Head::No => {
                        parts.content(call);
                        Step::Read(call.len())
                    }
                    Head::Is(name, id, bytes) => {
                        parts.call(&name, id);
                        self.place = Place::Arguments(Scan::default());
                        Step::Read(call.len() + bytes)
                    }
                },
            },
            Place::Arguments(scan) => match arguments(scan, text, parts) {
                None => Step::Wait,
                Some((end, has_ended)) => {
                    if has_ended {
                        self.place = Place::Ending;
                    }
                    Step::Read(end)
                }
            },
            Place::Ending => match before(text, &[call_end, call, end], last, |_| {}) {
                Err(step) => step,
                Ok(marker) => {
                    self.place = Place::Outside;
                    Step::Read(if marker == call_end { marker.len() } else { 0 })
                }
            },
        }
    }
}
