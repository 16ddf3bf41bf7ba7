//! Python's numbers: integers of any size, and floats.

use std::sync::Arc;

use num_bigint::BigInt;
use serde_json::{Value as Json, json};

use crate::error::{Result, fail};
use crate::limits::Limits;
use crate::value::{Dict, Seq, Value};

/// The only key of the JSON object that represents a number which `serde_json` cannot store. It is a code point that Unicode reserves for internal
/// use.
const KEY: &str = "\u{fdd2}";

/// The maximum size of an integer in bits.
const MAX_BITS: u64 = 1 << 16;

/// Returns the JSON object for an integer beyond 64 bits, for `NaN`, `Infinity` or `-Infinity`, or for a float beyond `f64`, from its text.
pub(crate) fn as_json(text: &str) -> Json {
    json!({ KEY: text })
}

/// Returns the text of the number in an object of [`as_json`].
pub(crate) fn text_of_json(json: &Json) -> Option<&str> {
    json.as_object().filter(|fields| fields.len() == 1)?.get(KEY)?.as_str()
}

/// Returns the number in an object of [`as_json`].
fn of_json(json: &Json) -> Option<Value> {
    let text = text_of_json(json)?;
    Some(match (text, text.parse::<BigInt>()) {
        (_, Ok(number)) => integer(number),
        ("NaN", _) => Value::Float(f64::NAN),
        ("Infinity", _) => Value::Float(f64::INFINITY),
        ("-Infinity", _) => Value::Float(f64::NEG_INFINITY),
        _ => Value::Float(text.parse().unwrap_or(f64::NAN)),
    })
}

/// Converts JSON to a value, including objects of `as_json`.
pub fn value_of_json(json: &Json) -> Value {
    match json {
        Json::Null => Value::None,
        Json::Bool(value) => Value::Bool(*value),
        Json::Number(value) => match (value.as_i64(), value.as_u64()) {
            (Some(value), _) => Value::Int(value),
            (None, Some(value)) => integer(value.into()),
            (None, None) => Value::Float(value.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::text(text.as_str()),
        Json::Array(items) => Value::List(Arc::new(Seq::new(items.iter().map(value_of_json).collect()))),
        Json::Object(fields) => of_json(json).unwrap_or_else(|| {
            let entry = |(key, value): (&String, &Json)| (Value::text(key.as_str()), value_of_json(value));
            Value::Dict(Arc::new(Dict::new(fields.iter().map(entry).collect())))
        }),
    }
}

/// Converts an integer to a value.
pub(crate) fn integer(number: BigInt) -> Value {
    match i64::try_from(&number) {
        Ok(number) => Value::Int(number),
        Err(_) => Value::Big(Arc::new(number)),
    }
}

/// Returns the integer of an int or a bool.
pub(crate) fn big(value: &Value) -> Option<BigInt> {
    match value {
        Value::Bool(value) => Some(BigInt::from(u8::from(*value))),
        Value::Int(value) => Some(BigInt::from(*value)),
        Value::Big(value) => Some(value.as_ref().clone()),
        _ => None,
    }
}

/// Returns an int or bool as an `i64`. Larger integers saturate.
pub(crate) fn small(value: &Value) -> Option<i64> {
    match value {
        Value::Bool(value) => Some(i64::from(*value)),
        Value::Int(value) => Some(*value),
        Value::Big(value) => Some(if value.sign() == num_bigint::Sign::Minus { i64::MIN } else { i64::MAX }),
        _ => None,
    }
}

/// Returns a number as a float. Big integers are rounded to the nearest float.
pub(crate) fn float(value: &Value) -> Option<f64> {
    match value {
        Value::Bool(value) => Some(f64::from(u8::from(*value))),
        Value::Int(value) => Some(*value as f64),
        Value::Big(value) => value.to_string().parse().ok(),
        Value::Float(value) => Some(*value),
        _ => None,
    }
}

/// Computes Python's `+`, `-`, `*`, `/`, `//`, `%` or `**` of two numbers.
pub(crate) fn arithmetic(op: &str, left: &Value, right: &Value, limits: &Limits) -> Result<Option<Value>> {
    if let (Value::Int(left), Value::Int(right)) = (left, right) {
        let result = match op {
            "+" => left.checked_add(*right),
            "-" => left.checked_sub(*right),
            "*" => left.checked_mul(*right),
            _ => None,
        };
        if let Some(result) = result {
            return Ok(Some(Value::Int(result)));
        }
    }
    if op != "/"
        && let (Some(left), Some(right)) = (big(left), big(right))
        && !(op == "**" && right.sign() == num_bigint::Sign::Minus)
    {
        return integers(op, &left, &right, limits).map(Some);
    }
    let (Some(left), Some(right)) = (float(left), float(right)) else { return Ok(None) };
    let is_division = matches!(op, "/" | "//" | "%");
    if is_division && right == 0.0 {
        return fail("division by zero");
    }
    Ok(Some(Value::Float(match op {
        "+" => left + right,
        "-" => left - right,
        "*" => left * right,
        "/" => left / right,
        "//" => (left / right).floor(),
        "%" => modulo(left, right),
        _ => left.powf(right),
    })))
}

/// Returns the remainder, which has the sign of the divisor.
fn modulo(left: f64, right: f64) -> f64 {
    let rest = left % right;
    if rest != 0.0 && (rest < 0.0) != (right < 0.0) { rest + right } else { rest }
}

fn integers(op: &str, left: &BigInt, right: &BigInt, limits: &Limits) -> Result<Value> {
    let zero = BigInt::default();
    let bits = match op {
        "*" => left.bits() + right.bits(),
        "**" => left.bits().saturating_mul(u64::try_from(right).unwrap_or(u64::MAX)),
        _ => left.bits().max(right.bits()),
    };
    // The powers of -1, 0 and 1 do not grow.
    if bits > MAX_BITS && !(op == "**" && left.bits() < 2) {
        return fail(format!("it makes an integer of more than {MAX_BITS} bits"));
    }
    limits.work((left.bits() + right.bits()) as usize)?;
    Ok(integer(match op {
        "+" => left + right,
        "-" => left - right,
        "*" => left * right,
        "//" | "%" if *right == zero => return fail("integer division or modulo by zero"),
        "//" | "%" => {
            let (mut quotient, mut rest) = (left / right, left % right);
            if rest != zero && rest.sign() != right.sign() {
                quotient -= 1;
                rest += right;
            }
            if op == "//" { quotient } else { rest }
        }
        _ => match u32::try_from(right) {
            Ok(exponent) => left.pow(exponent),
            // Only the bases -1, 0 and 1 get here.
            Err(_) if left.sign() == num_bigint::Sign::Minus && right % 2 == zero => BigInt::from(1),
            Err(_) => left.clone(),
        },
    }))
}
