//! Calls that are JSON objects with a name and arguments.

use crate::format::{Parts, may_become};
use serde_json::Value;

/// The maximum length of the name of a function, in bytes.
const MOST_NAME: usize = 256;

/// Follows a JSON object or list to its end, without storing it.
#[derive(Clone, Debug, Default)]
pub struct Scan {
    /// The brackets that must come.
    open: Vec<u8>,
    is_text: bool,
    is_escaped: bool,
}

/// Where a scan has come to.
#[derive(Debug, PartialEq)]
pub enum Reached {
    /// The value goes on after the text.
    End,
    /// The value ends at this byte of the text.
    Done(usize),
    /// At this byte, the text is no JSON.
    Broken(usize),
}

impl Scan {
    /// Within an object that has begun.
    fn within_object() -> Scan {
        Scan { open: vec![b'}'], ..Scan::default() }
    }

    /// Goes on through `text`. A new scan begins at the bracket at which `text` begins.
    pub fn advance(&mut self, text: &str) -> Reached {
        for (at, byte) in text.bytes().enumerate() {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' if self.is_text => self.is_escaped = true,
                b'"' => self.is_text = !self.is_text,
                _ if self.is_text => {}
                b'{' => self.open.push(b'}'),
                b'[' => self.open.push(b']'),
                b'}' | b']' => {
                    if self.open.pop() != Some(byte) {
                        return Reached::Broken(at);
                    }
                    if self.open.is_empty() {
                        return Reached::Done(at + 1);
                    }
                }
                b',' | b':' | b'-' | b'+' | b'.' => {}
                byte if byte.is_ascii_alphanumeric() || byte.is_ascii_whitespace() => {}
                _ => return Reached::Broken(at),
            }
        }
        Reached::End
    }
}

/// Gives arguments to the call that has begun, up to the end of their object. `None` if there is nothing to read, otherwise how many bytes were read,
/// and whether the arguments have ended.
pub fn arguments(scan: &mut Scan, text: &str, parts: &mut Parts) -> Option<(usize, bool)> {
    let (end, has_ended) = match scan.advance(text) {
        Reached::End => (text.len(), false),
        Reached::Done(end) | Reached::Broken(end) => (end, true),
    };
    parts.arguments(&text[..end]);
    if has_ended {
        parts.end_call();
    }
    (has_ended || end > 0).then_some((end, has_ended))
}

/// A call that is an object: `{"name": …, "arguments": {…}}`.
#[derive(Debug, Default)]
pub enum Object {
    /// At the beginning of the object.
    #[default]
    Head,
    /// Within an object whose name does not come first, which is read as a whole. The scan has come to a byte of the text.
    Whole(Scan, usize),
    /// Within its arguments.
    Arguments(Scan),
    /// After its arguments.
    Rest(Scan),
}

/// What was read of an object.
#[derive(Debug, PartialEq)]
pub enum Reading {
    /// Needs more text.
    Wait,
    /// This many bytes.
    Read(usize),
    /// This many bytes, and the object has ended.
    Done(usize),
    /// The text is no call.
    No,
    /// The text ends before the call begins.
    Cut,
}

impl Object {
    /// Reads from `text`, which begins as in earlier calls that have read nothing. If the object begins with the name and then the arguments, the call
    /// begins before its arguments have ended.
    pub fn read(&mut self, text: &str, last: bool, parts: &mut Parts) -> Reading {
        match self {
            Object::Head => match head(text) {
                Head::More if last => Reading::Cut,
                Head::More => Reading::Wait,
                Head::Call(name, end) => {
                    parts.call(&name, None);
                    *self = Object::Arguments(Scan::default());
                    Reading::Read(end)
                }
                Head::Other => {
                    *self = Object::Whole(Scan::default(), 0);
                    self.read(text, last, parts)
                }
            },
            Object::Whole(scan, at) => match scan.advance(&text[*at..]) {
                Reached::End if last => Reading::Cut,
                Reached::End => {
                    *at = text.len();
                    Reading::Wait
                }
                Reached::Broken(_) => Reading::No,
                Reached::Done(end) => {
                    let end = *at + end;
                    match serde_json::from_str(&text[..end]).ok().as_ref().and_then(whole) {
                        Some((name, arguments)) => {
                            parts.whole_call(&name, &arguments);
                            Reading::Done(end)
                        }
                        None => Reading::No,
                    }
                }
            },
            Object::Arguments(scan) => match arguments(scan, text, parts) {
                None => Reading::Wait,
                Some((end, has_ended)) => {
                    if has_ended {
                        *self = Object::Rest(Scan::within_object());
                    }
                    Reading::Read(end)
                }
            },
            Object::Rest(scan) => match scan.advance(text) {
                Reached::End if text.is_empty() => Reading::Wait,
                Reached::End => Reading::Read(text.len()),
                Reached::Done(end) | Reached::Broken(end) => Reading::Done(end),
            },
        }
    }
}

