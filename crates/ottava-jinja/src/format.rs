//! Python's `str.format` and its format specifications.

use crate::arguments::CallArguments;
use crate::error::{Result, fail};
use crate::limits::{Limits, Writer};
use crate::value::Value;
use crate::{compare, items, number, text};

/// The maximum width of a field, and the maximum number of digits.
pub(crate) const MAX_WIDTH: usize = 1 << 15;

/// The format specification of a value.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    pub(crate) fill: char,
    /// The alignment: `<`, `>`, `^` or `=`; `None` for the default of the value's type.
    pub(crate) align: Option<char>,
    /// The sign: `+`, `-` or a space.
    pub(crate) sign: char,
    pub(crate) alternate: bool,
    pub(crate) width: usize,
    /// The separator of thousands.
    pub(crate) grouping: Option<char>,
    pub(crate) precision: Option<usize>,
    pub(crate) kind: Option<char>,
}

impl Default for Spec {
    fn default() -> Spec {
        let (fill, align, sign, alternate, width) = (' ', None, '-', false, 0);
        Spec { fill, align, sign, alternate, width, grouping: None, precision: None, kind: None }
    }
}

/// Computes `template.format(arguments)`.
pub(crate) fn format(template: &str, arguments: &CallArguments, limits: &Limits) -> Result<Value> {
    let mut out = Writer::new(limits);
    let mut fields = Fields { arguments, automatic: 0, limits };
    fields.fill(template, &mut out, 2)?;
    Ok(out.value())
}

struct Fields<'a> {
    arguments: &'a CallArguments,
    /// The number of the next field without a name or number.
    automatic: usize,
    limits: &'a Limits,
}

impl Fields<'_> {
    /// Writes `template` with its fields. Specifications may have fields too, up to `levels` deep.
    fn fill(&mut self, template: &str, out: &mut Writer, levels: usize) -> Result<()> {
        let mut rest = template;
        while let Some(at) = rest.find(['{', '}']) {
            out.push(&rest[..at])?;
            let (brace, after) = rest[at..].split_at(1);
            if let Some(after) = after.strip_prefix(brace) {
                out.push(brace)?;
                rest = after;
                continue;
            }
            if brace == "}" {
                return fail("format: a single `}` in the text");
            }
            if levels == 0 {
                return fail("format: a specification has too many fields within each other");
            }
            let mut open = 1;
            let end = after.char_indices().find(|(_, c)| {
                open += i32::from(*c == '{') - i32::from(*c == '}');
                open == 0
            });
            let Some((end, _)) = end else { return fail("format: `{` has no `}`") };
            self.field(&after[..end], out, levels - 1)?;
            rest = &after[end + 1..];
        }
        out.push(rest)
    }

    /// Writes a field `name!conversion:specification`.
    fn field(&mut self, field: &str, out: &mut Writer, levels: usize) -> Result<()> {
        let (head, spec) = field.split_once(':').unwrap_or((field, ""));
        let (name, conversion) = head.split_once('!').unwrap_or((head, "-"));
        let value = self.value(name)?;
        let mut spec_text = Writer::new(self.limits);
        self.fill(spec, &mut spec_text, levels)?;
        let value = match conversion {
            "-" => value,
            "s" => self.limits.text(text::string(&value, self.limits)?)?,
            "r" | "a" => {
                let mut written = Writer::new(self.limits);
                text::represent(&value, &mut written)?;
                written.value()
            }
            _ => return fail(format!("format: unknown conversion {conversion:?}")),
        };
        apply(&value, &spec_text.finish(), out)
    }

    /// Returns the value of `0`, `name`, `name.attribute` or `name[key]`.
    fn value(&mut self, name: &str) -> Result<Value> {
        let end = name.find(['.', '[']).unwrap_or(name.len());
        let (first, mut path) = name.split_at(end);
        let found = match first.parse::<usize>() {
            _ if first.is_empty() => {
                self.automatic += 1;
                self.arguments.positional.get(self.automatic - 1).cloned()
            }
            Ok(number) => self.arguments.positional.get(number).cloned(),
            Err(_) => self.arguments.named.iter().find(|(known, _)| **known == *first).map(|(_, value)| value.clone()),
        };
        let Some(mut value) = found else { return fail(format!("format: there is no argument for {{{first}}}")) };
        while !path.is_empty() {
            let (key, rest) = match path.strip_prefix('[') {
                Some(inner) => inner.split_once(']').unwrap_or((inner, "")),
                None => {
                    let inner = &path[1..];
                    inner.split_at(inner.find(['.', '[']).unwrap_or(inner.len()))
                }
            };
            let found = match (&value, key.parse::<i64>()) {
                (Value::Dict(dict), _) => compare::get(&dict.entries, &Value::text(key), self.limits)?.cloned(),
                (_, Ok(index)) => items::at(&value, &Value::Int(index), self.limits)?,
                _ => None,
            };
            let Some(found) = found else { return fail(format!("format: there is no {key:?} in {}", value.class())) };
            (value, path) = (found, rest);
        }
        Ok(value)
    }
}

