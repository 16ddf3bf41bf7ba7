//! Methods of Python's lists, dicts and numbers. Methods of texts are in `text_methods.rs`.

use crate::arguments::CallArguments;
use crate::error::{Result, fail};
use crate::limits::Limits;
use crate::value::{Value, ViewKind};
use crate::{compare, number, text_methods};

const OF_DICTS: &[&str] = &["copy", "get", "items", "keys", "values"];
const OF_LISTS: &[&str] = &["copy", "count", "index"];
const OF_TUPLES: &[&str] = &["count", "index"];

/// The methods that change their object. The sandbox of transformers refuses them.
const CHANGING: &[&str] =
    &["append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update"];

/// Whether values of this type have a method `name`.
pub(crate) fn exists(value: &Value, name: &str) -> bool {
    match value {
        Value::Str(_) => text_methods::exists(name),
        Value::Dict(_) => {
            OF_DICTS.contains(&name) || ["clear", "pop", "popitem", "setdefault", "update"].contains(&name)
        }
        Value::List(_) => {
            OF_LISTS.contains(&name) || CHANGING[..7].contains(&name) || ["reverse", "sort"].contains(&name)
        }
        Value::Tuple(_) => OF_TUPLES.contains(&name),
        Value::Int(_) | Value::Big(_) | Value::Bool(_) => name == "bit_length",
        Value::Float(_) => name == "is_integer",
        _ => false,
    }
}

/// Calls `object.name(arguments)`.
pub(crate) fn call(object: &Value, name: &str, arguments: &CallArguments, limits: &Limits) -> Result<Value> {
    if CHANGING.contains(&name) {
        return fail(format!("`{name}` would change a {}, which chat templates cannot", object.class()));
    }
    match object {
        Value::Str(text) => {
            limits.work(text.len())?;
            text_methods::call(text, name, arguments, limits)
        }
        Value::Dict(dict) => {
            if name == "get" {
                let [key, default] = arguments.bind(name, ["key", "default"])?;
                let Some(key) = key else { return fail("`get` needs a key") };
                let found = compare::get(&dict.entries, &key, limits)?.cloned();
                return Ok(found.or(default).unwrap_or(Value::None));
            }
            arguments.bind::<0>(name, [])?;
            limits.room_for_items(dict.entries.len())?;
            match name {
                "items" => {
                    let pair = |(key, value): &(Value, Value)| limits.tuple(vec![key.clone(), value.clone()]);
                    let pairs = dict.entries.iter().map(pair).collect::<Result<Vec<_>>>()?;
                    limits.view(ViewKind::Items, pairs)
                }
                "keys" => limits.view(ViewKind::Keys, dict.entries.iter().map(|(key, _)| key.clone()).collect()),
                "values" => {
                    limits.view(ViewKind::Values, dict.entries.iter().map(|(_, value)| value.clone()).collect())
                }
                _ => Ok(object.clone()),
            }
        }
        Value::Int(_) | Value::Big(_) | Value::Bool(_) => {
            Ok(Value::Int(number::big(object).map_or(0, |number| number.bits() as i64)))
        }
        Value::Float(x) => Ok(Value::Bool(x.fract() == 0.0)),
        _ => of_list(object, name, arguments, limits),
    }
}

fn of_list(object: &Value, name: &str, arguments: &CallArguments, limits: &Limits) -> Result<Value> {
    if name == "copy" {
        return Ok(object.clone());
    }
    let [item] = arguments.bind(name, ["value"])?;
    let item = item.unwrap_or(Value::None);
    let mut found = 0;
    for (at, other) in object.items().unwrap_or_default().iter().enumerate() {
        if compare::equal(other, &item, limits)? {
            if name == "index" {
                return Ok(Value::Int(at as i64));
            }
            found += 1;
        }
    }
    if name == "index" { fail("`index`: the list does not have this item") } else { Ok(Value::Int(found)) }
}
