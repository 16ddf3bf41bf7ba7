//! The whole text is a JSON list of calls, to which an answer is constrained.

use super::json::{Object, Reading};
use crate::format::{Format, Parts, Step};

/// Reads the objects of a list.
pub enum List {
    /// Before the list, which may begin with this object.
    Start(Object),
    /// Between objects.
    Between,
    Inside(Object),
    /// After the list, or in a text that is no list. What follows is content.
    After,
}

impl Default for List {
    fn default() -> List {
        List::Start(Object::default())
    }
}

impl Format for List {
    fn read(&mut self, text: &str, last: bool, parts: &mut Parts) -> Step {
        match self {
            List::Start(object) => {
                let rest = text.trim_start();
                let Some(objects) = rest.strip_prefix('[') else {
                    if rest.is_empty() && !last {
                        return Step::Wait;
                    }
                    *self = List::After;
                    return Step::Read(0);
                };
                let inside = objects.trim_start();
                let reading = object.read(inside, last, parts);
                let object = std::mem::take(object);
                self.go_on(object, reading, text.len() - inside.len(), text.len())
            }
            List::Between => {
                let rest = text.trim_start_matches(|c: char| c.is_whitespace() || c == ',');
                match rest.chars().next() {
                    None if text.is_empty() => return Step::Wait,
                    None => return Step::Read(text.len()),
                    Some('{') => *self = List::Inside(Object::default()),
                    Some(']') => {
                        *self = List::After;
                        return Step::Read(text.len() - rest.len() + 1);
                    }
                    Some(_) => *self = List::After,
                }
                Step::Read(text.len() - rest.len())
            }
            List::Inside(object) => {
                let reading = object.read(text, last, parts);
                let object = std::mem::take(object);
                self.go_on(object, reading, 0, text.len())
            }
            List::After => Step::Next,
        }
    }
}

impl List {
    /// Goes on after `reading`, which began after `skipped` of the `whole` bytes of the text.
    fn go_on(&mut self, object: Object, reading: Reading, skipped: usize, whole: usize) -> Step {
        let (list, step) = match reading {
            Reading::Wait => {
                // A list whose first object is incomplete has not begun.
                *self = if matches!(self, List::Start(_)) { List::Start(object) } else { List::Inside(object) };
                return Step::Wait;
            }
            Reading::Read(bytes) => (List::Inside(object), Step::Read(skipped + bytes)),
            Reading::Done(bytes) => (List::Between, Step::Read(skipped + bytes)),
            Reading::No => (List::After, Step::Read(0)),
            // A call that is cut before its arguments is no content.
            Reading::Cut => (List::After, Step::Read(whole)),
        };
        *self = list;
        step
    }
}