/// Appends `value` in the format of the specification `spec`.
fn apply(value: &Value, spec: &str, out: &mut Writer) -> Result<()> {
    if spec.is_empty() {
        return text::write(value, out);
    }
    let spec = parse(spec)?;
    match value {
        Value::Str(text) => string(text, &spec, out),
        Value::Bool(_) | Value::Int(_) | Value::Big(_) | Value::Float(_) => numeric(value, &spec, out),
        _ => fail(format!("format: {} takes no specification", value.class())),
    }
}

/// Parses `[[fill]align][sign][#][0][width][,][.precision][type]`.
fn parse(text: &str) -> Result<Spec> {
    let wrong = || fail(format!("format: {text:?} is no specification"));
    let mut spec = Spec::default();
    let is_align = |c: &char| matches!(c, '<' | '>' | '^' | '=');
    let mut chars: std::iter::Peekable<std::str::Chars> = text.chars().peekable();
    if text.chars().nth(1).as_ref().is_some_and(is_align) {
        spec.fill = chars.next().unwrap_or(' ');
    }
    spec.align = chars.next_if(is_align);
    spec.sign = chars.next_if(|c| matches!(c, '+' | '-' | ' ')).unwrap_or('-');
    chars.next_if_eq(&'z');
    spec.alternate = chars.next_if_eq(&'#').is_some();
    if chars.next_if_eq(&'0').is_some() && spec.align.is_none() {
        (spec.fill, spec.align) = ('0', Some('='));
    }
    spec.width = whole(&mut chars)?.unwrap_or(0);
    spec.grouping = chars.next_if(|c| matches!(c, ',' | '_'));
    if chars.next_if_eq(&'.').is_some() {
        let Some(precision) = whole(&mut chars)? else { return wrong() };
        spec.precision = Some(precision);
    }
    spec.kind = chars.next();
    if chars.next().is_some() { wrong() } else { Ok(spec) }
}

/// Parses digits as a width or precision.
pub(crate) fn whole(chars: &mut std::iter::Peekable<std::str::Chars>) -> Result<Option<usize>> {
    let mut number: Option<usize> = None;
    while let Some(digit) = chars.next_if(char::is_ascii_digit).and_then(|c| c.to_digit(10)) {
        number = Some(number.unwrap_or(0) * 10 + digit as usize);
        if number > Some(MAX_WIDTH) {
            return fail(format!("format: a width or precision of more than {MAX_WIDTH}"));
        }
    }
    Ok(number)
}

/// Appends a text, truncated to the precision and padded to the width.
pub(crate) fn string(text: &str, spec: &Spec, out: &mut Writer) -> Result<()> {
    if !matches!(spec.kind, None | Some('s')) || spec.align == Some('=') {
        return fail(format!("format: `{}` is not for a text", spec.kind.unwrap_or('=')));
    }
    let end = spec.precision.and_then(|most| text.char_indices().nth(most)).map_or(text.len(), |(at, _)| at);
    pad("", &text[..end], spec.align.unwrap_or('<'), spec, out)
}

