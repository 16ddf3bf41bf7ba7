//! Splits a template into tokens. White space around tags is treated like in Jinja: with `trim_blocks` and `lstrip_blocks`, or without them.

use std::sync::Arc;

use num_bigint::BigInt;

use crate::error::{Failure, Result};
use crate::number;
use crate::text::{is_space, trim_end, trim_start};
use crate::value::Value;

/// A token, and its line from 1.
#[derive(Clone, Debug)]
pub(crate) struct Token {
    pub(crate) kind: Kind,
    pub(crate) line: usize,
}

#[derive(Clone, Debug)]
pub(crate) enum Kind {
    /// Text outside of tags.
    Data(String),
    VariableBegin,
    VariableEnd,
    BlockBegin,
    BlockEnd,
    Name(Arc<str>),
    Text(String),
    Number(Value),
    Op(&'static str),
    End,
}

/// The operators; longer operators first.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".",
    ":", "|", ",", ";",
];

/// The treatment of white space around blocks and comments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whitespace {
    /// `trim_blocks` and `lstrip_blocks`. The last newline of the template is dropped.
    Trimmed,
    /// White space stays, with the last newline (`keep_trailing_newline`).
    Kept,
}

/// Returns the tokens of `source`.
pub(crate) fn tokens(source: &str, whitespace: Whitespace) -> Result<Vec<Token>> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let trims = whitespace == Whitespace::Trimmed;
    let source = source.strip_suffix('\n').filter(|_| trims).unwrap_or(&source);
    let mut lexer = Lexer { rest: source, line: 1, at_line_start: true, trims, tokens: Vec::new() };
    while lexer.tag()? {}
    let rest = lexer.rest;
    lexer.data(rest);
    lexer.push(Kind::End);
    Ok(lexer.tokens)
}

struct Lexer<'a> {
    rest: &'a str,
    line: usize,
    /// Whether the text up to this position ends with a newline.
    at_line_start: bool,
    /// Whether blocks and comments remove white space without a sign.
    trims: bool,
    tokens: Vec<Token>,
}

impl<'a> Lexer<'a> {
    fn push(&mut self, kind: Kind) {
        self.tokens.push(Token { kind, line: self.line });
    }

    fn data(&mut self, text: &str) {
        if !text.is_empty() {
            self.push(Kind::Data(text.into()));
        }
    }

    fn fail<T>(&self, reason: impl Into<String>) -> Result<T> {
        Err(Failure { reason: reason.into(), line: self.line })
    }

