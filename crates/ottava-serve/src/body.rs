//! The JSON object of a request. A field that is missing or `null` has its default, one of another type is an error that names it, and
//! fields that nothing reads are ignored, as clients send some for other servers.

use crate::error::{ApiError, Result};
use serde_json::{Map, Value};

/// The fields of a request.
pub struct Body(Map<String, Value>);

impl Body {
    /// Errors for what is no JSON object.
    pub fn parse(bytes: &[u8]) -> Result<Body> {
        match serde_json::from_slice(bytes) {
            Ok(Value::Object(fields)) => Ok(Body(fields)),
            Ok(_) => Err(ApiError::invalid("the body is no JSON object")),
            Err(error) => Err(ApiError::invalid(format!("the body is no JSON: {error}"))),
        }
    }

    /// A field, unless it is missing or `null`.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn read<'a, T>(&'a self, name: &str, kind: &str, read: impl FnOnce(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        read(value)
            .map(Some)
            .ok_or_else(|| ApiError::field(name, format!("`{name}` is {}; it is {kind}", short(value))))
    }

    pub fn number(&self, name: &str) -> Result<Option<f64>> {
        self.read(name, "a number", Value::as_f64)
    }

    pub fn count(&self, name: &str) -> Result<Option<usize>> {
        self.read(name, "a whole number from 0 up", |value| value.as_u64().map(|count| count as usize))
    }

    /// A whole number, which may be negative.
    pub fn integer(&self, name: &str) -> Result<Option<i64>> {
        self.read(name, "a whole number", Value::as_i64)
    }

    pub fn flag(&self, name: &str) -> Result<bool> {
        Ok(self.read(name, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    /// A flag that is on unless it is said otherwise.
    pub fn flag_on(&self, name: &str) -> Result<bool> {
        Ok(self.read(name, "true or false", Value::as_bool)?.unwrap_or(true))
    }

    pub fn text(&self, name: &str) -> Result<Option<&str>> {
        self.read(name, "a text", Value::as_str)
    }

    pub fn list(&self, name: &str) -> Result<Option<&Vec<Value>>> {
        self.read(name, "a list", Value::as_array)
    }

    pub fn object(&self, name: &str) -> Result<Option<&Map<String, Value>>> {
        self.read(name, "an object", Value::as_object)
    }

    /// A text, or a list of texts.
    pub fn texts(&self, name: &str) -> Result<Vec<String>> {
        let texts = |value: &Value| match value {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(list) => list.iter().map(|text| Some(text.as_str()?.to_string())).collect(),
            _ => None,
        };
        Ok(self.read(name, "a text or a list of texts", texts)?.unwrap_or_default())
    }

    /// A list of token ids.
    pub fn ids(&self, name: &str) -> Result<Vec<u32>> {
        Ok(self.read(name, "a list of token ids", ids)?.unwrap_or_default())
    }
}

/// Token ids, if a value is a list of them.
pub fn ids(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

/// A value as an error message shows it.
fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_other_types_are_named() {
        let body =
            Body::parse(br#"{"n": "two", "a": null, "stop": ["x", 1], "ids": [1, -2], "top_p": 1, "m": 1.5}"#).unwrap();
        let message = |result: Result<()>| result.unwrap_err().json()["error"].clone();
        let wrong = message(body.count("n").map(drop));
        assert_eq!(
            (wrong["message"].as_str().unwrap(), wrong["param"].as_str().unwrap()),
            ("`n` is \"two\"; it is a whole number from 0 up", "n")
        );
        assert_eq!(message(body.texts("stop").map(drop))["param"], "stop");
        assert_eq!(message(body.ids("ids").map(drop))["type"], "invalid_request_error");
        assert_eq!(message(body.count("m").map(drop))["param"], "m");
        assert_eq!(body.number("top_p").unwrap(), Some(1.0));
        assert_eq!((body.text("a").unwrap(), body.count("missing").unwrap()), (None, None));
        assert!(Body::parse(b"[1]").is_err() && Body::parse(b"{").is_err());
        let long = Body::parse(format!("{{\"n\": \"{}\"}}", "ü".repeat(200)).as_bytes()).unwrap();
        assert!(message(long.count("n").map(drop))["message"].as_str().unwrap().contains('…'));
    }
}
