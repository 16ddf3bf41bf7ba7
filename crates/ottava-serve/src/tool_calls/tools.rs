//! What formats of calls know of the tools.

use serde_json::Value;
use std::sync::Arc;

/// The tools of a request, in the form of OpenAI's chats.
#[derive(Clone, Debug, Default)]
pub struct Tools(Arc<Vec<Value>>);

impl Tools {
    /// The tools of a request.
    pub fn new(tools: &[Value]) -> Tools {
        Tools(Arc::new(tools.to_vec()))
    }

    /// Whether the parameter `key` of the function `name` is a text, and nothing else.
    pub fn is_text(&self, name: &str, key: &str) -> bool {
        let tool = self.0.iter().find(|tool| tool["function"]["name"] == name);
        let schema = tool.map_or(&Value::Null, |tool| &tool["function"]["parameters"]["properties"][key]);
        let mut types = Vec::new();
        collect_types(schema, &mut types);
        types.contains(&"string") && types.iter().all(|kind| ["string", "null"].contains(kind))
    }
}

/// Collects the types of a schema and of its alternatives.
fn collect_types<'a>(schema: &'a Value, types: &mut Vec<&'a str>) {
    match &schema["type"] {
        Value::String(kind) => types.push(kind),
        Value::Array(kinds) => types.extend(kinds.iter().filter_map(Value::as_str)),
        _ => {}
    }
    for alternatives in ["anyOf", "oneOf"] {
        schema[alternatives].as_array().into_iter().flatten().for_each(|schema| collect_types(schema, types));
    }
    if schema["enum"].as_array().is_some_and(|values| values.iter().all(Value::is_string)) {
        types.push("string");
    }
}
