//! `<tool_call>{"name": …, "arguments": …}</tool_call>` for each call: Hermes, Qwen2.5 and Qwen3.

use super::json::{Object, Reading};
use crate::format::{Format, Parts, Step, before};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// Reads calls between markers.
#[derive(Default)]
pub enum Hermes {
    #[default]
    Outside,
    Inside(Object),
    /// After the object of a call.
    Ending,
}

impl Format for Hermes {
    fn read(&mut self, text: &str, last: bool, parts: &mut Parts) -> Step {
        match self {
            Hermes::Outside => {
                if let Err(step) = before(text, &[OPEN], last, |text| parts.content(text)) {
                    return step;
                }
                let inside = text[OPEN.len()..].trim_start();
                let skipped = text.len() - inside.len();
                let mut object = Object::default();
                match object.read(inside, last, parts) {
                    Reading::Wait => Step::Wait,
                    Reading::Read(bytes) => {
                        *self = Hermes::Inside(object);
                        Step::Read(skipped + bytes)
                    }
                    Reading::Done(bytes) => {
                        *self = Hermes::Ending;
                        Step::Read(skipped + bytes)
                    }
                    Reading::No => {
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
                Reading::Wait | Reading::No => Step::Wait,
            },
            Hermes::Ending => match before(text, &[OPEN, CLOSE], last, |_| {}) {
                Err(step) => step,
                Ok(marker) => {
                    *self = Hermes::Outside;
                    Step::Read(if marker == CLOSE { CLOSE.len() } else { 0 })
                }
            },
        }
    }
}
