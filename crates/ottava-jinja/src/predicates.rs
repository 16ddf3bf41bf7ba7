//! Tests: `value is name`.

use crate::arguments::CallArguments;
use crate::error::{Result, fail};
use crate::eval::{Object, Rendering};
use crate::value::{Value, ViewKind};
use crate::{compare, filters, items, number, ops, text, text_methods};

impl Rendering<'_> {
    /// Whether `value` passes the test `name`.
    pub(crate) fn test(&self, name: &str, value: &Value, arguments: &CallArguments) -> Result<bool> {
        self.limits.steps(1)?;
        if let Some(op) = operator(name) {
            let [other] = arguments.bind(name, ["other"])?;
            let Some(other) = other else { return fail(format!("the test `{name}` needs a value")) };
            return self.holds(op, value, &other);
        }
        match name {
            "divisibleby" => {
                let [divisor] = arguments.bind(name, ["num"])?;
                return Ok(self.remainder(value, &divisor.unwrap_or(Value::None))? == 0);
            }
            "sameas" => {
                let [other] = arguments.bind(name, ["other"])?;
                return self.same(value, &other.unwrap_or(Value::None));
            }
            _ => arguments.bind::<0>(name, [])?,
        };
        Ok(match name {
            "defined" => !value.is_undefined(),
            "undefined" => value.is_undefined(),
            "none" => matches!(value, Value::None),
            "boolean" => matches!(value, Value::Bool(_)),
            "true" => matches!(value, Value::Bool(true)),
            "false" => matches!(value, Value::Bool(false)),
            "integer" => matches!(value, Value::Int(_) | Value::Big(_)),
            "float" => matches!(value, Value::Float(_)),
            "number" => number::float(value).is_some(),
            "string" => value.as_str().is_some(),
            "mapping" => matches!(value, Value::Dict(_)),
            "sequence" => match value {
                Value::View(view) => view.kind != ViewKind::Generator && matches!(view.kind, ViewKind::Range(_)),
                Value::Str(_) | Value::List(_) | Value::Tuple(_) | Value::Dict(_) | Value::Undefined(_) => true,
                _ => false,
            },
            "iterable" => items::iterate(value, &self.limits).is_ok(),
            "callable" => match value {
                Value::Object(object) => {
                    matches!(self.objects[*object], Object::Macro(..) | Object::Loop(_) | Object::Joiner { .. })
                }
                _ => matches!(value, Value::Method(_) | Value::Function(_)),
            },
            "odd" => self.remainder(value, &Value::Int(2))? == 1,
            "even" => self.remainder(value, &Value::Int(2))? == 0,
            "lower" => text_methods::is_cased(&text::string(value, &self.limits)?, char::is_lowercase),
            "upper" => text_methods::is_cased(&text::string(value, &self.limits)?, char::is_uppercase),
            "escaped" => false,
            "filter" => value.as_str().is_some_and(filters::exists),
            "test" => value.as_str().is_some_and(exists),
            _ => return fail(format!("there is no test `{name}`")),
        })
    }

    fn remainder(&self, value: &Value, divisor: &Value) -> Result<i64> {
        match number::small(&ops::binary("%", value, divisor, &self.limits)?) {
            Some(rest) => Ok(rest),
            None => match ops::binary("%", value, divisor, &self.limits)? {
                Value::Float(rest) if rest.fract() == 0.0 => Ok(rest as i64),
                _ => Ok(-1),
            },
        }
    }

    /// Computes Python's `is`, which is true for the same constant, number or text.
    fn same(&self, left: &Value, right: &Value) -> Result<bool> {
        Ok(left.class() == right.class() && compare::equal(left, right, &self.limits)?)
    }
}

/// Returns the operator that a test means.
fn operator(name: &str) -> Option<&'static str> {
    Some(match name {
        "eq" | "equalto" | "==" => "==",
        "ne" | "!=" => "!=",
        "lt" | "lessthan" | "<" => "<",
        "le" | "<=" => "<=",
        "gt" | "greaterthan" | ">" => ">",
        "ge" | ">=" => ">=",
        "in" => "in",
        _ => return None,
    })
}

fn exists(name: &str) -> bool {
    const NAMES: [&str; 23] = [
        "divisibleby",
        "sameas",
        "defined",
        "undefined",
        "none",
        "boolean",
        "true",
        "false",
        "integer",
        "float",
        "number",
        "string",
        "mapping",
        "sequence",
        "iterable",
        "callable",
        "odd",
        "even",
        "lower",
        "upper",
        "escaped",
        "filter",
        "test",
    ];
    operator(name).is_some() || NAMES.contains(&name)
}