/// Returns the name and the arguments of a call that is an object.
fn whole(value: &Value) -> Option<(String, String)> {
    let arguments = value.get("arguments").or_else(|| value.get("parameters"))?;
    let arguments = match arguments {
        Value::Object(_) => arguments.to_string(),
        // Some models write the object as a text.
        Value::String(text) => serde_json::from_str::<Value>(text).ok().filter(Value::is_object)?.to_string(),
        _ => return None,
    };
    Some((value.get("name")?.as_str()?.into(), arguments))
}

/// What the beginning of an object is.
enum Head {
    /// It may become the head of a call.
    More,
    /// It is no head of a call whose name comes first.
    Other,
    /// The name of a call, and where the object of its arguments begins.
    Call(String, usize),
}

fn head(text: &str) -> Head {
    let mut rest = text;
    for expected in ["{", "\"name\"", ":"] {
        match skip(rest, expected) {
            Ok(after) => rest = after,
            Err(head) => return head,
        }
    }
    rest = rest.trim_start();
    if rest.is_empty() {
        return Head::More;
    }
    let mut names = serde_json::Deserializer::from_str(rest).into_iter::<String>();
    let name = match names.next() {
        Some(Ok(name)) if name.len() <= MOST_NAME => name,
        Some(Err(error)) if error.is_eof() && rest.len() <= MOST_NAME => return Head::More,
        _ => return Head::Other,
    };
    rest = &rest[names.byte_offset()..];
    rest = match skip(rest, ",") {
        Ok(after) => after,
        Err(head) => return head,
    };
    let keys = ["\"arguments\"", "\"parameters\""].map(|key| skip(rest, key));
    rest = match keys {
        [Ok(after), _] | [_, Ok(after)] => after,
        [Err(Head::More), _] | [_, Err(Head::More)] => return Head::More,
        _ => return Head::Other,
    };
    rest = match skip(rest, ":") {
        Ok(after) => after.trim_start(),
        Err(head) => return head,
    };
    match rest.chars().next() {
        None => Head::More,
        Some('{') => Head::Call(name, text.len() - rest.len()),
        Some(_) => Head::Other,
    }
}

/// Returns the text after `expected` and white space before it.
fn skip<'a>(text: &'a str, expected: &str) -> std::result::Result<&'a str, Head> {
    let text = text.trim_start();
    match text.strip_prefix(expected) {
        Some(rest) => Ok(rest),
        None if may_become(text, expected) => Err(Head::More),
        None => Err(Head::Other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An object whose name comes last waits until it is complete, and no byte is scanned twice.
    #[test]
    fn a_growing_object_is_scanned_once() {
        let text = format!(r#"{{"arguments": {{"a": "{}"}}, "name": "dive"}}"#, "x".repeat(1000));
        let (mut object, mut parts) = (Object::default(), Parts::new(1));
        for end in 20..text.len() {
            assert_eq!(object.read(&text[..end], false, &mut parts), Reading::Wait);
            assert!(matches!(object, Object::Whole(_, at) if at == end));
        }
        assert_eq!(object.read(&text, false, &mut parts), Reading::Done(text.len()));
        assert_eq!(parts.take().len(), 3);
    }
}
