//! Fields that constrain the texts of completions: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`, and llama.cpp's `grammar` and
//! `json_schema`.

use crate::annotations::remove_unenforced;
use crate::body::Body;
use crate::closed::close;
use crate::error::{ApiError, Result};
use crate::preparing::beside;
use crate::served::Served;
use crate::tolerance::Tolerance;
use ottava_data::parse_json;
use ottava_engine::Grammar;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The names of the fields that constrain texts.
pub const FIELDS: &[&str] = &[
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "grammar",
    "json_schema",
];
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
    /// Rules in GBNF, EBNF or Lark.
    Rules(String),
    /// Free text with constrained parts.
    StructuralTag(Value),
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
    let (grammars, tolerance) = (served.grammars.clone(), served.tolerance.clone());
    let compile = move || {
        let grammars = grammars.get()?;
        let grammar = match constraint {
            Constraint::Json(mut schema) => {
                settle(&mut schema, &tolerance).map_err(|error| error.within(name))?;
                grammars.json(&schema)
            }
            Constraint::Rules(rules) => grammars.rules(&rules),
            Constraint::StructuralTag(mut tag) => {
                settle_within(&mut tag, &tolerance).map_err(|error| error.within(name))?;
                grammars.structural_tag(&tag)
            }
            Constraint::Regex(expression) => grammars.regex(&expression),
            Constraint::Choice(texts) => grammars.choice(&texts.iter().map(String::as_str).collect::<Vec<_>>()),
        };
        grammar.map(Some).map_err(|error| ApiError::field(name, format!("`{name}` cannot be used: {error}")))
    };
    // A short constraint can take long to compile, so its length says nothing.
    beside(usize::MAX, compile).await
}

/// Gives a schema the form in which it is enforced.
fn settle(schema: &mut Value, tolerance: &Tolerance) -> Result<()> {
    close(schema);
    remove_unenforced(schema, tolerance)
}

/// Gives the schemas of a structural tag the form in which they are enforced.
fn settle_within(tag: &mut Value, tolerance: &Tolerance) -> Result<()> {
    match tag {
        Value::Object(fields) => fields.iter_mut().try_for_each(|(name, value)| match name.as_str() {
            "schema" | "json_schema" => settle(value, tolerance),
            _ => settle_within(value, tolerance),
        }),
        Value::Array(list) => list.iter_mut().try_for_each(|value| settle_within(value, tolerance)),
        _ => Ok(()),
    }
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
                    wrong(
                        "has one of `json` (a schema), `regex` (a text), `choice` (a list of texts), `grammar` (a text), `structural_tag` (an \
                         object, or its JSON), `json_object` (true)",
                    )
                })?),
                _ => return Err(wrong("has several constraints; leave all but one out")),
            }
        }
        guided => match body.get(guided) {
            // Clients of llama.cpp send an empty grammar for none.
            Some(Value::String(text)) if text.is_empty() && kind_of(guided) == "grammar" => None,
            Some(value) => Some(by_kind(kind_of(guided), value).ok_or_else(|| {
                wrong(
                    "has the wrong type: guided_json and json_schema are schemas, guided_regex, guided_grammar and grammar are texts, \
                     guided_choice is a list of texts",
                )
            })?),
            None => None,
        },
    })
}

/// The kind of constraint of a field that has one.
fn kind_of(field: &str) -> &str {
    match field {
        "json_schema" => "json",
        field => field.trim_start_matches("guided_"),
    }
}

/// Reads OpenAI's `response_format`. Texts conform exactly to the schema, with or without `strict`.
fn response_format(format: &Map<String, Value>) -> Result<Option<Constraint>> {
    let wrong = |message: &str| ApiError::field("response_format", message);
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        // llama.cpp takes a schema here.
        Some("json_object") => {
            let schema = format.get("schema").filter(|schema| !schema.is_null());
            match schema.filter(|schema| !schema.is_object()) {
                Some(_) => Err(wrong("`response_format.schema` is no JSON schema")),
                None => Ok(Some(schema.map_or_else(any_object, |schema| Constraint::Json(schema.clone())))),
            }
        }
        Some("json_schema") => {
            let schema = format.get("json_schema").and_then(|named| named.get("schema"));
            let schema = schema.filter(|schema| schema.is_object());
            let missing = || wrong("`response_format.json_schema.schema` is missing; it is a JSON schema");
            Ok(Some(Constraint::Json(schema.ok_or_else(missing)?.clone())))
        }
        Some("structural_tag") => Ok(Some(Constraint::StructuralTag(format.clone().into()))),
        _ => Err(wrong("`response_format.type` is text, json_object, json_schema or structural_tag")),
    }
}

/// Reads a constraint by its vLLM name.
fn by_kind(kind: &str, value: &Value) -> Option<Constraint> {
    match (kind, value) {
        ("json", Value::Object(_)) => Some(Constraint::Json(value.clone())),
        // The schema may also be given as a text.
        ("json", Value::String(text)) => parse_json(text).ok().filter(Value::is_object).map(Constraint::Json),
        ("regex", Value::String(expression)) => Some(Constraint::Regex(expression.clone())),
        ("choice", Value::Array(texts)) => {
            texts.iter().map(|text| Some(text.as_str()?.to_string())).collect::<Option<_>>().map(Constraint::Choice)
        }
        ("grammar", Value::String(rules)) => Some(Constraint::Rules(rules.clone())),
        ("structural_tag", Value::Object(_)) => Some(Constraint::StructuralTag(value.clone())),
        ("structural_tag", Value::String(text)) => {
            parse_json(text).ok().filter(Value::is_object).map(Constraint::StructuralTag)
        }
        ("json_object", Value::Bool(true)) => Some(any_object()),
        _ => None,
    }
}

fn any_object() -> Constraint {
    Constraint::Json(json!({"type": "object"}))
}
