//! The whole text is a Python list of calls, `[NAME(KEY=VALUE, …), …]`: Llama 4, and the small models of Llama 3.2.

use crate::format::{Format, Parts, Step, may_become};
use crate::json::{ListText, ObjectText, text as json};

const OPEN: &str = "<|python_start|>";
const CLOSE: &str = "<|python_end|>";
/// The maximum depth of lists and objects in an argument.
const MOST_DEPTH: usize = 64;

/// Reads a list of calls. A text that begins otherwise is content.
#[derive(Default)]
pub enum Pythonic {
    #[default]
    Start,
    Between,
    /// The rest of the text is content.
    Content,
}

impl Format for Pythonic {
    fn read(&mut self, text: &str, last: bool, parts: &mut Parts) -> Step {
        match self {
            Pythonic::Start => {
                let begins = text.trim_start();
                let list = begins.strip_prefix(OPEN).unwrap_or(begins).trim_start();
                if (list.is_empty() || may_become(list, OPEN)) && !last {
                    return Step::Wait;
                }
                match list.strip_prefix('[').map(call) {
                    Some(Err(Wrong::Incomplete)) if !last => return Step::Wait,
                    Some(Ok(_)) => {
                        *self = Pythonic::Between;
                        return Step::Read(text.len() - list.len() + 1);
                    }
                    _ => *self = Pythonic::Content,
                }
                Step::Read(0)
            }
            Pythonic::Between => {
                let begins = text.trim_start_matches(|c: char| c.is_whitespace() || c == ',');
                match text.len() - begins.len() {
                    0 if text.is_empty() => return Step::Wait,
                    0 => {}
                    skipped => return Step::Read(skipped),
                }
                if let Some(rest) = begins.strip_prefix(']') {
                    let after = rest.trim_start();
                    if may_become(after, CLOSE) && !last {
                        return Step::Wait;
                    }
                    *self = Pythonic::Content;
                    let after = after.strip_prefix(CLOSE).unwrap_or(rest);
                    return Step::Read(text.len() - after.len());
                }
                match call(begins) {
                    Ok((name, arguments, bytes)) => {
                        parts.whole_call(&name, &arguments);
                        Step::Read(bytes)
                    }
                    Err(Wrong::Incomplete) if !last => Step::Wait,
                    Err(_) => {
                        *self = Pythonic::Content;
                        Step::Read(0)
                    }
                }
            }
            Pythonic::Content if text.is_empty() => Step::Wait,
            Pythonic::Content => {
                parts.content(text);
                Step::Read(text.len())
            }
        }
    }
}

/// Why a text is not read.
enum Wrong {
    /// It ends too early.
    Incomplete,
    /// It is no call.
    Other,
}

type Read<T> = Result<T, Wrong>;

/// Reads the call at the beginning of `text`: its name, its arguments as JSON, and its length.
fn call(text: &str) -> Read<(String, String, usize)> {
    let mut reader = Python { text, at: 0 };
    let name = reader.name()?.to_string();
    reader.expect('(')?;
    let mut arguments = ObjectText::new();
    loop {
        if reader.next()? == ')' {
            reader.at += 1;
            return Ok((name, arguments.end(), reader.at));
        }
        let key = reader.name()?.to_string();
        reader.expect('=')?;
        arguments = arguments.json(&key, &reader.value(0)?);
        if reader.next()? == ',' {
            reader.at += 1;
        }
    }
}

/// Reads literals of Python.
struct Python<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Python<'a> {
    /// The next character that is no white space.
    fn next(&mut self) -> Read<char> {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start().len();
        self.text[self.at..].chars().next().ok_or(Wrong::Incomplete)
    }

    fn expect(&mut self, expected: char) -> Read<()> {
        match self.next()? == expected {
            true => {
                self.at += expected.len_utf8();
                Ok(())
            }
            false => Err(Wrong::Other),
        }
    }

    /// Characters up to one that `ends`.
    fn word(&mut self, ends: impl Fn(char) -> bool) -> Read<&'a str> {
        self.next()?;
        let rest = &self.text[self.at..];
        let end = rest.find(ends).ok_or(Wrong::Incomplete)?;
        self.at += end;
        Ok(&rest[..end])
    }

    fn name(&mut self) -> Read<&'a str> {
        let first = self.next()?;
        if !(first.is_alphabetic() || first == '_') {
            return Err(Wrong::Other);
        }
        self.word(|c| !(c.is_alphanumeric() || "_.-".contains(c)))
    }

    /// A literal as JSON.
    fn value(&mut self, depth: usize) -> Read<String> {
        if depth > MOST_DEPTH {
            return Err(Wrong::Other);
        }
        match self.next()? {
            '\'' | '"' => Ok(json(&self.quoted()?)),
            open @ ('[' | '(') => {
                let close = if open == '[' { ']' } else { ')' };
                self.at += 1;
                let mut list = ListText::default();
                while self.next()? != close {
                    list.push(&self.value(depth + 1)?);
                    self.comma(close)?;
                }
                self.at += 1;
                Ok(list.json())
            }
            '{' => {
                self.at += 1;
                let mut object = ObjectText::new();
                while self.next()? != '}' {
                    let key = match self.next()? {
                        '\'' | '"' => self.quoted()?,
                        _ => return Err(Wrong::Other),
                    };
                    self.expect(':')?;
                    object = object.json(&key, &self.value(depth + 1)?);
                    self.comma('}')?;
                }
                self.at += 1;
                Ok(object.end())
            }
            _ => match self.word(|c| c.is_whitespace() || ",)]}:".contains(c))? {
                "True" | "true" => Ok("true".into()),
                "False" | "false" => Ok("false".into()),
                "None" | "null" => Ok("null".into()),
                word => match serde_json::from_str::<serde_json::Number>(word) {
                    Ok(_) => Ok(word.to_string()),
                    Err(_) => Err(Wrong::Other),
                },
            },
        }
    }

    fn comma(&mut self, close: char) -> Read<()> {
        match self.next()? {
            ',' => self.at += 1,
            next if next == close => {}
            _ => return Err(Wrong::Other),
        }
        Ok(())
    }

    /// A text in quotes.
    fn quoted(&mut self) -> Read<String> {
        let quote = self.next()?;
        self.at += quote.len_utf8();
        let mut text = String::new();
        let mut chars = self.text[self.at..].char_indices();
        while let Some((at, c)) = chars.next() {
            match c {
                '\\' => {
                    let (_, escaped) = chars.next().ok_or(Wrong::Incomplete)?;
                    match escaped {
                        'n' => text.push('\n'),
                        't' => text.push('\t'),
                        'r' => text.push('\r'),
                        '\\' | '\'' | '"' => text.push(escaped),
                        other => text.extend(['\\', other]),
                    }
                }
                c if c == quote => {
                    self.at += at + c.len_utf8();
                    return Ok(text);
                }
                c => text.push(c),
            }
        }
        Err(Wrong::Incomplete)
    }
}