    /// Skips the first `bytes` of the rest, and returns them.
    fn skip(&mut self, bytes: usize) -> &'a str {
        let (skipped, rest) = self.rest.split_at(bytes);
        self.line += skipped.matches('\n').count();
        self.at_line_start = skipped.ends_with('\n');
        self.rest = rest;
        skipped
    }

    /// Reads up to the end of the next tag. Returns false if there is no tag.
    fn tag(&mut self) -> Result<bool> {
        let starts = self.rest.match_indices('{').map(|(at, _)| at);
        let mut starts = starts.filter(|at| matches!(self.rest.as_bytes().get(at + 1), Some(b'%' | b'{' | b'#')));
        let Some(at) = starts.next() else { return Ok(false) };
        let (text, tag) = self.rest.split_at(at);
        let (kind, sign) = (tag.as_bytes()[1], tag[2..].chars().next().filter(|c| matches!(c, '-' | '+')));
        let text = before_tag(text, sign, kind != b'{' && self.trims, self.at_line_start);
        self.data(text);
        let raw = if kind == b'%' { raw_begin(tag) } else { None };
        self.skip(at + raw.unwrap_or(2 + sign.map_or(0, char::len_utf8)));
        match kind {
            b'#' => self.comment()?,
            b'%' if raw.is_some() => self.raw()?,
            b'%' => self.expression(Kind::BlockBegin)?,
            _ => self.expression(Kind::VariableBegin)?,
        }
        Ok(true)
    }

    fn comment(&mut self) -> Result<()> {
        let Some(end) = self.rest.find("#}") else { return self.fail("a comment has no end, `#}`") };
        let sign = self.rest[..end].chars().next_back();
        self.skip(end + 2);
        self.after_tag(sign, true);
        Ok(())
    }

    /// Skips white space after a tag that ended with `sign`: all of it after `-`; otherwise, one newline after a block or comment.
    fn after_tag(&mut self, sign: Option<char>, trims_newline: bool) {
        let bytes = match sign {
            Some('-') => self.rest.len() - trim_start(self.rest).len(),
            Some('+') => 0,
            _ => usize::from(trims_newline && self.trims && self.rest.starts_with('\n')),
        };
        if bytes > 0 {
            self.skip(bytes);
        }
    }

    /// Reads the text of a `{% raw %}` block, after its first tag.
    fn raw(&mut self) -> Result<()> {
        let ends = self.rest.match_indices("{%").find_map(|(at, _)| Some((at, raw_end(&self.rest[at..])?)));
        let Some((at, (sign, length, last))) = ends else { return self.fail("`{% raw %}` has no `{% endraw %}`") };
        let text = before_tag(&self.rest[..at], sign, self.trims, self.at_line_start);
        self.data(text);
        self.skip(at + length);
        self.after_tag(last, true);
        Ok(())
    }

    /// Reads the tokens of a tag, after the beginning of the tag.
    fn expression(&mut self, begin: Kind) -> Result<()> {
        let is_block = matches!(begin, Kind::BlockBegin);
        let end = if is_block { "%}" } else { "}}" };
        self.push(begin);
        let mut open = Vec::new();
        loop {
            let space = self.rest.len() - trim_start(self.rest).len();
            if space > 0 {
                self.skip(space);
            }
            if open.is_empty() {
                let sign = self.rest.chars().next().filter(|c| *c == '-' || *c == '+' && is_block);
                let sign = sign.filter(|_| self.rest[1..].starts_with(end));
                if sign.is_some() || self.rest.starts_with(end) {
                    self.push(if is_block { Kind::BlockEnd } else { Kind::VariableEnd });
                    self.skip(2 + sign.map_or(0, char::len_utf8));
                    self.after_tag(sign, is_block);
                    return Ok(());
                }
            }
            self.token(&mut open)?;
        }
    }

    /// Reads one token within a tag. `open` has the brackets that are not closed yet.
    fn token(&mut self, open: &mut Vec<&'static str>) -> Result<()> {
        let Some(first) = self.rest.chars().next() else { return self.fail("a tag has no end") };
        if first == '\'' || first == '"' {
            return self.string(first);
        }
        if first.is_ascii_digit() {
            return self.number();
        }
        if first.is_alphabetic() || first == '_' {
            let length = self.rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(self.rest.len());
            self.push(Kind::Name(self.rest[..length].into()));
            self.skip(length);
            return Ok(());
        }
        let Some(op) = OPERATORS.into_iter().find(|op| self.rest.starts_with(op)) else {
            return self.fail(format!("unexpected character {first:?}"));
        };
        match op {
            "(" => open.push(")"),
            "[" => open.push("]"),
            "{" => open.push("}"),
            ")" | "]" | "}" if open.pop() != Some(op) => return self.fail(format!("unexpected `{op}`")),
            _ => {}
        }
        self.push(Kind::Op(op));
        self.skip(op.len());
        Ok(())
    }

    fn number(&mut self) -> Result<()> {
        let bytes = self.rest.as_bytes();
        let radix = match bytes.get(1).map(u8::to_ascii_lowercase) {
            Some(b'x') if bytes[0] == b'0' => 16,
            Some(b'o') if bytes[0] == b'0' => 8,
            Some(b'b') if bytes[0] == b'0' => 2,
            _ => 10,
        };
        let digits = |from: usize, radix: u32| {
            let is_digit = |c: &u8| char::from(*c).is_digit(radix) || *c == b'_';
            from + bytes[from..].iter().take_while(|c| is_digit(c)).count()
        };
        let is_digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
        let start = if radix == 10 { 0 } else { 2 };
        let mut end = digits(start, radix);
        let mut is_float = false;
        if radix == 10 && bytes.get(end) == Some(&b'.') && is_digit(end + 1) {
            (end, is_float) = (digits(end + 1, 10), true);
        }
        if radix == 10 && matches!(bytes.get(end), Some(b'e' | b'E')) {
            let sign = usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
            if is_digit(end + 1 + sign) {
                (end, is_float) = (digits(end + 1 + sign, 10), true);
            }
        }
        let text = self.rest[start..end].replace('_', "");
        let value = match is_float {
            true => text.parse().ok().map(Value::Float),
            false => BigInt::parse_bytes(text.as_bytes(), radix).map(number::integer),
        };
        let Some(value) = value else { return self.fail(format!("{:?} is no number", &self.rest[..end])) };
        self.push(Kind::Number(value));
        self.skip(end);
        Ok(())
    }

    fn string(&mut self, quote: char) -> Result<()> {
        let mut escaped = false;
        let end = self.rest.char_indices().skip(1).find(|(_, c)| {
            let ends = *c == quote && !escaped;
            escaped = *c == '\\' && !escaped;
            ends
        });
        let Some((end, _)) = end else { return self.fail("a text in quotes has no end") };
        let text = match unescape(&self.rest[1..end]) {
            Ok(text) => text,
            Err(reason) => return self.fail(reason),
        };
        self.push(Kind::Text(text));
        self.skip(end + 1);
        Ok(())
    }
}

