//! Access to items and slices of values.

use crate::error::{Result, fail};
use crate::limits::Limits;
use crate::number;
use crate::value::{Value, ViewKind};

/// Returns the characters of a text as values.
pub(crate) fn characters(text: &str, limits: &Limits) -> Result<Vec<Value>> {
    limits.room_for_items(text.chars().count())?;
    let mut bytes = [0; 4];
    Ok(text.chars().map(|c| Value::text(&*c.encode_utf8(&mut bytes))).collect())
}

/// Returns the items that a `for` loop over `value` reads.
pub(crate) fn iterate(value: &Value, limits: &Limits) -> Result<Vec<Value>> {
    match value {
        Value::Undefined(_) => Ok(Vec::new()),
        Value::Str(text) => characters(text, limits),
        Value::Dict(dict) => {
            limits.room_for_items(dict.entries.len())?;
            Ok(dict.entries.iter().map(|(key, _)| key.clone()).collect())
        }
        _ => match value.items() {
            Some(items) => {
                limits.room_for_items(items.len())?;
                Ok(items.to_vec())
            }
            None => fail(format!("{} cannot be iterated", value.class())),
        },
    }
}

/// Computes Python's `len(value)`.
pub(crate) fn length(value: &Value) -> Result<usize> {
    match value {
        Value::Undefined(_) => Ok(0),
        Value::Str(text) => Ok(text.chars().count()),
        Value::Dict(dict) => Ok(dict.entries.len()),
        Value::View(view) if view.kind == ViewKind::Generator => {
            fail("a generator has no length; use the filter `list` first")
        }
        _ => match value.items() {
            Some(items) => Ok(items.len()),
            None => fail(format!("{} has no length", value.class())),
        },
    }
}

/// Returns `value[index]` of a list, tuple, range or text; `None` if there is no such item.
pub(crate) fn at(value: &Value, index: &Value, limits: &Limits) -> Result<Option<Value>> {
    let Some(index) = number::small(index) else { return Ok(None) };
    let place = |length: usize| {
        let at = if index < 0 { index.saturating_add(length as i64) } else { index };
        usize::try_from(at).ok().filter(|at| *at < length)
    };
    match value {
        Value::Str(text) => {
            limits.work(text.len())?;
            let at = place(text.chars().count());
            Ok(at.and_then(|at| text.chars().nth(at)).map(|c| Value::text(c.to_string())))
        }
        Value::View(view) if !matches!(view.kind, ViewKind::Range(_)) => Ok(None),
        _ => Ok(value.items().and_then(|items| Some(items[place(items.len())?].clone()))),
    }
}

/// Computes `value[start:end:step]`.
pub(crate) fn slice(value: &Value, parts: [Option<Value>; 3], limits: &Limits) -> Result<Value> {
    let whole = |part: &Option<Value>| match part {
        None | Some(Value::None) => Ok(None),
        Some(value) => match number::small(value) {
            Some(number) => Ok(Some(number)),
            None => fail(format!("a slice needs integers, and found {}", value.class())),
        },
    };
    let [start, end, step] = [whole(&parts[0])?, whole(&parts[1])?, whole(&parts[2])?];
    let step = step.unwrap_or(1);
    if step == 0 {
        return fail("the step of a slice cannot be zero");
    }
    if let Value::Undefined(why) = value {
        return fail(why.to_string());
    }
    if let Value::Str(text) = value {
        limits.work(text.len())?;
        let count = text.chars().count();
        let places = places(count, start, end, step);
        if step == 1 {
            let offset = |at: usize| text.char_indices().nth(at).map_or(text.len(), |(offset, _)| offset);
            let (first, last) = (places.first().copied().unwrap_or(0), places.len());
            return limits.text(&text[offset(first)..offset(first + last)]);
        }
        limits.room_for_items(count)?;
        let chars: Vec<char> = text.chars().collect();
        return limits.text(places.into_iter().map(|at| chars[at]).collect::<String>());
    }
    let is_view = matches!(value, Value::View(view) if !matches!(view.kind, ViewKind::Range(_)));
    let Some(items) = value.items().filter(|_| !is_view) else {
        return fail(format!("{} cannot be sliced", value.class()));
    };
    limits.room_for_items(items.len())?;
    let chosen = places(items.len(), start, end, step).into_iter().map(|at| items[at].clone()).collect();
    if let Value::Tuple(_) = value { limits.tuple(chosen) } else { limits.list(chosen) }
}

/// Returns the indices of a slice among `length` items.
fn places(length: usize, start: Option<i64>, end: Option<i64>, step: i64) -> Vec<usize> {
    let length = length as i64;
    let (lowest, highest) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let clamp = |at: i64| (if at < 0 { at.saturating_add(length) } else { at }).clamp(lowest, highest);
    let first = start.map_or(if step > 0 { lowest } else { highest }, clamp);
    let last = end.map_or(if step > 0 { highest } else { lowest }, clamp);
    let mut places = Vec::new();
    let mut at = first;
    while if step > 0 { at < last } else { at > last } {
        places.push(at as usize);
        at = at.saturating_add(step);
    }
    places
}
