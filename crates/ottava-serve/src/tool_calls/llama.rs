//! The whole text is `{"name": …, "parameters": …}`, or several such objects separated by semicolons: Llama 3.1 to 3.3.

use super::json::{Object, Reading};
use crate::format::{Format, Parts, Step, may_become};

const MARKER: &str = "<|python_tag|>";

/// Reads objects. A text that begins otherwise is content.
pub enum Llama {
    /// At the beginning of the text, which may begin with this object.
    Start(Object),
    Inside(Object),
    /// After a call, which this object may follow.
    Between(Object),
    /// The rest of the text is content.
    Content,
}

impl Default for Llama {
    fn default() -> Llama {
        Llama::Start(Object::default())
    }
}

impl Format for Llama {
    fn read(&mut self, text: &str, last: bool, parts: &mut Parts) -> Step {
        let is_first = matches!(self, Llama::Start(_));
        match self {
            Llama::Start(call) | Llama::Between(call) => {
                let begins = text.trim_start();
                let begins =
                    if is_first { begins } else { begins.strip_prefix([';', ',']).unwrap_or(begins).trim_start() };
                let object = begins.strip_prefix(MARKER).unwrap_or(begins).trim_start();
                if (object.is_empty() || may_become(object, MARKER)) && !last {
                    return Step::Wait;
                }
                let reading = if object.starts_with('{') { call.read(object, last, parts) } else { Reading::No };
                let skipped = text.len() - object.len();
                match reading {
                    Reading::Wait => Step::Wait,
                    Reading::Read(bytes) => {
                        *self = Llama::Inside(std::mem::take(call));
                        Step::Read(skipped + bytes)
                    }
                    Reading::Done(bytes) => {
                        *self = Llama::Between(Object::default());
                        Step::Read(skipped + bytes)
                    }
                    Reading::No | Reading::Cut => {
                        *self = Llama::Content;
                        Step::Read(0)
                    }
                }
            }
            Llama::Inside(object) => match object.read(text, last, parts) {
                Reading::Read(bytes) => Step::Read(bytes),
                Reading::Done(bytes) => {
                    *self = Llama::Between(Object::default());
                    Step::Read(bytes)
                }
                Reading::Wait | Reading::No | Reading::Cut => Step::Wait,
            },
            Llama::Content if text.is_empty() => Step::Wait,
            Llama::Content => {
                parts.content(text);
                Step::Read(text.len())
            }
        }
    }
}
