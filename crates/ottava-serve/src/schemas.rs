//! A walk over the schemas of a JSON schema.

use serde_json::{Map, Value};

/// Keywords whose values are no schemas.
const VALUES: &[&str] = &["const", "enum", "default", "examples"];

/// Calls `visit` with `schema`, then with each schema within it.
pub fn each_schema(schema: &mut Value, visit: &mut dyn FnMut(&mut Map<String, Value>)) {
    match schema {
        Value::Object(fields) => {
            visit(fields);
            for (name, value) in fields.iter_mut().filter(|(name, _)| !VALUES.contains(&name.as_str())) {
                match (name.as_str(), value) {
                    // These are schemas by name, and no schema themselves.
                    (
                        "properties" | "patternProperties" | "dependentSchemas" | "$defs" | "definitions",
                        Value::Object(named),
                    ) => {
                        named.values_mut().for_each(|schema| each_schema(schema, visit));
                    }
                    (_, value) => each_schema(value, visit),
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(|schema| each_schema(schema, visit)),
        _ => {}
    }
}
