//! Methods of Python's texts.

use std::sync::Arc;

use crate::arguments::{Argument, CallArguments, count};
use crate::error::{Result, fail};
use crate::limits::{Limits, Writer};
use crate::text::{is_printable, is_space};
use crate::value::Value;
use crate::{format, items, text};

const OF_TEXTS: &[&str] = &[
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "upper",
    "zfill",
];

/// Whether texts have a method `name`.
pub(crate) fn exists(name: &str) -> bool {
    OF_TEXTS.contains(&name)
}

/// Calls `text.name(arguments)`.
pub(crate) fn call(text: &Arc<str>, name: &str, arguments: &CallArguments, limits: &Limits) -> Result<Value> {
    if let Some(tested) = character_test(name, text) {
        arguments.bind::<0>(name, [])?;
        return Ok(Value::Bool(tested));
    }
    match name {
        "format" => format::format(text, arguments, limits),
        "upper" | "lower" | "casefold" | "capitalize" | "title" | "swapcase" => {
            arguments.bind::<0>(name, [])?;
            limits.text(change_case(text, name))
        }
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = arguments.bind(name, ["chars"])?;
            strip(text, name, chars.or_none(name)?.as_deref(), limits)
        }
        "startswith" | "endswith" => {
            let [affix, start, end] = arguments.bind(name, ["prefix", "start", "end"])?;
            let part = part(text, start, end, limits)?;
            let has = |affix: &str| if name == "startswith" { part.starts_with(affix) } else { part.ends_with(affix) };
            match affix {
                Some(Value::Tuple(seq)) => Ok(Value::Bool(seq.items.iter().filter_map(Value::as_str).any(has))),
                affix => Ok(Value::Bool(has(&needed(name, affix)?))),
            }
        }
        "removeprefix" | "removesuffix" => {
            let [affix] = arguments.bind(name, ["affix"])?;
            let affix = needed(name, affix)?;
            let left = if name == "removeprefix" { text.strip_prefix(&*affix) } else { text.strip_suffix(&*affix) };
            left.map_or(Ok(Value::Str(text.clone())), |left| limits.text(left))
        }
        "replace" => {
            let [old, new, most] = arguments.bind(name, ["old", "new", "count"])?;
            let most = most.whole_or(name, -1)?;
            replace(text, &needed(name, old)?, &needed(name, new)?, usize::try_from(most).ok(), limits)
        }
        "split" | "rsplit" | "splitlines" | "partition" | "rpartition" => divide(text, name, arguments, limits),
        "join" => {
            let [items] = arguments.bind(name, ["iterable"])?;
            let items = items::iterate(&items.unwrap_or(Value::None), limits)?;
            let mut out = Writer::new(limits);
            for (i, item) in items.iter().enumerate() {
                let Value::Str(item) = item else {
                    return fail(format!("`join`: item {i} is {}, and not a text", item.class()));
                };
                out.push(if i > 0 { text } else { "" })?;
                out.push(item)?;
            }
            Ok(out.value())
        }
        "find" | "rfind" | "index" | "rindex" | "count" => search(text, name, arguments, limits),
        "center" | "ljust" | "rjust" | "zfill" => pad(text, name, arguments, limits),
        _ => {
            let [size] = arguments.bind(name, ["tabsize"])?;
            expand_tabs(text, count(size.whole_or(name, 8)?), limits)
        }
    }
}

/// Calls the methods that divide a text into parts.
fn divide(text: &Arc<str>, name: &str, arguments: &CallArguments, limits: &Limits) -> Result<Value> {
    match name {
        "split" | "rsplit" => {
            let [separator, most] = arguments.bind(name, ["sep", "maxsplit"])?;
            let most = usize::try_from(most.whole_or(name, -1)?).unwrap_or(usize::MAX);
            split(text, separator.or_none(name)?.as_deref(), most, name == "rsplit", limits)
        }
        "splitlines" => {
            let [keep] = arguments.bind(name, ["keepends"])?;
            split_lines(text, keep.flag_or(false), limits)
        }
        _ => {
            let [separator] = arguments.bind(name, ["sep"])?;
            let separator = needed(name, separator)?;
            if separator.is_empty() {
                return fail(format!("`{name}`: the separator is empty"));
            }
            let (found, first) = if name == "partition" {
                (text.split_once(&*separator), true)
            } else {
                (text.rsplit_once(&*separator), false)
            };
            let parts = match found {
                Some((before, after)) => [before, &separator, after],
                None if first => [&**text, "", ""],
                None => ["", "", text],
            };
            texts(parts.into_iter(), limits).and_then(|parts| limits.tuple(parts))
        }
    }
}