/// Returns the text before a tag, without the white space that the tag removes: with `-`, all of it; before a block, the white space at the start of
/// the block's line.
fn before_tag(text: &str, sign: Option<char>, is_block: bool, at_line_start: bool) -> &str {
    if sign == Some('-') {
        return trim_end(text);
    }
    let line = text.rfind('\n').map_or(0, |newline| newline + 1);
    let strips = is_block && sign.is_none() && (line > 0 || at_line_start) && text[line..].chars().all(is_space);
    if strips { &text[..line] } else { text }
}

/// Returns the length of a `{% raw %}` tag at the start of `tag`, including the white space that it removes.
fn raw_begin(tag: &str) -> Option<usize> {
    let inner = tag[2..].strip_prefix(['-', '+']).unwrap_or(&tag[2..]);
    let after = trim_start(trim_start(inner).strip_prefix("raw")?);
    let rest = match after.strip_prefix("-%}") {
        Some(rest) => trim_start(rest),
        None => after.strip_prefix("%}")?,
    };
    Some(tag.len() - rest.len())
}

/// Returns the first sign, the length and the last sign of an `{% endraw %}` tag at the start of `tag`.
fn raw_end(tag: &str) -> Option<(Option<char>, usize, Option<char>)> {
    let sign = tag[2..].chars().next().filter(|c| matches!(c, '-' | '+'));
    let inner = &tag[2 + sign.map_or(0, char::len_utf8)..];
    let after = trim_start(trim_start(inner).strip_prefix("endraw")?);
    let last = after.chars().next().filter(|c| matches!(c, '-' | '+'));
    let rest = after[last.map_or(0, char::len_utf8)..].strip_prefix("%}")?;
    Some((sign, tag.len() - rest.len(), last))
}

/// Replaces Python's escapes in a text. Unknown escapes are kept.
fn unescape(text: &str) -> Result<String, String> {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        let digits = |count: usize, chars: &mut std::str::Chars| {
            let digits: String = chars.clone().take(count).collect();
            let code = u32::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == count);
            let c = code.and_then(char::from_u32).ok_or_else(|| format!("the escape \\…{digits} is no character"))?;
            *chars = chars.as_str()[digits.len()..].chars();
            Ok::<char, String>(c)
        };
        match chars.next() {
            Some('n') => out.push('\n'),
            Some('t') => out.push('\t'),
            Some('r') => out.push('\r'),
            Some('a') => out.push('\u{7}'),
            Some('b') => out.push('\u{8}'),
            Some('f') => out.push('\u{c}'),
            Some('v') => out.push('\u{b}'),
            Some(quoted @ ('\\' | '\'' | '"')) => out.push(quoted),
            Some('\n') => {}
            Some('x') => out.push(digits(2, &mut chars)?),
            Some('u') => out.push(digits(4, &mut chars)?),
            Some('U') => out.push(digits(8, &mut chars)?),
            Some(first @ '0'..='7') => {
                let more = chars.as_str().chars().take(2).take_while(|c| ('0'..='7').contains(c)).count();
                let octal = format!("{first}{}", &chars.as_str()[..more]);
                out.extend(u32::from_str_radix(&octal, 8).ok().and_then(char::from_u32));
                chars = chars.as_str()[more..].chars();
            }
            Some(other) => out.extend(['\\', other]),
            None => out.push('\\'),
        }
    }
    Ok(out)
}
