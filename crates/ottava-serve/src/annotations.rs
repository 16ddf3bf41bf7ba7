//! Keywords of JSON schemas that cannot be enforced while a text is generated, and that clients check themselves. They are removed.

use crate::error::Result;
use crate::schemas::each_schema;
use crate::tolerance::Tolerance;
use serde_json::{Map, Value};

/// The values of `format` that llguidance enforces.
const FORMATS: &[&str] =
    &["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"];

/// Removes `uniqueItems`, and each `format` that is not enforced. The log tells each of them once. Errors if they must be refused.
pub fn remove_unenforced(schema: &mut Value, tolerance: &Tolerance) -> Result<()> {
    let mut removed = Vec::new();
    each_schema(schema, &mut |fields| removed.extend(remove(fields)));
    removed.iter().try_for_each(|name| tolerance.ignore(name, "is a keyword of schemas that is not enforced"))
}

/// Removes the keywords of one schema, and returns their names.
fn remove(fields: &mut Map<String, Value>) -> Vec<String> {
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
    removed
}

#[cfg(test)]
mod tests {
    use super::*;
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
        let mut without = json!({"uniqueItems": false});
        remove_unenforced(&mut without, &Tolerance::new(true)).unwrap();
    }
}
