//! Which tools an answer may or must call (`tool_choice`), and the schemas to which its text must conform then.

use crate::error::{ApiError, Result};
use crate::schemas::each_schema;
use serde_json::{Value, json};

/// Which tools an answer may or must call.
#[derive(Debug, PartialEq)]
pub struct ToolChoice {
    pub kind: Kind,
    /// The tools that may be called.
    pub tools: Vec<Value>,
}

/// Whether an answer calls tools.
#[derive(Debug, PartialEq)]
pub enum Kind {
    /// No calls.
    None,
    /// The model decides whether it calls tools.
    Auto,
    /// At least one call.
    Required,
    /// A call of this function.
    Named(String),
}

/// The form of a choice that is no word, for error messages.
const FORM: &str = r#"{"type": "function", "function": {"name": NAME}}, and not {"type": "allowed_tools", "allowed_tools": {"mode": MODE, "tools": [TOOL, …]}}"#;

impl ToolChoice {
    /// Reads `tool_choice` of a request with `tools`.
    pub fn read(value: Option<&Value>, tools: &[Value]) -> Result<ToolChoice> {
        let wrong = |message: String| Err(ApiError::field("tool_choice", message));
        for (number, tool) in tools.iter().enumerate() {
            expect_function(number, tool)?;
        }
        let (kind, tools) = match value {
            None => (Kind::Auto, tools.to_vec()),
            Some(Value::String(word)) => (word_of(word)?, tools.to_vec()),
            Some(value) if value["type"] == "allowed_tools" => {
                // The fields may also be beside the type, as in requests for responses.
                let allowed = value.get("allowed_tools").unwrap_or(value);
                let (Some(mode), Some(names)) = (allowed["mode"].as_str(), allowed["tools"].as_array()) else {
                    return wrong(format!("`tool_choice` is not none, auto, required or {FORM}"));
                };
                let mut chosen = Vec::new();
                for name in names.iter().map(|tool| tool["function"]["name"].as_str().or_else(|| tool["name"].as_str()))
                {
                    match tools.iter().find(|tool| tool["function"]["name"].as_str() == name) {
                        Some(tool) => chosen.push(tool.clone()),
                        None => {
                            let name = name.unwrap_or_default();
                            return wrong(format!("`tool_choice` allows {name:?}, which is not among the `tools`"));
                        }
                    }
                }
                (word_of(mode)?, chosen)
            }
            Some(value) => match value["function"]["name"].as_str().filter(|_| value["type"] == "function") {
                Some(name) => (Kind::Named(name.into()), tools.to_vec()),
                None => return wrong(format!("`tool_choice` is not none, auto, required or {FORM}")),
            },
        };
        match &kind {
            Kind::Required if tools.is_empty() => wrong("`tool_choice` is required, and there are no `tools`".into()),
            Kind::Named(name) if !tools.iter().any(|tool| tool["function"]["name"] == *name) => {
                wrong(format!("`tool_choice` is the function {name:?}, which is not among the `tools`"))
            }
            _ => Ok(ToolChoice { kind, tools }),
        }
    }

    /// Returns the tools for the template; `null` for none, as with `tool_choice: "none"`. An empty list stays one, as in transformers.
    pub fn for_template(&self, listed: Option<&Value>) -> Value {
        match (&self.kind, listed) {
            (Kind::None, _) | (_, None) => Value::Null,
            (Kind::Auto | Kind::Required | Kind::Named(_), Some(_)) => self.tools.clone().into(),
        }
    }

    /// Returns the JSON schema to which the text of an answer with `most` calls must conform.
    pub fn schema(&self, most: usize) -> Result<Option<Value>> {
        match &self.kind {
            Kind::None | Kind::Auto => Ok(None),
            Kind::Named(name) => Ok(self.tools.iter().find(|tool| tool["function"]["name"] == *name).map(parameters)),
            Kind::Required => {
                let call = |(number, tool): (usize, &Value)| {
                    let mut parameters = parameters(tool);
                    reroot(&mut parameters, &format!("#/items/anyOf/{number}/properties/parameters"));
                    json!({
                        "type": "object",
                        "properties": {"name": {"const": tool["function"]["name"]}, "parameters": parameters},
                        "required": ["name", "parameters"],
                        "additionalProperties": false,
                    })
                };
                let calls: Vec<Value> = self.tools.iter().enumerate().map(call).collect();
                let mut list = json!({"type": "array", "minItems": 1, "items": {"anyOf": calls}});
                if most < usize::MAX {
                    list["maxItems"] = most.into();
                }
                Ok(Some(list))
            }
        }
    }
}

/// Reads a choice that is a word.
fn word_of(word: &str) -> Result<Kind> {
    match word {
        "none" => Ok(Kind::None),
        "auto" => Ok(Kind::Auto),
        "required" => Ok(Kind::Required),
        other => {
            let message = format!("`tool_choice` is {other:?}; it is none, auto, required or a function");
            Err(ApiError::field("tool_choice", message))
        }
    }
}

/// Errors if a tool is no function with a name.
fn expect_function(number: usize, tool: &Value) -> Result<()> {
    let wrong = |message: String| Err(ApiError::field("tools", message));
    let parameters = &tool["function"]["parameters"];
    match (tool["type"].as_str().unwrap_or("function"), tool["function"]["name"].as_str()) {
        ("function", None | Some("")) => wrong(format!("tool {number} has no `function.name`")),
        ("function", Some(_)) if !(parameters.is_null() || parameters.is_object()) => {
            wrong(format!("tool {number} has `parameters` that are no JSON schema; a schema is an object"))
        }
        ("function", Some(_)) => Ok(()),
        (kind, _) => wrong(format!("tool {number} is of the type {kind:?}; only functions are implemented")),
    }
}

/// Makes the references of a schema valid for a larger schema that has the schema at `place`.
fn reroot(schema: &mut Value, place: &str) {
    each_schema(schema, &mut |fields| {
        if let Some(Value::String(reference)) = fields.get_mut("$ref")
            && let Some(rest) = reference.strip_prefix('#')
        {
            *reference = format!("{place}{rest}");
        }
    });
}

/// Returns the JSON schema of the arguments of a tool. As in OpenAI's API, a tool without parameters has the arguments `{}`.
fn parameters(tool: &Value) -> Value {
    let names_none = |(name, value): (&String, &Value)| match name.as_str() {
        "type" => value == "object",
        "properties" => value.as_object().is_some_and(|properties| properties.is_empty()),
        "required" => value.as_array().is_some_and(Vec::is_empty),
        name => ["title", "description", "$schema"].contains(&name),
    };
    match tool["function"].get("parameters") {
        Some(Value::Object(schema)) if !schema.iter().all(names_none) => schema.clone().into(),
        _ => json!({"type": "object", "properties": {}, "additionalProperties": false}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_of_parameters_with_any_name_are_rerooted() {
        let schema = |root: &str| {
            let reference = json!({"$ref": format!("{root}/$defs/A")});
            json!({
                "properties": {"default": reference, "list": {"items": reference, "default": [{"$ref": "#/$defs/A"}]}},
                "$defs": {"A": {"anyOf": [reference, {"type": "null"}]}},
            })
        };
        let mut rerooted = schema("#");
        reroot(&mut rerooted, "#/items");
        assert_eq!(rerooted, schema("#/items"));
    }
}
