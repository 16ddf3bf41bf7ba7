//! Operators.

use crate::error::{Result, fail};
use crate::limits::{Limits, Writer};
use crate::value::Value;
use crate::{number, percent, text};

/// Computes Python's `left op right`.
pub(crate) fn binary(op: &'static str, left: &Value, right: &Value, limits: &Limits) -> Result<Value> {
    if let Value::Undefined(why) = left {
        return fail(why.to_string());
    }
    match (op, left, right) {
        ("%", Value::Str(format), _) => return percent::format(format, right, limits),
        (_, _, Value::Undefined(why)) => return fail(why.to_string()),
        ("+", Value::Str(left), Value::Str(right)) => {
            limits.room_for_text(left.len() + right.len())?;
            return Ok(Value::text([&**left, &**right].concat()));
        }
        ("+", Value::List(left), Value::List(right)) => {
            limits.room_for_items(left.items.len() + right.items.len())?;
            return limits.list([&left.items[..], &right.items].concat());
        }
        ("+", Value::Tuple(left), Value::Tuple(right)) => {
            limits.room_for_items(left.items.len() + right.items.len())?;
            return limits.tuple([&left.items[..], &right.items].concat());
        }
        ("*", Value::Str(_) | Value::List(_) | Value::Tuple(_), _) if number::small(right).is_some() => {
            return repeat(left, right, limits);
        }
        ("*", _, Value::Str(_) | Value::List(_) | Value::Tuple(_)) if number::small(left).is_some() => {
            return repeat(right, left, limits);
        }
        _ => {}
    }
    match number::arithmetic(op, left, right, limits)? {
        Some(result) => Ok(result),
        None => fail(format!("`{op}` does not take {} and {}", left.class(), right.class())),
    }
}

fn repeat(value: &Value, times: &Value, limits: &Limits) -> Result<Value> {
    let times = usize::try_from(number::small(times).unwrap_or(0)).unwrap_or(0);
    if let Value::Str(text) = value {
        let mut out = Writer::new(limits);
        out.repeat(text, times)?;
        return Ok(out.value());
    }
    let items = value.items().unwrap_or_default();
    limits.room_for_items(items.len().saturating_mul(times))?;
    let times = if items.is_empty() { 0 } else { times };
    let repeated = std::iter::repeat_n(items, times).flatten().cloned().collect();
    if let Value::List(_) = value { limits.list(repeated) } else { limits.tuple(repeated) }
}

/// Computes `-value`.
pub(crate) fn negative(value: &Value, limits: &Limits) -> Result<Value> {
    match value {
        Value::Float(value) => Ok(Value::Float(-value)),
        _ => binary("-", &Value::Int(0), value, limits),
    }
}

/// Joins the texts of all `parts`.
pub(crate) fn concatenate(parts: &[Value], limits: &Limits) -> Result<Value> {
    let mut out = Writer::new(limits);
    parts.iter().try_for_each(|part| text::write(part, &mut out))?;
    Ok(out.value())
}