/// Returns a required argument of a method.
fn needed(name: &str, argument: Option<Value>) -> Result<Arc<str>> {
    match argument {
        Some(Value::Str(text)) => Ok(text),
        Some(Value::Undefined(why)) => fail(why.to_string()),
        Some(other) => fail(format!("`{name}` needs a text, and found {}", other.class())),
        None => fail(format!("`{name}` needs a text")),
    }
}

fn texts<'a>(parts: impl Iterator<Item = &'a str>, limits: &Limits) -> Result<Vec<Value>> {
    parts.map(|part| limits.text(part)).collect()
}

/// Computes `text[start:end]`.
fn part(text: &Arc<str>, start: Option<Value>, end: Option<Value>, limits: &Limits) -> Result<Arc<str>> {
    if start.is_none() && end.is_none() {
        return Ok(text.clone());
    }
    match items::slice(&Value::Str(text.clone()), [start, end, None], limits)? {
        Value::Str(part) => Ok(part),
        _ => unreachable!("a slice of a text is a text"),
    }
}

/// Removes white space or `chars` from `text`: at the start, at the end, or at both ends.
pub(crate) fn strip(text: &Arc<str>, name: &str, chars: Option<&str>, limits: &Limits) -> Result<Value> {
    limits.work(text.len() + chars.map_or(0, |chars| chars.len().saturating_mul(text.len().min(64))))?;
    let leaves = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let stripped = match name {
        "lstrip" => text.trim_start_matches(leaves),
        "rstrip" => text.trim_end_matches(leaves),
        _ => text.trim_matches(leaves),
    };
    if stripped.len() == text.len() { Ok(Value::Str(text.clone())) } else { limits.text(stripped) }
}

/// Replaces the first `most` occurrences of `old` in `text`; with `None`, all occurrences.
pub(crate) fn replace(text: &Arc<str>, old: &str, new: &str, most: Option<usize>, limits: &Limits) -> Result<Value> {
    limits.work(text.len())?;
    let mut out = Writer::new(limits);
    let (mut rest, mut left) = (&**text, most.unwrap_or(usize::MAX));
    if old.is_empty() {
        // An empty text occurs before every character and at the end.
        for c in text.chars() {
            if left > 0 {
                out.push(new)?;
                left -= 1;
            }
            out.push(c.encode_utf8(&mut [0; 4]))?;
        }
        out.push(if left > 0 { new } else { "" })?;
        return Ok(out.value());
    }
    while left > 0
        && let Some(at) = rest.find(old)
    {
        out.push(&rest[..at])?;
        out.push(new)?;
        rest = &rest[at + old.len()..];
        left -= 1;
    }
    out.push(rest)?;
    Ok(out.value())
}

fn split(text: &str, separator: Option<&str>, most: usize, from_end: bool, limits: &Limits) -> Result<Value> {
    let limit = most.saturating_add(1);
    let mut parts: Vec<&str> = match (separator, from_end) {
        (Some(""), _) => return fail("`split`: the separator is empty"),
        (Some(separator), false) => text.splitn(limit, separator).collect(),
        (Some(separator), true) => text.rsplitn(limit, separator).collect(),
        (None, _) => words(text, most, from_end),
    };
    if from_end {
        parts.reverse();
    }
    limits.room_for_items(parts.len())?;
    texts(parts.into_iter(), limits).and_then(|parts| limits.list(parts))
}

