//! Fields that constrain the texts of completions: OpenAI's `response_format`, and vLLM's `structured_outputs` and `guided_*`.

use crate::body::Body;
use crate::closed::close;
use crate::error::{ApiError, Result};
use crate::preparing::beside;
use crate::served::Served;
use ottava_engine::Grammar;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The names of the fields that constrain texts.
pub const FIELDS: &[&str] = &["response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"];
/// The maximum length of a constraint as JSON, in bytes.
const MOST_BYTES: usize = 256 << 10;
/// The maximum number of entries of an object or list at the top level of a field.
const MOST_ENTRIES: usize = 1024;

/// The form that texts must have.
enum Constraint {
    /// A JSON schema.
    Json(Value),
    Regex(String),
    Choice(Vec<String>),
}

/// Compiles the grammar of a request's completions; `None` without a constraint. `calls` is the JSON schema that `tool_choice` requires.
pub async fn grammar(served: &Arc<Served>, body: &Body, calls: Option<Value>) -> Result<Option<Grammar>> {
    let mut found: Vec<_> = calls.map(|schema| ("tool_choice", Constraint::Json(schema))).into_iter().collect();
    for name in FIELDS {
        if let Some(constraint) = read(body, name)? {
            found.push((*name, constraint));
        }
    }
    if let [(first, _), (second, _), ..] = &found[..] {
        return Err(ApiError::field(
            second,
            format!("`{first}` and `{second}` both constrain the text; leave one out"),
        ));
    }
    let Some((name, constraint)) = found.pop() else { return Ok(None) };
    if body.count("min_tokens")?.is_some_and(|min_tokens| min_tokens > 0) {
        let message =
            format!("`min_tokens` is not for requests with `{name}`, whose texts end where they are complete");
        return Err(ApiError::field("min_tokens", message));
    }
    let grammars = served.grammars.clone();
    let compile = move || {
        let grammars = grammars.get()?;
        let grammar = match constraint {
            Constraint::Json(mut schema) => {
                close(&mut schema);
                grammars.json(&schema)
            }
            Constraint::Regex(expression) => grammars.regex(&expression),
            Constraint::Choice(texts) => grammars.choice(&texts.iter().map(String::as_str).collect::<Vec<_>>()),
        };
        grammar.map(Some).map_err(|error| ApiError::field(name, format!("`{name}` cannot be used: {error}")))
    };
    // A short constraint can take long to compile, so its length says nothing.
    beside(usize::MAX, compile).await
}

/// Reads the constraint of one field.
fn read(body: &Body, name: &'static str) -> Result<Option<Constraint>> {
    let wrong = |is: &str| ApiError::field(name, format!("`{name}` {is}"));
    if body.get(name).is_some_and(|value| value.to_string().len() > MOST_BYTES) {
        return Err(wrong(&format!("has more than {MOST_BYTES} bytes")));
    }
    Ok(match name {
        "response_format" => match body.object(name, MOST_ENTRIES)? {
            Some(format) => response_format(format)?,
            None => None,
        },
        "structured_outputs" => {
            let set = body.object(name, MOST_ENTRIES)?.into_iter().flatten().filter(|(_, value)| !value.is_null());
            match set.collect::<Vec<_>>()[..] {
                [] => None,
                [(kind, value)] => Some(by_kind(kind, value).ok_or_else(|| {
                    wrong("has one of `json` (a schema), `regex` (a text), `choice` (a list of texts), `json_object` (true)")
                })?),
                _ => return Err(wrong("has several constraints; leave all but one out")),
            }
        }
        guided => match body.get(guided) {
            Some(value) => Some(by_kind(guided.trim_start_matches("guided_"), value).ok_or_else(|| {
                wrong("has the wrong type: guided_json is a schema, guided_regex a text, guided_choice a list of texts")
            })?),
            None => None,
        },
    })
}

/// Reads OpenAI's `response_format`. Texts conform exactly to the schema, with or without `strict`.
fn response_format(format: &Map<String, Value>) -> Result<Option<Constraint>> {
    let wrong = |message: &str| ApiError::field("response_format", message);
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(any_object())),
        Some("json_schema") => {
            let schema = format.get("json_schema").and_then(|named| named.get("schema"));
            let schema = schema.filter(|schema| schema.is_object());
            let missing = || wrong("`response_format.json_schema.schema` is missing; it is a JSON schema");
            Ok(Some(Constraint::Json(schema.ok_or_else(missing)?.clone())))
        }
        _ => Err(wrong("`response_format.type` is text, json_object or json_schema")),
    }
}

/// Reads a constraint by its vLLM name.
fn by_kind(kind: &str, value: &Value) -> Option<Constraint> {
    match (kind, value) {
        ("json", Value::Object(_)) => Some(Constraint::Json(value.clone())),
        // The schema may also be given as a text.
        ("json", Value::String(text)) => serde_json::from_str(text).ok().filter(Value::is_object).map(Constraint::Json),
        ("regex", Value::String(expression)) => Some(Constraint::Regex(expression.clone())),
        ("choice", Value::Array(texts)) => {
            texts.iter().map(|text| Some(text.as_str()?.to_string())).collect::<Option<_>>().map(Constraint::Choice)
        }
        ("json_object", Value::Bool(true)) => Some(any_object()),
        _ => None,
    }
}

fn any_object() -> Constraint {
    Constraint::Json(json!({"type": "object"}))
}
