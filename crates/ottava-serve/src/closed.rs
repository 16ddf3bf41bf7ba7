//! Schemas whose objects have only the properties that the schema names.
//!
//! By JSON Schema, an object may have further properties unless the schema says otherwise. Models write such properties, and programs that wrote the
//! schema do not expect them, so other servers close these objects too.

use crate::schemas::each_schema;
use serde_json::{Map, Value};

/// Keywords beside `properties` that say which further properties an object has, or add properties.
const OPENING: &[&str] = &[
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "if",
    "not",
    "$ref",
];

/// Closes each object with `properties` that has none of the keywords [`OPENING`]. A schema that combines schemas with `allOf` stays as it is, because
/// an object would have to fit into all of them.
pub fn close(schema: &mut Value) {
    if !combines(schema) {
        each_schema(schema, &mut close_one);
    }
}

/// Whether a schema has an `allOf` of several schemas.
fn combines(schema: &Value) -> bool {
    match schema {
        Value::Object(fields) => {
            let here = fields.get("allOf").and_then(Value::as_array).is_some_and(|list| list.len() > 1);
            here || fields.values().any(combines)
        }
        Value::Array(list) => list.iter().any(combines),
        _ => false,
    }
}

fn close_one(fields: &mut Map<String, Value>) {
    let has_properties = fields.get("properties").is_some_and(Value::is_object);
    if has_properties && !OPENING.iter().any(|keyword| fields.contains_key(*keyword)) {
        fields.insert("additionalProperties".into(), false.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn objects_with_properties_are_closed_unless_the_schema_says_otherwise() {
        let a = json!({"type": "string"});
        let closed = |mut schema: Value| {
            close(&mut schema);
            schema
        };
        let open = json!({"type": "object", "properties": {"a": a}});
        let shut = json!({"type": "object", "properties": {"a": a}, "additionalProperties": false});
        assert_eq!(closed(open.clone()), shut);
        for schema in [
            json!({"type": "object"}),
            json!({"properties": {"a": a}, "additionalProperties": {"type": "integer"}}),
            json!({"properties": {"a": a}, "patternProperties": {"^b": a}}),
            json!({"properties": {"a": a}, "anyOf": [{"required": ["a"]}]}),
            json!({"allOf": [open, {"properties": {"b": a}}]}),
            json!({"enum": [{"properties": {}}]}),
        ] {
            assert_eq!(closed(schema.clone()), schema);
        }
        let nested = |inner: &Value| json!({"$defs": {"properties": inner}, "type": "array", "items": {"anyOf": [inner, {"type": "null"}]}});
        assert_eq!(closed(nested(&open)), nested(&shut));
        // A property may have the name of a keyword.
        let named = json!({"properties": {"properties": {"type": "object"}}});
        assert_eq!(closed(named.clone())["properties"], named["properties"]);
    }
}
