//! Comparison of values with Python's `==`, `<`, `in` and sort.

use std::cmp::Ordering;

use crate::error::{Result, fail};
use crate::limits::Limits;
use crate::number;
use crate::value::Value;

/// Computes Python's `left == right`.
pub(crate) fn equal(left: &Value, right: &Value, limits: &Limits) -> Result<bool> {
    limits.steps(1)?;
    [left, right].into_iter().try_for_each(|value| limits.expect_defined(value))?;
    Ok(match (left, right) {
        (Value::Str(left), Value::Str(right)) => {
            limits.work(left.len().min(right.len()))?;
            left == right
        }
        (Value::None, Value::None) | (Value::Undefined(_), Value::Undefined(_)) => true,
        (Value::List(left), Value::List(right)) | (Value::Tuple(left), Value::Tuple(right)) => {
            all_equal(&left.items, &right.items, limits)?
        }
        (Value::View(left), Value::View(right)) => {
            left.kind == right.kind && all_equal(&left.seq.items, &right.seq.items, limits)?
        }
        (Value::Dict(left), Value::Dict(right)) => {
            if left.entries.len() != right.entries.len() {
                return Ok(false);
            }
            for (key, value) in &left.entries {
                match get(&right.entries, key, limits)? {
                    Some(other) if equal(value, other, limits)? => {}
                    _ => return Ok(false),
                }
            }
            true
        }
        (Value::Object(left), Value::Object(right)) => left == right,
        (Value::Function(left), Value::Function(right)) => left == right,
        _ => numbers(left, right) == Some(Ordering::Equal),
    })
}

fn all_equal(left: &[Value], right: &[Value], limits: &Limits) -> Result<bool> {
    if left.len() != right.len() {
        return Ok(false);
    }
    for (left, right) in left.iter().zip(right) {
        if !equal(left, right, limits)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns the value of `key` among entries.
pub(crate) fn get<'v>(entries: &'v [(Value, Value)], key: &Value, limits: &Limits) -> Result<Option<&'v Value>> {
    limits.steps(1 + entries.len() / 16)?;
    limits.expect_defined(key)?;
    if let Some(key) = key.as_str() {
        return Ok(entries.iter().find(|(known, _)| known.as_str() == Some(key)).map(|(_, value)| value));
    }
    for (known, value) in entries {
        if equal(known, key, limits)? {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

/// Returns the order of two numbers; `None` for other values and for `nan`.
fn numbers(left: &Value, right: &Value) -> Option<Ordering> {
    if let (Some(left), Some(right)) = (number::big(left), number::big(right)) {
        return Some(left.cmp(&right));
    }
    number::float(left)?.partial_cmp(&number::float(right)?)
}

/// Returns the order of two values; `None` for `nan`. Errors for values that Python cannot order.
pub(crate) fn order(op: &str, left: &Value, right: &Value, limits: &Limits) -> Result<Option<Ordering>> {
    limits.steps(1)?;
    match (left, right) {
        (Value::Str(left), Value::Str(right)) => {
            limits.work(left.len().min(right.len()))?;
            Ok(Some(left.cmp(right)))
        }
        (Value::List(left), Value::List(right)) | (Value::Tuple(left), Value::Tuple(right)) => {
            for (left, right) in left.items.iter().zip(&right.items) {
                if !equal(left, right, limits)? {
                    return order(op, left, right, limits);
                }
            }
            Ok(Some(left.items.len().cmp(&right.items.len())))
        }
        (Value::Undefined(why), _) | (_, Value::Undefined(why)) => fail(why.to_string()),
        _ if number::float(left).is_some() && number::float(right).is_some() => Ok(numbers(left, right)),
        _ => fail(format!("`{op}` cannot compare {} and {}", left.class(), right.class())),
    }
}

/// Computes Python's `item in container`.
pub(crate) fn contains(container: &Value, item: &Value, limits: &Limits) -> Result<bool> {
    match container {
        Value::Str(text) => match item {
            Value::Str(item) => {
                limits.work(text.len())?;
                Ok(text.contains(&**item))
            }
            Value::Undefined(why) => fail(why.to_string()),
            _ => fail(format!("`in` a text needs a text, and found {}", item.class())),
        },
        Value::Dict(dict) => Ok(get(&dict.entries, item, limits)?.is_some()),
        Value::Undefined(_) => limits.expect_defined(container).map(|()| false),
        _ => match container.items() {
            Some(items) => {
                for other in items {
                    if equal(other, item, limits)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
            None => fail(format!("`in` cannot look into {}", container.class())),
        },
    }
}

/// Sorts values by their keys with Python's `<`. The sort is stable.
pub(crate) fn sort(keyed: &mut [(Value, Value)], reverse: bool, limits: &Limits) -> Result<()> {
    let mut failure = None;
    let mut compare = |left: &Value, right: &Value| match order("<", left, right, limits) {
        Ok(found) => found.unwrap_or(Ordering::Equal),
        Err(error) => {
            failure.get_or_insert(error);
            Ordering::Equal
        }
    };
    // With `reverse`, values with equal keys also stay in their order, as in Python.
    keyed.sort_by(|(left, _), (right, _)| if reverse { compare(right, left) } else { compare(left, right) });
    failure.map_or(Ok(()), Err)
}
