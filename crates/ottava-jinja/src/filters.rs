//! Filters of single values: texts, numbers and JSON.

use std::sync::Arc;

use crate::arguments::{Argument, CallArguments, count};
use crate::error::{Result, fail};
use crate::eval::Rendering;
use crate::limits::Writer;
use crate::value::Value;
use crate::{items, json, number, ops, percent, text, text_methods};

/// The names of all filters.
const NAMES: [&str; 47] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "striptags",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
];

/// Whether a filter `name` exists.
pub(crate) fn exists(name: &str) -> bool {
    NAMES.contains(&name) || ["upper", "urlencode", "wordcount", "wordwrap"].contains(&name)
}

impl Rendering<'_> {
    /// Computes `value | name(arguments)`.
    pub(crate) fn filter(&self, name: &str, value: &Value, arguments: &CallArguments) -> Result<Value> {
        self.limits.steps(1)?;
        match name {
            "default" | "d" => {
                let [default, boolean] = arguments.bind(name, ["default_value", "boolean"])?;
                let uses = value.is_undefined() || (boolean.flag_or(false) && !value.is_true());
                Ok(if uses { default.unwrap_or_else(|| Value::text("")) } else { value.clone() })
            }
            "tojson" => self.to_json(value, arguments),
            "length" | "count" => items::length(value).map(|length| Value::Int(length as i64)),
            "abs" => match value {
                Value::Float(x) => Ok(Value::Float(x.abs())),
                _ if self.holds("<", value, &Value::Int(0))? => ops::negative(value, &self.limits),
                _ => ops::binary("+", &Value::Int(0), value, &self.limits),
            },
            "int" => self.to_int(value, arguments),
            "float" => {
                let [default] = arguments.bind(name, ["default"])?;
                let parsed = number::float(value).or_else(|| value.as_str().and_then(parse_float));
                Ok(parsed.map(Value::Float).unwrap_or(default.unwrap_or(Value::Float(0.0))))
            }
            "round" => self.round(value, arguments),
            "filesizeformat" => self.file_size(value, arguments),
            "format" => match arguments.named.is_empty() {
                true => {
                    let values = self.limits.tuple(arguments.positional.clone())?;
                    percent::format(&text::string(value, &self.limits)?, &values, &self.limits)
                }
                false => {
                    let named = arguments.named.iter().map(|(name, value)| (Value::Str(name.clone()), value.clone()));
                    let values = self.limits.dict(named.collect())?;
                    percent::format(&text::string(value, &self.limits)?, &values, &self.limits)
                }
            },
            "attr" => {
                let [attribute] = arguments.bind(name, ["name"])?;
                self.attr(value, &attribute.text_or(name, "")?)
            }
            _ => match self.item_filter(name, value, arguments)? {
                Some(filtered) => Ok(filtered),
                None => self.text_filter(name, value, arguments),
            },
        }
    }

    /// Computes filters that read `value` as a text.
    fn text_filter(&self, name: &str, value: &Value, arguments: &CallArguments) -> Result<Value> {
        if !exists(name) {
            return fail(format!("there is no filter `{name}`"));
        }
        let limits = &self.limits;
        let text = text::string(value, limits)?;
        limits.work(text.len())?;
        match name {
            "string" | "safe" => Ok(Value::Str(text)),
            "upper" | "lower" | "capitalize" => limits.text(text_methods::change_case(&text, name)),
            "title" => limits.text(title(&text)),
            "trim" => {
                let [chars] = arguments.bind(name, ["chars"])?;
                text_methods::strip(&text, "strip", chars.or_none(name)?.as_deref(), limits)
            }
            "replace" => {
                let [old, new, most] = arguments.bind(name, ["old", "new", "count"])?;
                let [old, new] = [old, new].map(|part| text::string(&part.unwrap_or(Value::None), limits));
                let most = most.filter(|most| !matches!(most, Value::None)).whole_or(name, -1)?;
                text_methods::replace(&text, &old?, &new?, usize::try_from(most).ok(), limits)
            }
            "escape" | "e" | "forceescape" => limits.text(escape(&text)),
            "striptags" => limits.text(strip_tags(&text)),
            "pprint" => {
                let mut out = Writer::new(limits);
                text::represent(value, &mut out)?;
                Ok(out.value())
            }
            "indent" => self.indent(&text, arguments),
            "center" => {
                let [width] = arguments.bind(name, ["width"])?;
                let width = Value::Int(width.whole_or(name, 80)?);
                let arguments = CallArguments { positional: vec![width], named: Vec::new() };
                text_methods::call(&text, "center", &arguments, limits)
            }
            "truncate" => self.truncate(&text, arguments),
            "urlencode" => limits.text(url_encode(&text)),
            "wordcount" => {
                let words = text.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty());
                Ok(Value::Int(words.count() as i64))
            }
            _ => self.word_wrap(&text, arguments),
        }
    }

    fn to_json(&self, value: &Value, arguments: &CallArguments) -> Result<Value> {
        let parameters = ["ensure_ascii", "indent", "separators", "sort_keys"];
        let [ensure_ascii, indent, separators, sort_keys] = arguments.bind("tojson", parameters)?;
        let indent = match indent {
            None | Some(Value::None) => None,
            Some(Value::Str(text)) => Some(text.to_string()),
            some => {
                let mut spaces = Writer::new(&self.limits);
                spaces.repeat(" ", count(some.whole_or("tojson", 0)?))?;
                Some(spaces.finish())
            }
        };
        let separators = match separators {
            None | Some(Value::None) => [if indent.is_some() { "," } else { ", " }.into(), ": ".into()],
            Some(pair) => {
                let texts: Vec<String> = items::iterate(&pair, &self.limits)?
                    .iter()
                    .filter_map(|text| Some(text.as_str()?.into()))
                    .collect();
                match texts.try_into() {
                    Ok(pair) => pair,
                    Err(_) => return fail("tojson: `separators` are two texts"),
                }
            }
        };
        let (ensure_ascii, sort_keys) = (ensure_ascii.flag_or(false), sort_keys.flag_or(false));
        let mut out = Writer::new(&self.limits);
        json::Options { indent, ensure_ascii, sort_keys, separators }.write(value, 0, &mut out)?;
        Ok(out.value())
    }

    fn to_int(&self, value: &Value, arguments: &CallArguments) -> Result<Value> {
        let [default, base] = arguments.bind("int", ["default", "base"])?;
        let base = base.whole_or("int", 10)?;
        let parsed = match value {
            Value::Str(text) => {
                let text = text.trim_matches(text::is_space).replace('_', "");
                let (sign, digits) = text.split_at(usize::from(text.starts_with(['-', '+'])));
                let prefix = match base {
                    16 => "0x",
                    8 => "0o",
                    2 => "0b",
                    _ => "",
                };
                let digits = digits.strip_prefix(prefix).unwrap_or(digits);
                let radix = u32::try_from(base).ok().filter(|base| (2..=36).contains(base)).unwrap_or(10);
                self.limits.work(digits.len().saturating_mul(digits.len() / 64 + 1))?;
                let whole = num_bigint::BigInt::parse_bytes(format!("{sign}{digits}").as_bytes(), radix);
                whole.map(number::integer).or_else(|| parse_float(&text).and_then(percent::whole_of))
            }
            Value::Float(x) if x.is_finite() => percent::whole_of(*x),
            _ => number::big(value).map(number::integer),
        };
        Ok(parsed.unwrap_or(default.unwrap_or(Value::Int(0))))
    }

    /// Rounds up, down, or half to even like Python's `round`.
    fn round(&self, value: &Value, arguments: &CallArguments) -> Result<Value> {
        let [precision, method] = arguments.bind("round", ["precision", "method"])?;
        let (precision, method) = (precision.whole_or("round", 0)?, method.text_or("round", "common")?);
        let Some(x) = number::float(value) else {
            return match value {
                Value::Undefined(why) => fail(why.to_string()),
                _ => fail(format!("`round` needs a number, and found {}", value.class())),
            };
        };
        let factor = 10f64.powi(precision.clamp(-400, 400) as i32);
        match &*method {
            "common" if !matches!(value, Value::Float(_)) && precision >= 0 => {
                Ok(number::integer(number::big(value).unwrap_or_default()))
            }
            "common" if precision >= 0 => {
                let digits = usize::try_from(precision).unwrap_or(usize::MAX).min(400);
                Ok(Value::Float(if x.is_finite() { format!("{x:.digits$}").parse().unwrap_or(x) } else { x }))
            }
            "common" => {
                let unit = 10f64.powi(-precision.max(-400) as i32);
                let rounded = (x / unit).round_ties_even() * unit;
                let is_float = matches!(value, Value::Float(_));
                Ok(if is_float { Value::Float(rounded) } else { percent::whole_of(rounded).unwrap_or(Value::Int(0)) })
            }
            "ceil" => Ok(Value::Float((x * factor).ceil() / factor)),
            "floor" => Ok(Value::Float((x * factor).floor() / factor)),
            _ => fail("`round` has the methods common, ceil and floor"),
        }
    }

    fn file_size(&self, value: &Value, arguments: &CallArguments) -> Result<Value> {
        let [binary] = arguments.bind("filesizeformat", ["binary"])?;
        let binary = binary.flag_or(false);
        let Some(bytes) = number::float(value).or_else(|| value.as_str().and_then(parse_float)) else {
            return fail(format!("`filesizeformat` needs a number, and found {}", value.class()));
        };
        let base: f64 = if binary { 1024.0 } else { 1000.0 };
        if bytes == 1.0 {
            return self.limits.text("1 Byte");
        }
        if bytes < base {
            return self.limits.text(format!("{} Bytes", bytes.trunc()));
        }
        let unit = (1..8).find(|power| bytes < base.powi(power + 1)).unwrap_or(8);
        let letter = ["k", "M", "G", "T", "P", "E", "Z", "Y"][unit as usize - 1];
        let name = if binary { format!("{}iB", letter.to_uppercase()) } else { format!("{letter}B") };
        self.limits.text(format!("{:.1} {name}", bytes / base.powi(unit)))
    }

    fn indent(&self, text: &str, arguments: &CallArguments) -> Result<Value> {
        let [width, first, blank] = arguments.bind("indent", ["width", "first", "blank"])?;
        let mut space = Writer::new(&self.limits);
        match width {
            Some(Value::Str(text)) => space.push(&text)?,
            width => space.repeat(" ", count(width.whole_or("indent", 4)?))?,
        }
        let (space, first, blank) = (space.finish(), first.flag_or(false), blank.flag_or(false));
        let mut out = Writer::new(&self.limits);
        for (i, line) in text.split('\n').enumerate() {
            out.push(if i > 0 { "\n" } else { "" })?;
            if (i == 0 && first) || (i > 0 && (blank || !line.is_empty())) {
                out.push(&space)?;
            }
            out.push(line)?;
        }
        Ok(out.value())
    }

    fn truncate(&self, text: &Arc<str>, arguments: &CallArguments) -> Result<Value> {
        let parameters = ["length", "killwords", "end", "leeway"];
        let [length, kill, end, leeway] = arguments.bind("truncate", parameters)?;
        let (length, end) = (count(length.whole_or("truncate", 255)?), end.text_or("truncate", "...")?);
        let leeway = count(leeway.filter(|leeway| !matches!(leeway, Value::None)).whole_or("truncate", 5)?);
        let end_length = end.chars().count();
        if text.chars().count() <= length.saturating_add(leeway) {
            return Ok(Value::Str(text.clone()));
        }
        let Some(kept) = length.checked_sub(end_length) else {
            return fail("`truncate`: the length is below that of the end");
        };
        let cut = text.char_indices().nth(kept).map_or(text.len(), |(at, _)| at);
        let kept = if kill.flag_or(false) {
            &text[..cut]
        } else {
            text[..cut].rsplit_once(' ').map_or(&text[..cut], |(before, _)| before)
        };
        self.limits.text(format!("{kept}{end}"))
    }

    /// Breaks lines at white space, so that they have at most `width` characters.
    fn word_wrap(&self, text: &str, arguments: &CallArguments) -> Result<Value> {
        let parameters = ["width", "break_long_words", "wrapstring"];
        let [width, breaks, wrap] = arguments.bind("wordwrap", parameters)?;
        let (width, breaks) = (count(width.whole_or("wordwrap", 79)?).max(1), breaks.flag_or(true));
        let wrap = wrap.filter(|wrap| !matches!(wrap, Value::None)).text_or("wordwrap", "\n")?;
        let mut out = Writer::new(&self.limits);
        for (i, line) in text.lines().enumerate() {
            out.push(if i > 0 { &wrap } else { "" })?;
            let mut column = 0;
            for word in line.split(' ').filter(|word| !word.is_empty()) {
                let mut word = word;
                let mut size = word.chars().count();
                if column > 0 && column + 1 + size > width {
                    out.push(&wrap)?;
                    column = 0;
                } else if column > 0 {
                    out.push(" ")?;
                    column += 1;
                }
                while breaks && size > width {
                    let cut = word.char_indices().nth(width).map_or(word.len(), |(at, _)| at);
                    out.push(&word[..cut])?;
                    out.push(&wrap)?;
                    word = &word[cut..];
                    size -= width;
                }
                out.push(word)?;
                column += size;
            }
        }
        Ok(out.value())
    }
}

