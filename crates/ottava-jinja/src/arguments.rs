//! The arguments of calls, and values that are created from them.

use std::sync::Arc;

use crate::error::{Result, fail};
use crate::limits::Limits;
use crate::value::Value;
use crate::{compare, items, number};

/// The arguments of a call.
#[derive(Clone, Debug, Default)]
pub(crate) struct CallArguments {
    pub(crate) positional: Vec<Value>,
    pub(crate) named: Vec<(Arc<str>, Value)>,
}

impl CallArguments {
    /// Binds the arguments to the parameters of a function. Errors for an argument without a parameter.
    pub(crate) fn bind<const N: usize>(&self, function: &str, parameters: [&str; N]) -> Result<[Option<Value>; N]> {
        let mut bound = [const { None }; N];
        if self.positional.len() > N {
            let count = self.positional.len();
            return fail(format!("`{function}` takes {N} arguments at most, and {count} are given"));
        }
        bound.iter_mut().zip(&self.positional).for_each(|(bound, value)| *bound = Some(value.clone()));
        for (name, value) in &self.named {
            match parameters.iter().position(|parameter| **parameter == **name) {
                Some(at) if bound[at].is_none() => bound[at] = Some(value.clone()),
                Some(_) => return fail(format!("`{function}` is given `{name}` twice")),
                None => return fail(format!("`{function}` has no argument `{name}`")),
            }
        }
        Ok(bound)
    }
}

/// Converts an argument, or returns a default if it is missing.
pub(crate) trait Argument: Sized {
    fn or_none(self, function: &str) -> Result<Option<Arc<str>>>;
    fn text_or(self, function: &str, default: &str) -> Result<Arc<str>>;
    fn whole_or(self, function: &str, default: i64) -> Result<i64>;
    fn flag_or(self, default: bool) -> bool;
}

impl Argument for Option<Value> {
    /// Returns a text; `None` for Python's `None` and for a missing argument.
    fn or_none(self, function: &str) -> Result<Option<Arc<str>>> {
        match self {
            None | Some(Value::None) => Ok(None),
            Some(Value::Str(text)) => Ok(Some(text)),
            Some(other) => fail(format!("`{function}` needs a text, and found {}", other.class())),
        }
    }

    fn text_or(self, function: &str, default: &str) -> Result<Arc<str>> {
        match self {
            Some(Value::None) => fail(format!("`{function}` needs a text, and found NoneType")),
            other => Ok(other.or_none(function)?.unwrap_or_else(|| default.into())),
        }
    }

    fn whole_or(self, function: &str, default: i64) -> Result<i64> {
        match self {
            None => Ok(default),
            Some(value) => match number::small(&value) {
                Some(number) => Ok(number),
                None => fail(format!("`{function}` needs an integer, and found {}", value.class())),
            },
        }
    }

    fn flag_or(self, default: bool) -> bool {
        self.map_or(default, |value| value.is_true())
    }
}

/// Converts a number to a count; negative numbers become 0.
pub(crate) fn count(number: i64) -> usize {
    usize::try_from(number).unwrap_or(0)
}

/// Returns the global function with this name, which every template can call.
pub(crate) fn global(name: &str) -> Option<Value> {
    const NAMES: [&str; 7] = ["range", "dict", "namespace", "cycler", "joiner", "raise_exception", "strftime_now"];
    NAMES.into_iter().find(|known| *known == name).map(Value::Function)
}

/// Returns the entries in a list of pairs.
pub(crate) fn pairs(function: &str, value: &Value, limits: &Limits) -> Result<Vec<(Value, Value)>> {
    let pair = |item: Value| match items::iterate(&item, limits)?.as_slice() {
        [key, value] => Ok((key.clone(), value.clone())),
        _ => fail(format!("`{function}` needs pairs of key and value")),
    };
    items::iterate(value, limits)?.into_iter().map(pair).collect()
}

/// Creates a dict of entries. If a key occurs several times, it has the position of its first entry and the value of its last entry.
pub(crate) fn unique(entries: Vec<(Value, Value)>, limits: &Limits) -> Result<Value> {
    let mut kept: Vec<(Value, Value)> = Vec::with_capacity(entries.len());
    for (key, value) in entries {
        if matches!(key, Value::List(_) | Value::Dict(_)) {
            return fail(format!("a {} cannot be a key of a dict", key.class()));
        }
        limits.steps(1 + kept.len() / 16)?;
        let mut found = None;
        for (at, (known, _)) in kept.iter().enumerate() {
            if compare::equal(known, &key, limits)? {
                found = Some(at);
                break;
            }
        }
        match found {
            Some(at) => kept[at].1 = value,
            None => kept.push((key, value)),
        }
    }
    limits.dict(kept)
}
