//! Keywords of JSON schemas that cannot be enforced while a text is generated, and that clients check themselves. They are removed. Of a `pattern`, only
//! the assertions are removed, such as the `(?!…)` that Pydantic writes for decimal numbers. Bounds beyond 64 bits get a form that can be enforced.

use crate::error::{ApiError, Result};
use crate::schemas::each_schema;
use crate::tolerance::Tolerance;
use ottava_data::write_json;
use ottava_engine::pattern;
use serde_json::{Map, Value};

/// The values of `format` that llguidance enforces.
const FORMATS: &[&str] =
    &["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"];

/// The name by which a part of a pattern is logged.
const PART: &str = "pattern: an assertion (?!…), or (?>…) or a++";

/// The largest number below 2⁶³ that is a float. llguidance computes bounds as floats and as integers of 64 bits.
const MOST: i64 = 9_223_372_036_854_774_784;

/// The bounds of numbers, and whether each is a maximum.
const OF_NUMBERS: &[(&str, bool)] =
    &[("minimum", false), ("exclusiveMinimum", false), ("maximum", true), ("exclusiveMaximum", true)];

/// The bounds of lengths, and whether each is a maximum.
const OF_LENGTHS: &[(&str, bool)] = &[
    ("minLength", false),
    ("minItems", false),
    ("minProperties", false),
    ("maxLength", true),
    ("maxItems", true),
    ("maxProperties", true),
];

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
    removed.iter().try_for_each(|name| tolerance.ignore_part(name, "is a keyword of schemas that is not enforced"))
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
    expect_short_values(fields)?;
    settle_bounds(fields)?;
    let translated = |text: &str| pattern(text).map_err(|reason| format!("a `pattern`: {reason}"));
    if let Some(Value::String(text)) = fields.get_mut("pattern") {
        let pattern = translated(text)?;
        removed.extend(pattern.is_weaker.then(|| PART.to_string()));
        *text = pattern.text;
    }
    if let Some(Value::Object(named)) = fields.get_mut("patternProperties") {
        for (name, schema) in std::mem::take(named) {
            let pattern = translated(&name)?;
            if pattern.is_weaker {
                return Err(format!("`patternProperties` has {name:?}, of which a part cannot be enforced"));
            }
            if named.insert(pattern.text, schema).is_some() {
                return Err(format!("`patternProperties` has two names that mean the same as {name:?}; merge them"));
            }
        }
    }
    Ok(removed)
}

/// Integers beyond 64 bits are accepted as bounds and refused as values. Errors with the reason if a value has an integer beyond 64 bits.
fn expect_short_values(fields: &Map<String, Value>) -> std::result::Result<(), String> {
    let of = |name: &'static str| Some((name, long_integer(fields.get(name)?)?));
    match ["const", "enum", "multipleOf"].into_iter().find_map(of) {
        Some((name, integer)) => Err(format!("`{name}` has {integer}, and integers beyond 64 bits cannot be enforced")),
        None => Ok(()),
    }
}

/// Moves bounds of numbers beyond 64 bits to the limits of 64 bits, and removes such bounds of lengths. Errors with the reason for a bound
/// that only integers beyond 64 bits satisfy.
fn settle_bounds(fields: &mut Map<String, Value>) -> std::result::Result<(), String> {
    for &(name, is_maximum) in OF_NUMBERS.iter().chain(OF_LENGTHS) {
        let Some(value) = fields.get_mut(name) else { continue };
        let number = beyond_64_bits(value).map_or(value.as_f64(), |text| text.parse().ok());
        let Some(number) = number.filter(|number| number.abs() > MOST as f64) else { continue };
        if is_maximum != (number > 0.0) {
            return Err(format!("the `{name}` {number:e} is outside of -{MOST} to {MOST}, so it cannot be enforced"));
        }
        // Texts cannot be that long.
        if OF_LENGTHS.contains(&(name, is_maximum)) {
            fields.remove(name);
        } else {
            *value = if is_maximum { MOST } else { -MOST }.into();
        }
    }
    Ok(())
}

/// The first integer beyond 64 bits in a value.
fn long_integer(value: &Value) -> Option<String> {
    beyond_64_bits(value).or_else(|| match value {
        Value::Array(list) => list.iter().find_map(long_integer),
        Value::Object(fields) => fields.values().find_map(long_integer),
        _ => None,
    })
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
        let mut without = json!({"uniqueItems": false});
        remove_unenforced(&mut without, &Tolerance::new(true)).unwrap();
        for named in [json!({"^(?!a)": {}}), json!({"\\d": {}, "[0-9]": {}})] {
            let error = remove_unenforced(&mut json!({"patternProperties": named}), &Tolerance::default()).unwrap_err();
            assert!(error.message().contains("`patternProperties` has "), "{}", error.message());
        }
    }

    #[test]
    fn integers_beyond_64_bits_are_bounds_and_no_values() {
        let settled = |text: &str| {
            let mut schema = parse_json(text).unwrap();
            remove_unenforced(&mut schema, &Tolerance::new(true))
                .map(|()| schema)
                .map_err(|error| error.message().to_string())
        };
        for (given, expected) in [
            (
                r#"{"items": {"maximum": 99999999999999999999, "minimum": 1}}"#,
                json!({"items": {"maximum": MOST, "minimum": 1}}),
            ),
            (
                r#"{"minimum": -1e20, "exclusiveMaximum": 18446744073709551615}"#,
                json!({"minimum": -MOST, "exclusiveMaximum": MOST}),
            ),
            (r#"{"maxLength": 99999999999999999999, "minItems": -1e30, "maxItems": 3}"#, json!({"maxItems": 3})),
        ] {
            assert_eq!(settled(given), Ok(expected), "{given}");
        }
        for (given, words) in [
            (r#"{"minimum": 1e20}"#, "the `minimum` 1e20"),
            (r#"{"exclusiveMaximum": -99999999999999999999}"#, "the `exclusiveMaximum` -1e20"),
            (r#"{"minLength": 99999999999999999999}"#, "the `minLength` 1e20"),
            (r#"{"enum": [1, 99999999999999999999]}"#, "`enum` has 99999999999999999999"),
            (r#"{"enum": [{"a": [99999999999999999999]}]}"#, "`enum` has 99999999999999999999"),
            (r#"{"properties": {"b": {"const": {"a": 99999999999999999999}}}}"#, "`const` has 99999999999999999999"),
        ] {
            let error = settled(given).unwrap_err();
            assert!(error.contains(words), "{given}: {error}");
        }
    }
}
