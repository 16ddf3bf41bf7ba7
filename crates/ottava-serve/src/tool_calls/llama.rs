//! The whole text is `{"name": …, "parameters": …}`, or several such objects separated by semicolons: Llama 3.1 to 3.3.

use super::json::{Object, Reading};
use crate::format::{Format, Parts, Step, may_become};

const MARKER: &str = "<|python_tag|>";

/// Reads objects. A text that begins otherwise is content.
#[derive(Default)]
pub enum Llama {
    #[default]
    Start,
    Inside(Object),
    /// After a call.
    Between,
    /// The rest of the text is content.
    Content,
}

impl Format for Llama {
    fn read(&mut self, text: &str, last: bool, parts: &mut Parts) -> Step {
        match self {
            Llama::Start | Llama::Between => {
                let is_first = matches!(self, Llama::Start);
                let begins = text.trim_start();
                let begins =
                    if is_first { begins } else { begins.strip_prefix([';', ',']).unwrap_or(begins).trim_start() };
                let object = begins.strip_prefix(MARKER).unwrap_or(begins).trim_start();
                if (object.is_empty() || may_become(object, MARKER)) && !last {
                    return Step::Wait;
                }
                let mut call = Object::default();
                let reading = if object.starts_with('{') { call.read(object, last, parts) } else { Reading::No };
                let skipped = text.len() - object.len();
                match reading {
                    Reading::Wait => Step::Wait,
                    Reading::Read(bytes) => {
                        *self = Llama::Inside(call);
                        Step::Read(skipped + bytes)
                    }
                    Reading::Done(bytes) => {
                        *self = Llama::Between;
                        Step::Read(skipped + bytes)
                    }
                    Reading::No => {
                        *self = Llama::Content;
                        Step::Read(0)
                    }
                }
            }
            Llama::Inside(object) => match object.read(text, last, parts) {
                Reading::Read(bytes) => Step::Read(bytes),
                Reading::Done(bytes) => {
                    *self = Llama::Between;
                    Step::Read(bytes)
                }
                Reading::Wait | Reading::No => Step::Wait,
            },
            Llama::Content if text.is_empty() => Step::Wait,
            Llama::Content => {
                parts.content(text);
                Step::Read(text.len())
            }
        }
    }
}
