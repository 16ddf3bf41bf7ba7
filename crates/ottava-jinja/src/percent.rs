//! Python's `text % values`.

use crate::error::{Result, fail};
use crate::format::{MAX_WIDTH, Spec, numeric, string, whole};
use crate::limits::{Limits, Writer};
use crate::value::Value;
use crate::{compare, number, text};

/// Computes `format % values`.
pub(crate) fn format(format: &str, values: &Value, limits: &Limits) -> Result<Value> {
    let single = std::slice::from_ref(values);
    let mut items = match values {
        Value::Tuple(seq) => seq.items.iter(),
        _ => single.iter(),
    };
    let mut out = Writer::new(limits);
    let (mut rest, mut uses_names) = (format, false);
    while let Some(at) = rest.find('%') {
        out.push(&rest[..at])?;
        let mut chars = rest[at + 1..].chars().peekable();
        let mut named = None;
        if chars.next_if_eq(&'(').is_some() {
            let name: String = chars.by_ref().take_while(|c| *c != ')').collect();
            let Value::Dict(dict) = values else { return fail("`%`: a format with names needs a dict") };
            let Some(value) = compare::get(&dict.entries, &Value::text(name.as_str()), limits)? else {
                return fail(format!("`%`: the dict has no {name:?}"));
            };
            (named, uses_names) = (Some(value), true);
        }
        let (mut spec, star) = flags(&mut chars)?;
        let missing = "`%`: the format has more fields than values";
        for part in star.into_iter().flatten() {
            let Some(size) = items.next().and_then(number::small) else { return fail(missing) };
            let size = usize::try_from(size).ok().filter(|size| *size <= MAX_WIDTH);
            let Some(size) = size else { return fail("`%`: a width or precision that is too large or negative") };
            if part == '.' { spec.precision = Some(size) } else { spec.width = size }
        }
        let Some(kind) = chars.next() else { return fail("`%`: the format ends within a field") };
        if kind == '%' {
            if !rest[at + 1..].starts_with('%') {
                return fail("`%%` takes no flags");
            }
            out.push("%")?;
        } else {
            let Some(value) = named.or_else(|| items.next()) else { return fail(missing) };
            field(value, kind, spec, &mut out)?;
        }
        let left: usize = chars.map(char::len_utf8).sum();
        rest = &rest[rest.len() - left..];
    }
    out.push(rest)?;
    let takes_rest = uses_names || matches!(values, Value::Dict(_) | Value::List(_) | Value::Undefined(_));
    match items.next() {
        Some(_) if !takes_rest => fail("`%`: the format has fewer fields than values"),
        _ => Ok(out.value()),
    }
}

/// Parses flags, width and precision. Also returns which of them are values (`*`): `w` for the width, `.` for the precision.
fn flags(chars: &mut std::iter::Peekable<std::str::Chars>) -> Result<(Spec, [Option<char>; 2])> {
    let (mut spec, mut stars) = (Spec::default(), [None; 2]);
    while let Some(flag) = chars.next_if(|c| "-+ #0".contains(*c)) {
        match flag {
            '-' => spec.align = Some('<'),
            '+' => spec.sign = '+',
            ' ' if spec.sign != '+' => spec.sign = ' ',
            '#' => spec.alternate = true,
            '0' if spec.align.is_none() => (spec.fill, spec.align) = ('0', Some('=')),
            _ => {}
        }
    }
    if spec.align == Some('<') {
        spec.fill = ' ';
    }
    match chars.next_if_eq(&'*') {
        Some(_) => stars[0] = Some('w'),
        None => spec.width = whole(chars)?.unwrap_or(0),
    }
    if chars.next_if_eq(&'.').is_some() {
        match chars.next_if_eq(&'*') {
            Some(_) => stars[1] = Some('.'),
            None => spec.precision = Some(whole(chars)?.unwrap_or(0)),
        }
    }
    while chars.next_if(|c| "hlL".contains(*c)).is_some() {}
    Ok((spec, stars))
}

/// Appends one value.
fn field(value: &Value, kind: char, mut spec: Spec, out: &mut Writer) -> Result<()> {
    let limits = out.limits();
    match kind {
        's' | 'r' | 'a' | 'c' => {
            let text = match (kind, value) {
                ('c', Value::Int(code)) => match u32::try_from(*code).ok().and_then(char::from_u32) {
                    Some(c) => c.to_string(),
                    None => return fail(format!("`%c`: {code} is no character")),
                },
                ('c', Value::Str(text)) if text.chars().count() == 1 => text.to_string(),
                ('c', _) => return fail("`%c` needs a character or its number"),
                ('s', _) => text::string(value, limits)?.to_string(),
                _ => {
                    let mut written = Writer::new(limits);
                    text::represent(value, &mut written)?;
                    written.finish()
                }
            };
            // Texts are aligned to the right by default, and are never padded with zeros.
            (spec.fill, spec.align) = (' ', spec.align.filter(|align| *align == '<').or(Some('>')));
            string(&text, &spec, out)
        }
        'd' | 'i' | 'u' | 'x' | 'X' | 'o' => {
            let integer = match value {
                Value::Float(x) if matches!(kind, 'd' | 'i' | 'u') && x.is_finite() => whole_of(*x),
                _ => number::big(value).map(number::integer),
            };
            let Some(integer) = integer else {
                return fail(format!("`%{kind}` needs a number, and found {}", value.class()));
            };
            let digits = spec.precision.take();
            spec.kind = Some(if matches!(kind, 'i' | 'u') { 'd' } else { kind });
            if let Some(digits) = digits {
                // A precision is the minimum number of digits.
                let mut padded = Writer::new(limits);
                let of_digits = Spec { width: digits, fill: '0', align: Some('='), kind: spec.kind, ..Spec::default() };
                numeric(&integer, &of_digits, &mut padded)?;
                let text = padded.finish();
                (spec.kind, spec.fill, spec.align) = (None, ' ', spec.align.filter(|a| *a == '<').or(Some('>')));
                return string(&text, &spec, out);
            }
            numeric(&integer, &spec, out)
        }
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
            if number::float(value).is_none() {
                return fail(format!("`%{kind}` needs a number, and found {}", value.class()));
            }
            spec.kind = Some(kind);
            numeric(value, &spec, out)
        }
        _ => fail(format!("`%`: unknown type `{kind}`")),
    }
}

/// Truncates a finite float to an integer.
pub(crate) fn whole_of(x: f64) -> Option<Value> {
    let digits = format!("{:.0}", x.trunc());
    digits.parse().ok().map(number::integer)
}
