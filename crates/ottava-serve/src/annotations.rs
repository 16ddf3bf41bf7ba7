//! Keywords of JSON schemas that cannot be enforced while a text is generated, and that clients check themselves. They are removed. Of a `pattern`, only
//! the assertions are removed, such as the `(?!…)` that Pydantic writes for decimal numbers.

use crate::error::{ApiError, Result};
use crate::schemas::each_schema;
use crate::tolerance::Tolerance;
use ottava_data::write_json;
use ottava_engine::pattern;
use serde_json::{Map, Value};

/// The values of `format` that llguidance enforces.
const FORMATS: &[&str] =
    &["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"];

/// The name by which an assertion of a pattern is logged.
const ASSERTION: &str = "pattern: an assertion such as (?!…)";

/// Removes `uniqueItems`, each `format` that is not enforced, and the assertions of each `pattern`. The log tells each of them once. Errors if they must
/// be refused, and for a pattern that cannot be read.
pub fn remove_unenforced(schema: &mut Value, tolerance: &Tolerance) -> Result<()> {
    let (mut removed, mut wrong) = (Vec::new(), None);
    each_schema(schema, &mut |fields| match remove(fields) {
        Ok(names) => removed.extend(names),
        Err(reason) => wrong = Some(reason),
    });
    if let Some(reason) = wrong {
        return Err(ApiError::invalid(format!("a JSON schema cannot be used: {reason}")));
    }
    removed.iter().try_for_each(|name| tolerance.ignore(name, "is a keyword of schemas that is not enforced"))
}

/// Removes the keywords of one schema, and returns their names. Errors with the reason if a pattern cannot be read.
fn remove(fields: &mut Map<String, Value>) -> std::result::Result<Vec<String>, String> {
    let mut removed = Vec::new();
    if let Some(unique) = fields.remove("uniqueItems")
        && unique != false
    {
        removed.push("uniqueItems".into());
    }
    let format = fields.get("format").and_then(Value::as_str).filter(|format| !FORMATS.contains(format));
    if let Some(name) = format.map(|format| format!("format: {format}")) {
        fields.remove("format");
        removed.push(name);
    }
    replace_long_integers(fields)?;
    let mut translated = |expression: &str| {
        let pattern = pattern(expression).map_err(|reason| format!("a `pattern`: {reason}"))?;
        removed.extend(pattern.is_weaker.then(|| ASSERTION.to_string()));
        Ok::<_, String>(pattern.text)
    };
    if let Some(Value::String(text)) = fields.get_mut("pattern") {
        *text = translated(text)?;
    }
    if let Some(Value::Object(named)) = fields.get_mut("patternProperties") {
        let schemas = std::mem::take(named).into_iter().map(|(name, schema)| Ok((translated(&name)?, schema)));
        *named = schemas.collect::<std::result::Result<_, String>>()?;
    }
    Ok(removed)
}

/// Replaces integers beyond 64 bits in bounds, such as `maximum`, by floats. Errors with the reason for such an integer as a value.
fn replace_long_integers(fields: &mut Map<String, Value>) -> std::result::Result<(), String> {
    for (name, value) in fields.iter_mut() {
        let integers: Vec<String> = match (name.as_str(), &*value) {
            ("enum", Value::Array(list)) => list.iter().filter_map(beyond_64_bits).collect(),
            _ => beyond_64_bits(value).into_iter().collect(),
        };
        match (name.as_str(), integers.first()) {
            (_, None) => {}
            ("const" | "enum", Some(integer)) => {
                return Err(format!("`{name}` has {integer}, and integers beyond 64 bits cannot be enforced"));
            }
            (_, Some(integer)) => *value = integer.parse::<f64>().map_or(Value::Null, Value::from),
        }
    }
    Ok(())
}

/// An integer beyond 64 bits, which is a special object with one field in memory.
fn beyond_64_bits(value: &Value) -> Option<String> {
    let is_special = value.as_object().is_some_and(|fields| fields.len() == 1);
    Some(value).filter(|_| is_special).map(write_json).filter(|text| !text.starts_with('{'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ottava_data::parse_json;
    use serde_json::json;

    #[test]
    fn keywords_that_are_not_enforced_are_removed_or_refused() {
        let list = |items: Value| json!({"type": "array", "uniqueItems": true, "items": items});
        let mut schema = json!({"properties": {"format": {"type": "string", "format": "path"}, "at": {"format": "uuid"},
            "tags": list(json!({"format": "binary"}))}, "default": {"uniqueItems": true}});
        let expected = json!({"properties": {"format": {"type": "string"}, "at": {"format": "uuid"},
            "tags": {"type": "array", "items": {}}}, "default": {"uniqueItems": true}});
        let error = remove_unenforced(&mut schema.clone(), &Tolerance::new(true)).unwrap_err();
        assert!(error.message().contains("not enforced"), "{}", error.message());
        remove_unenforced(&mut schema, &Tolerance::default()).unwrap();
        assert_eq!(schema, expected);
        remove_unenforced(&mut list(json!({})), &Tolerance::default()).unwrap();
        let mut patterns = json!({"properties": {"pattern": {"type": "string", "pattern": "^(?!-)[\\d&&]$"}},
            "patternProperties": {"^\\d": {"pattern": "[-\\d]"}}});
        assert!(
            remove_unenforced(&mut patterns.clone(), &Tolerance::new(true))
                .unwrap_err()
                .message()
                .contains("assertion")
        );
        remove_unenforced(&mut patterns, &Tolerance::default()).unwrap();
        assert_eq!(patterns["properties"]["pattern"]["pattern"], "^(?:)[[0-9]\\x{26}\\x{26}]$");
        assert_eq!(patterns["patternProperties"], json!({"^[0-9]": {"pattern": "[\\x{2d}[0-9]]"}}));
        let error = remove_unenforced(&mut json!({"items": {"pattern": "(a)\\1"}}), &Tolerance::default()).unwrap_err();
        assert!(error.message().contains("at character 5"), "{}", error.message());
        // Integers beyond 64 bits are bounds, and no values.
        let mut bounded = parse_json(r#"{"items": {"maximum": 99999999999999999999, "minimum": 1}}"#).unwrap();
        remove_unenforced(&mut bounded, &Tolerance::new(true)).unwrap();
        assert_eq!(bounded, json!({"items": {"maximum": 1e20, "minimum": 1}}));
        let mut value = parse_json(r#"{"enum": [1, 99999999999999999999]}"#).unwrap();
        let error = remove_unenforced(&mut value, &Tolerance::default()).unwrap_err();
        assert!(error.message().contains("`enum` has 99999999999999999999"), "{}", error.message());
        let mut without = json!({"uniqueItems": false});
        remove_unenforced(&mut without, &Tolerance::new(true)).unwrap();
    }
}
