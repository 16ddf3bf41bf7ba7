//! `[TOOL_CALLS][{"name": …, "arguments": …}, …]` (earlier models of Mistral), or `[TOOL_CALLS]NAME[ARGS]{…}` for each call (newer models).

use super::json::{Object, Reading, Scan, arguments};
use super::list::List;
use crate::format::{Format, Parts, Step, before, partial, start_of};

const MARKER: &str = "[TOOL_CALLS]";
/// The marker before the arguments of a call in newer models. Some of them write an id between the name and this marker, after [`ID`].
const ARGS: &str = "[ARGS]";
const ID: &str = "[CALL_ID]";
/// The maximum length of a name with an id, in bytes.
const MOST_NAME: usize = 512;

/// Reads calls after markers.
pub enum Mistral {
    /// Outside of calls, or at the beginning of an object that may become a call.
    Outside(Object),
    List(List),
    /// Within the arguments of a call whose name has no object around it.
    Arguments(Scan),
}

impl Default for Mistral {
    fn default() -> Mistral {
        Mistral::Outside(Object::default())
    }
}

impl Format for Mistral {
    fn read(&mut self, text: &str, last: bool, parts: &mut Parts) -> Step {
        match self {
            Mistral::Outside(object) => {
                if let Err(step) = before(text, &[MARKER], last, |text| parts.content(text)) {
                    return step;
                }
                let after = text[MARKER.len()..].trim_start();
                let skipped = text.len() - after.len();
                let step = match after.chars().next() {
                    None => None,
                    Some('[' | '{') => {
                        let inside = after.trim_start_matches(|c: char| c == '[' || c.is_whitespace());
                        match object.read(inside, last, &mut Parts::new(1)) {
                            Reading::Wait => return Step::Wait,
                            Reading::No | Reading::Cut => {
                                *object = Object::default();
                                None
                            }
                            _ => {
                                *self =
                                    Mistral::List(if after.starts_with('[') { List::default() } else { List::Between });
                                return Step::Read(skipped);
                            }
                        }
                    }
                    Some(_) => {
                        let step = named(after, parts);
                        if matches!(step, Some(Step::Read(_))) {
                            *self = Mistral::Arguments(Scan::default());
                        }
                        step
                    }
                };
                match step {
                    Some(Step::Read(bytes)) => Step::Read(skipped + bytes),
                    Some(step) if !last => step,
                    None if after.is_empty() && !last => Step::Wait,
                    _ => {
                        parts.content(MARKER);
                        Step::Read(MARKER.len())
                    }
                }
            }
            Mistral::List(list) => match list.read(text, last, parts) {
                Step::Next => {
                    *self = Mistral::default();
                    Step::Read(0)
                }
                step => step,
            },
            Mistral::Arguments(scan) => match arguments(scan, text, parts) {
                None => Step::Wait,
                Some((end, has_ended)) => {
                    if has_ended {
                        *self = Mistral::default();
                    }
                    Step::Read(end)
                }
            },
        }
    }
}

/// Reads `NAME[ARGS]` before an object, and begins the call. `None` if the text is no name.
fn named(text: &str, parts: &mut Parts) -> Option<Step> {
    let is_name = |name: &str| {
        !name.is_empty() && name.len() <= MOST_NAME && !name.contains(|c: char| c.is_whitespace() || c == '[')
    };
    let longest = 2 * MOST_NAME;
    let Some((head, _)) = start_of(text, longest).split_once(ARGS) else {
        let begun = text[..text.len() - partial(text, &[ARGS, ID])].split(ID).next()?.trim_end();
        let may_be_name = begun.is_empty() || is_name(begun);
        return (may_be_name && text.len() < longest).then_some(Step::Wait);
    };
    let (name, id) = match head.split_once(ID) {
        Some((name, id)) => (name.trim(), Some(id.trim().to_string())),
        None => (head.trim(), None),
    };
    let object = text[head.len() + ARGS.len()..].trim_start();
    match object.chars().next() {
        _ if !is_name(name) => None,
        None => Some(Step::Wait),
        Some('{') => {
            parts.call(name, id);
            Some(Step::Read(text.len() - object.len()))
        }
        Some(_) => None,
    }
}
