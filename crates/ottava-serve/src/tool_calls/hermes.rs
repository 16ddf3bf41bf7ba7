//! `<tool_call>{"name": …, "arguments": …}</tool_call>` for each call: Hermes, Qwen2.5 and Qwen3.

use super::json::{Object, Reading};
use crate::format::{Format, Parts, Step, before};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// Reads calls between markers.
pub enum Hermes {
    /// Outside of calls, or at the beginning of an object that may become a call.
    Outside(Object),
    Inside(Object),
    /// After the object of a call.
    Ending,
}

impl Default for Hermes {
    fn default() -> Hermes {
        Hermes::Outside(Object::default())
    }
}

impl Format for Hermes {
    fn read(&mut self, text: &str, last: bool, parts: &mut Parts) -> Step {
        match self {
            Hermes::Outside(object) => {
                if let Err(step) = before(text, &[OPEN], last, |text| parts.content(text)) {
                    return step;
                }
                let inside = text[OPEN.len()..].trim_start();
                let skipped = text.len() - inside.len();
                match object.read(inside, last, parts) {
                    Reading::Wait => Step::Wait,
                    Reading::Read(bytes) => {
                        *self = Hermes::Inside(std::mem::take(object));
                        Step::Read(skipped + bytes)
                    }
                    Reading::Done(bytes) => {
                        *self = Hermes::Ending;
                        Step::Read(skipped + bytes)
                    }
                    Reading::No | Reading::Cut => {
                        *object = Object::default();
                        parts.content(OPEN);
                        Step::Read(OPEN.len())
                    }
                }
            }
            Hermes::Inside(object) => match object.read(text, last, parts) {
                Reading::Read(bytes) => Step::Read(bytes),
                Reading::Done(bytes) => {
                    *self = Hermes::Ending;
                    Step::Read(bytes)
                }
                Reading::Wait | Reading::No | Reading::Cut => Step::Wait,
            },
            Hermes::Ending => match before(text, &[OPEN, CLOSE], last, |_| {}) {
                Err(step) => step,
                Ok(marker) => {
                    *self = Hermes::default();
                    Step::Read(if marker == CLOSE { CLOSE.len() } else { 0 })
                }
            },
        }
    }
}