/// Parses a float like Python's `float(text)`.
fn parse_float(text: &str) -> Option<f64> {
    let text = text.trim_matches(text::is_space);
    let plain = text.strip_prefix(['-', '+']).unwrap_or(text);
    let is_word = ["inf", "infinity", "nan"].iter().any(|word| plain.eq_ignore_ascii_case(word));
    let is_number = plain.starts_with(|c: char| c.is_ascii_digit() || c == '.');
    if is_word || is_number { text.replace('_', "").parse().ok() } else { None }
}

/// Converts a text like Jinja's `title`: words begin after white space, hyphens and opening brackets.
fn title(text: &str) -> String {
    let (mut out, mut begins) = (String::with_capacity(text.len()), true);
    for c in text.chars() {
        if begins {
            out.extend(c.to_uppercase())
        } else {
            out.extend(c.to_lowercase())
        }
        begins = text::is_space(c) || "-([{<".contains(c);
    }
    out
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    out
}

/// Removes HTML tags from `text`, and replaces each run of white space by one space.
fn strip_tags(text: &str) -> String {
    let (mut plain, mut rest) = (String::new(), text);
    while let Some(start) = rest.find('<')
        && let Some(end) = rest[start..].find('>')
    {
        plain.push_str(&rest[..start]);
        rest = &rest[start + end + 1..];
    }
    plain.push_str(rest);
    plain.split(text::is_space).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

fn url_encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b'/' => out.push(char::from(byte)),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}
