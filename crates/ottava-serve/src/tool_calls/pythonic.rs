//! The whole text is a Python list of calls, `[NAME(KEY=VALUE, …), …]`: Llama 4, and the small models of Llama 3.2.

use crate::format::{Format, Parts, Step, may_become};
use crate::json::{ListText, text as json};

const OPEN: &str = "<|python_start|>";
const CLOSE: &str = "<|python_end|>";
/// The maximum depth of lists and objects in an argument.
const MOST_DEPTH: usize = 64;

/// Reads a list of calls. A text that begins otherwise is content.
pub enum Pythonic {
    /// At the beginning of the text, whose first call is followed.
    Start(Follow),
    /// Between calls, the next of which is followed.
    Between(Follow),
    /// The rest of the text is content.
    Content,
}

impl Default for Pythonic {
    fn default() -> Pythonic {
        Pythonic::Start(Follow::default())
    }
}

impl Format for Pythonic {
    fn read(&mut self, text: &str, last: bool, parts: &mut Parts) -> Step {
        match self {
            Pythonic::Start(follow) => {
                let begins = text.trim_start();
                let list = begins.strip_prefix(OPEN).unwrap_or(begins).trim_start();
                if (list.is_empty() || may_become(list, OPEN)) && !last {
                    return Step::Wait;
                }
                let first = list.strip_prefix('[');
                if first.is_some_and(|first| !follow.is_due(first)) && !last {
                    return Step::Wait;
                }
                match first.map(call) {
                    Some(Err(Wrong::Incomplete)) if !last => return Step::Wait,
                    Some(Ok(_)) => {
                        *self = Pythonic::Between(Follow::default());
                        return Step::Read(text.len() - list.len() + 1);
                    }
                    _ => *self = Pythonic::Content,
                }
                Step::Read(0)
            }
            Pythonic::Between(follow) => {
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
                if !follow.is_due(begins) && !last {
                    return Step::Wait;
                }
                match call(begins) {
                    Ok((name, arguments, bytes)) => {
                        *follow = Follow::default();
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

/// Follows a call to the bracket that closes it. So a call that is received in many parts is not parsed at each part.
#[derive(Default)]
pub struct Follow {
    /// Where the text was followed to.
    at: usize,
    /// The number of open brackets.
    open: usize,
    quote: Option<u8>,
    is_escaped: bool,
    /// The length of the text at which it is parsed next, even if no bracket closes the call: it may be no call.
    due: usize,
}

impl Follow {
    /// Whether `text` is to be parsed. It begins as in earlier calls.
    fn is_due(&mut self, text: &str) -> bool {
        let mut closes = false;
        for &byte in &text.as_bytes()[self.at..] {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' if self.quote.is_some() => self.is_escaped = true,
                byte if self.quote == Some(byte) => self.quote = None,
                _ if self.quote.is_some() => {}
                b'\'' | b'"' => self.quote = Some(byte),
                b'(' | b'[' | b'{' => self.open += 1,
                b')' | b']' | b'}' => {
                    self.open = self.open.saturating_sub(1);
                    closes |= self.open == 0;
                }
                _ => {}
            }
        }
        self.at = text.len();
        let is_due = closes || text.len() >= self.due;
        if is_due {
            self.due = 2 * text.len();
        }
        is_due
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
    let mut arguments = Vec::new();
    loop {
        if reader.next()? == ')' {
            reader.at += 1;
            return Ok((name, object(&arguments), reader.at));
        }
        let key = reader.name()?.to_string();
        reader.expect('=')?;
        arguments.push((key, reader.value(0)?));
        if reader.next()? == ',' {
            reader.at += 1;
        }
    }
}

/// The JSON of an object with these keys, whose values are JSON.
fn object(fields: &[(String, String)]) -> String {
    let fields: Vec<String> = fields.iter().map(|(key, value)| format!("{}:{value}", json(key))).collect();
    format!("{{{}}}", fields.join(","))
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
                let mut fields = Vec::new();
                while self.next()? != '}' {
                    let key = match self.next()? {
                        '\'' | '"' => self.quoted()?,
                        _ => return Err(Wrong::Other),
                    };
                    self.expect(':')?;
                    fields.push((key, self.value(depth + 1)?));
                    self.comma('}')?;
                }
                self.at += 1;
                Ok(object(&fields))
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A call of 100,000 bytes that comes byte by byte is parsed at a few of them.
    #[test]
    fn a_growing_call_is_parsed_a_few_times() {
        let text = format!("dive(a=[{}], b='{}')", "(1), ".repeat(10_000), "x)".repeat(25_000));
        let mut follow = Follow::default();
        let due: Vec<usize> = (1..=text.len()).filter(|&end| follow.is_due(&text[..end])).collect();
        assert!(due.len() < 30 && due.iter().sum::<usize>() < 4 * text.len(), "{due:?}");
        assert_eq!(due.last(), Some(&text.len()), "it is parsed when it is complete");
    }
}
