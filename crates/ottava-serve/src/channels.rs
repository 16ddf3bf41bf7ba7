//! The channels of gpt-oss: messages with a header, which is the channel and possibly the function that the message calls.
//!
//! <https://github.com/openai/harmony> describes the format. A message of the channel `analysis` is reasoning, a message to `functions.NAME` is a
//! call, and all other messages are content. With a constraint, all messages but the one of the channel `final` are reasoning.

use crate::format::{Format, Parts, Search, Step, before, may_become};
use ottava_engine::ReasoningMarks;

/// Reads messages with headers.
pub struct Channels {
    others: Others,
    /// Whether a message was content, and whether a message was reasoning.
    has_content: bool,
    has_reasoning: bool,
    place: Place,
}

/// How messages are read whose channel is neither `analysis` nor `final`.
#[derive(Clone, Copy, PartialEq)]
pub enum Others {
    Content,
    /// Messages to a function are calls, and the others are content.
    Calls,
    /// They are reasoning, because a constraint applies to the message of the channel `final` alone.
    Reasoning,
}

#[derive(Clone, Copy, PartialEq)]
enum Place {
    /// At the beginning of the text, which may have no header.
    Start,
    /// Within a header, with the search for its end.
    Header(Search),
    Body(Body),
}

#[derive(Clone, Copy, PartialEq)]
enum Body {
    Reasoning,
    Content,
    Arguments,
}

const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
/// The recipient of a message, in its header.
const TO: &str = "to=";
/// The markers after the text of a message. The first three end it, and the other two begin the header of the next message.
const ENDS: [&str; 5] = ["<|end|>", "<|call|>", "<|return|>", "<|start|>", CHANNEL];

impl Channels {
    /// All markers.
    pub const MARKERS: [&'static str; 7] =
        [CHANNEL, MESSAGE, "<|constrain|>", "<|end|>", "<|call|>", "<|return|>", "<|start|>"];

    /// What comes before the answer for the reader. Models may write more into the header of this message, which is left out.
    pub const BEFORE_FINAL: ReasoningMarks<'static> =
        ReasoningMarks { open: None, close: "<|channel|>final", then: Some(MESSAGE) };

    /// A text that has not begun.
    pub fn new(others: Others) -> Channels {
        Channels { others, has_content: false, has_reasoning: false, place: Place::Start }
    }

    /// Begins the message with this header.
    fn begin(&mut self, header: &str, parts: &mut Parts) {
        let channel = header.split_once(CHANNEL).map_or("", |(_, rest)| rest);
        let channel = channel.split(|c: char| c.is_whitespace() || c == '<').next().unwrap_or_default();
        let to = header.split_once(TO).map(|(_, rest)| rest);
        let to = to.and_then(|rest| rest.split(|c: char| c.is_whitespace() || c == '<').next());
        let is_reasoning = channel == "analysis" || self.others == Others::Reasoning && channel != "final";
        let body = match to.filter(|to| self.others == Others::Calls && !to.is_empty()) {
            Some(to) => {
                parts.call(to.strip_prefix("functions.").unwrap_or(to), None);
                Body::Arguments
            }
            None if is_reasoning => {
                if std::mem::replace(&mut self.has_reasoning, true) {
                    parts.reasoning("\n\n");
                }
                Body::Reasoning
            }
            None => {
                if std::mem::replace(&mut self.has_content, true) {
                    parts.content("\n\n");
                }
                Body::Content
            }
        };
        self.place = Place::Body(body);
    }
}

impl Format for Channels {
    fn read(&mut self, text: &str, last: bool, parts: &mut Parts) -> Step {
        match &mut self.place {
            Place::Start => {
                let begins = text.trim_start();
                let starts = ["<|start|>", CHANNEL, TO];
                if starts.iter().any(|start| begins.starts_with(start)) {
                    self.place = Place::Header(Search::default());
                } else if starts.iter().any(|start| may_become(begins, start)) && !last {
                    return Step::Wait;
                } else {
                    self.place = Place::Body(Body::Content);
                }
                Step::Read(0)
            }
            Place::Header(search) => match search.find(text, MESSAGE) {
                Some(at) => {
                    self.begin(&text[..at], parts);
                    Step::Read(at + MESSAGE.len())
                }
                // The answer ends within a header, which is no text.
                None if last && !text.is_empty() => {
                    *search = Search::default();
                    Step::Read(text.len())
                }
                None => Step::Wait,
            },
            &mut Place::Body(body) => {
                let add = |text: &str| match body {
                    Body::Reasoning => parts.reasoning(text),
                    Body::Content => parts.content(text),
                    Body::Arguments => parts.arguments(text),
                };
                match before(text, &ENDS, last, add) {
                    Err(step) => step,
                    Ok(end) => {
                        match body {
                            Body::Reasoning => parts.end_reasoning(),
                            Body::Arguments => parts.end_call(),
                            Body::Content => {}
                        }
                        self.place = Place::Header(Search::default());
                        // A marker of the next header stays in the header.
                        Step::Read(if ENDS[..3].contains(&end) { end.len() } else { 0 })
                    }
                }
            }
        }
    }

    fn is_reasoning(&self) -> bool {
        self.place == Place::Body(Body::Reasoning)
    }
}