/// Returns the words between white space. At most `most` words are split off; with `from_end`, beginning at the end and in that order.
fn words(text: &str, most: usize, from_end: bool) -> Vec<&str> {
    let (mut rest, mut words) = (text, Vec::new());
    rest = if from_end { text::trim_end(rest) } else { text::trim_start(rest) };
    while !rest.is_empty() {
        let at = if from_end { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(at) = at.filter(|_| words.len() < most) else {
            words.push(rest);
            break;
        };
        if from_end {
            let space = rest[at..].chars().next().map_or(1, char::len_utf8);
            words.push(&rest[at + space..]);
            rest = text::trim_end(&rest[..at]);
        } else {
            words.push(&rest[..at]);
            rest = text::trim_start(&rest[at..]);
        }
    }
    words
}

fn split_lines(text: &str, keeps_ends: bool, limits: &Limits) -> Result<Value> {
    let is_end = |c: char| {
        matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let (mut lines, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let end = rest.find(is_end).unwrap_or(rest.len());
        let length = match &rest[end..] {
            after if after.starts_with("\r\n") => 2,
            after => after.chars().next().map_or(0, char::len_utf8),
        };
        lines.push(&rest[..if keeps_ends { end + length } else { end }]);
        rest = &rest[end + length..];
    }
    limits.room_for_items(lines.len())?;
    texts(lines.into_iter(), limits).and_then(|lines| limits.list(lines))
}

fn search(text: &Arc<str>, name: &str, arguments: &CallArguments, limits: &Limits) -> Result<Value> {
    let [wanted, start, end] = arguments.bind(name, ["sub", "start", "end"])?;
    let wanted = needed(name, wanted)?;
    let first = start.clone().whole_or(name, 0)?;
    let part = part(text, start, end, limits)?;
    if name == "count" {
        let found = if wanted.is_empty() { part.chars().count() + 1 } else { part.matches(&*wanted).count() };
        return Ok(Value::Int(found as i64));
    }
    let found = if name.starts_with('r') { part.rfind(&*wanted) } else { part.find(&*wanted) };
    match found {
        Some(at) => {
            let length = text.chars().count() as i64;
            let first = if first < 0 { (first + length).max(0) } else { first.min(length) };
            Ok(Value::Int(first + part[..at].chars().count() as i64))
        }
        None if name.ends_with("find") => Ok(Value::Int(-1)),
        None => fail(format!("`{name}`: the text does not have this part")),
    }
}

fn pad(text: &str, name: &str, arguments: &CallArguments, limits: &Limits) -> Result<Value> {
    let [width, fill] = arguments.bind(name, ["width", "fillchar"])?;
    let (width, fill) = (count(width.whole_or(name, 0)?), fill.text_or(name, " ")?);
    if fill.chars().count() != 1 {
        return fail(format!("`{name}` fills with one character"));
    }
    let length = text.chars().count();
    let missing = width.saturating_sub(length);
    let mut out = Writer::new(limits);
    match name {
        "zfill" => {
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['-', '+'])));
            out.push(sign)?;
            out.repeat("0", missing)?;
            out.push(digits)?;
        }
        _ => {
            let before = match name {
                "ljust" => 0,
                "rjust" => missing,
                _ => missing / 2 + (missing & width & 1),
            };
            out.repeat(&fill, before)?;
            out.push(text)?;
            out.repeat(&fill, missing - before)?;
        }
    }
    Ok(out.value())
}

fn expand_tabs(text: &str, size: usize, limits: &Limits) -> Result<Value> {
    let (mut out, mut column) = (Writer::new(limits), 0);
    for c in text.chars() {
        match c {
            '\t' if size > 0 => {
                let spaces = size - column % size;
                out.repeat(" ", spaces)?;
                column += spaces;
            }
            '\t' => {}
            _ => {
                out.push(c.encode_utf8(&mut [0; 4]))?;
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    Ok(out.value())
}

/// Converts `text` to another case.
pub(crate) fn change_case(text: &str, name: &str) -> String {
    let capitalized = |word: &str| {
        let mut chars = word.chars();
        let first: String = chars.next().into_iter().flat_map(char::to_uppercase).collect();
        first + &chars.as_str().to_lowercase()
    };
    match name {
        "upper" => text.to_uppercase(),
        "lower" | "casefold" => text.to_lowercase().replace('ß', if name == "casefold" { "ss" } else { "ß" }),
        "capitalize" => capitalized(text),
        "swapcase" => text
            .chars()
            .map(|c| if c.is_lowercase() { c.to_uppercase().to_string() } else { c.to_lowercase().to_string() })
            .collect(),
        _ => {
            let (mut out, mut in_word) = (String::with_capacity(text.len()), false);
            for c in text.chars() {
                if in_word {
                    out.extend(c.to_lowercase())
                } else {
                    out.extend(c.to_uppercase())
                }
                in_word = c.is_alphabetic();
            }
            out
        }
    }
}

/// Whether `text` has letters with a case, and all of them have this case.
pub(crate) fn is_cased(text: &str, has_case: fn(char) -> bool) -> bool {
    let mut cased = text.chars().filter(|c| c.is_lowercase() || c.is_uppercase()).peekable();
    cased.peek().is_some() && cased.all(has_case)
}

/// Computes the methods that test each character; `None` for other methods.
fn character_test(name: &str, text: &str) -> Option<bool> {
    let all = |test: fn(char) -> bool| !text.is_empty() && text.chars().all(test);
    Some(match name {
        "isalpha" => all(char::is_alphabetic),
        "isalnum" => all(char::is_alphanumeric),
        "isascii" => text.is_ascii(),
        "isdecimal" => all(|c| c.is_ascii_digit()),
        "isdigit" => all(|c| c.is_ascii_digit() || matches!(c, '²' | '³' | '¹' | '⁰' | '⁴'..='⁹' | '₀'..='₉')),
        "isnumeric" => all(char::is_numeric),
        "isspace" => all(is_space),
        "isprintable" => text.chars().all(is_printable),
        "islower" => is_cased(text, char::is_lowercase),
        "isupper" => is_cased(text, char::is_uppercase),
        "istitle" => is_cased(text, |_| true) && change_case(text, "title") == text,
        "isidentifier" => !text.starts_with(|c: char| c.is_numeric()) && all(|c| c.is_alphanumeric() || c == '_'),
        _ => return None,
    })
}