/// Appends a number.
pub(crate) fn numeric(value: &Value, spec: &Spec, out: &mut Writer) -> Result<()> {
    let kind = spec.kind.unwrap_or(match value {
        Value::Float(_) => '\0',
        _ => 'd',
    });
    let (negative, prefix, digits) = match kind {
        'd' | 'n' | 'x' | 'X' | 'o' | 'b' | 'c' => {
            let Some(number) = number::big(value) else {
                return fail(format!("format: `{kind}` is for integers, and found {}", value.class()));
            };
            let (radix, prefix) = match kind {
                'x' => (16, "0x"),
                'X' => (16, "0X"),
                'o' => (8, "0o"),
                'b' => (2, "0b"),
                _ => (10, ""),
            };
            let digits = number.magnitude().to_str_radix(radix);
            let digits = if kind == 'X' { digits.to_uppercase() } else { digits };
            (number.sign() == num_bigint::Sign::Minus, if spec.alternate { prefix } else { "" }, digits)
        }
        '\0' | 'e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%' => {
            let Some(number) = number::float(value) else { return fail("format: the value is no number") };
            (number.is_sign_negative() && !number.is_nan(), "", float(number.abs(), kind, spec))
        }
        _ => return fail(format!("format: unknown type `{kind}`")),
    };
    let sign = match (negative, spec.sign) {
        (true, _) => "-",
        (false, '+') => "+",
        (false, ' ') => " ",
        (false, _) => "",
    };
    let digits = spec.grouping.map_or(digits.clone(), |separator| group(&digits, separator));
    pad(&format!("{sign}{prefix}"), &digits, spec.align.unwrap_or('>'), spec, out)
}

/// Returns the digits of a float that is not negative.
fn float(x: f64, kind: char, spec: &Spec) -> String {
    if !x.is_finite() {
        let text = text::float(x);
        return if kind.is_uppercase() { text.to_uppercase() } else { text };
    }
    let precision = spec.precision.unwrap_or(6);
    match kind {
        'f' | 'F' => format!("{x:.precision$}"),
        '%' => format!("{:.precision$}%", x * 100.0),
        'e' | 'E' => exponential(x, precision, kind),
        '\0' if spec.precision.is_none() => text::float(x),
        _ => general(x, precision.max(1), kind, spec.alternate),
    }
}

fn exponential(x: f64, precision: usize, kind: char) -> String {
    let text = format!("{x:.precision$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let (mark, sign) = (if kind.is_uppercase() { 'E' } else { 'e' }, if exponent < 0 { '-' } else { '+' });
    format!("{digits}{mark}{sign}{:02}", exponent.abs())
}

/// Formats `precision` significant digits, with an exponent for small and large numbers.
fn general(x: f64, precision: usize, kind: char, keeps_zeros: bool) -> String {
    let scientific = format!("{x:.*e}", precision - 1);
    let exponent: i32 = scientific.split_once('e').and_then(|(_, exponent)| exponent.parse().ok()).unwrap_or(0);
    // Without a type, a float must not look like an integer, so one digit is kept for the fraction.
    let most = if kind == '\0' { precision as i32 - 1 } else { precision as i32 };
    let trim = |digits: &str| match digits.contains('.') && !keeps_zeros {
        true => digits.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => digits.to_string(),
    };
    if !(-4..most.max(0)).contains(&exponent) {
        let text = exponential(x, precision - 1, if kind == 'G' { 'E' } else { 'e' });
        let (digits, tail) = text.split_at(text.find(['e', 'E']).unwrap_or(text.len()));
        return trim(digits) + tail;
    }
    let digits = trim(&format!("{x:.*}", (precision as i32 - 1 - exponent).max(0) as usize));
    if kind == '\0' && !digits.contains('.') { digits + ".0" } else { digits }
}

/// Inserts separators of thousands between digits.
fn group(digits: &str, separator: char) -> String {
    let whole = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    let mut grouped = String::new();
    for (i, digit) in digits[..whole].chars().enumerate() {
        if i > 0 && (whole - i).is_multiple_of(3) {
            grouped.push(separator);
        }
        grouped.push(digit);
    }
    grouped + &digits[whole..]
}

/// Appends a sign and a text, padded to the width.
fn pad(sign: &str, text: &str, align: char, spec: &Spec, out: &mut Writer) -> Result<()> {
    let missing = spec.width.saturating_sub(sign.chars().count() + text.chars().count());
    let (before, inner, after) = match align {
        '<' => (0, 0, missing),
        '^' => (missing / 2, 0, missing - missing / 2),
        '=' => (0, missing, 0),
        _ => (missing, 0, 0),
    };
    let fill = spec.fill.to_string();
    out.repeat(&fill, before)?;
    out.push(sign)?;
    out.repeat(&fill, inner)?;
    out.push(text)?;
    out.repeat(&fill, after)
}
