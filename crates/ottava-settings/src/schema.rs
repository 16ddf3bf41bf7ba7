//! The JSON schema of a run's file, for editors. It follows from the code that reads the file: each key is tried with values of each kind.

use crate::RunConfig;
use crate::names::{LISTS, insert};
use serde_json::{Map, Value as Json, json};
use std::collections::BTreeMap;
use toml::{Table, Value};

/// The file that explains each key.
const REFERENCE: &str = include_str!("../../../configs/reference.toml");

/// A text that is no name of anything.
const NO_NAME: &str = "\u{1}";

/// The schema, in the form of JSON Schema draft 7. It knows the keys of `configs/reference.toml`, and no names of other trainers.
pub fn schema() -> Json {
    let described = descriptions();
    let mut root = object(Map::new());
    root["$schema"] = json!("http://json-schema.org/draft-07/schema#");
    root["title"] = json!("A run of Ottava");
    for (path, default) in RunConfig::default().flat() {
        let mut of_key = match LISTS.iter().find(|(list, _)| *list == path) {
            Some((_, keys)) => {
                json!({"type": "array", "items": object(keys.iter().map(|key| (key.to_string(), json!({}))).collect())})
            }
            None => any_of(kinds(&|value| accepts(&path, value))),
        };
        of_key["default"] = serde_json::to_value(&default).expect("defaults are plain data");
        of_key["description"] = json!(described.get(&path).map_or("", String::as_str));
        let mut table = &mut root;
        let (tables, name) = path.rsplit_once('.').unwrap_or(("", &path));
        for part in tables.split('.').filter(|part| !part.is_empty()) {
            let properties = table["properties"].as_object_mut().expect("an object has properties");
            table = properties.entry(part).or_insert_with(|| object(Map::new()));
        }
        table["properties"][name] = of_key;
    }
    root
}

/// An object with these keys and no others.
fn object(properties: Map<String, Json>) -> Json {
    json!({"type": "object", "additionalProperties": false, "properties": properties})
}

fn any_of(mut kinds: Vec<Json>) -> Json {
    if kinds.len() == 1 { kinds.remove(0) } else { json!({"anyOf": kinds}) }
}

/// Whether a file may have `value` at `path`, or the error.
fn accepts(path: &str, value: Value) -> Result<(), String> {
    let mut table = Table::new();
    insert(&mut table, path, value)?;
    table.try_into::<RunConfig>().map(|_| ()).map_err(|error| error.message().to_string())
}

/// The kinds of values that are accepted.
fn kinds(accepts: &dyn Fn(Value) -> Result<(), String>) -> Vec<Json> {
    let mut kinds = scalars(accepts);
    let items = scalars(&|value| accepts(Value::Array(vec![value])));
    if !items.is_empty() {
        kinds.push(json!({"type": "array", "items": any_of(items)}));
    }
    kinds
}

fn scalars(accepts: &dyn Fn(Value) -> Result<(), String>) -> Vec<Json> {
    let takes = |value: Value| accepts(value).is_ok();
    let mut kinds = Vec::new();
    if takes(Value::Boolean(true)) {
        kinds.push(json!({"type": "boolean"}));
    }
    match (takes(Value::Float(0.5)), takes(Value::Integer(1)), takes(Value::Integer(-1))) {
        (true, ..) => kinds.push(json!({"type": "number"})),
        (false, true, true) => kinds.push(json!({"type": "integer"})),
        (false, true, false) => kinds.push(json!({"type": "integer", "minimum": 0})),
        _ => {}
    }
    let text = |text: &str| accepts(Value::String(text.into()));
    match text(NO_NAME) {
        Ok(()) => kinds.push(json!({"type": "string"})),
        Err(error) => {
            let mut names: Vec<&str> = error.split('`').skip(1).step_by(2).collect();
            names.extend(error.split('"').skip(1).step_by(2));
            if !names.contains(&"auto") {
                names.push("auto");
            }
            names.retain(|name| text(name).is_ok());
            if text("").is_ok() {
                // A text of a certain form, of which the error shows an example.
                kinds.push(json!({"type": "string"}));
            } else if !names.is_empty() {
                kinds.push(json!({"enum": names}));
            }
        }
    }
    kinds
}

/// The comment above each key of the reference, by its dotted path.
fn descriptions() -> BTreeMap<String, String> {
    let (mut described, mut table, mut comment) = (BTreeMap::new(), String::new(), Vec::new());
    for line in REFERENCE.lines() {
        if let Some(text) = line.strip_prefix('#') {
            comment.push(text.strip_prefix(' ').unwrap_or(text));
            continue;
        }
        if let Some(name) = line.strip_prefix('[') {
            table = format!("{}.", name.trim_end_matches(']'));
        } else if let Some((key, _)) = line.split_once(" = ") {
            described.insert(format!("{table}{key}"), comment.join("\n"));
        }
        comment.clear();
    }
    described
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// Where `value` differs from `schema`, in the words of JSON Schema that [`schema`] uses.
    fn problems(schema: &Json, value: &Json, at: &str) -> Vec<String> {
        if let Some(kinds) = schema["anyOf"].as_array() {
            let fits = kinds.iter().any(|kind| problems(kind, value, at).is_empty());
            return if fits { Vec::new() } else { vec![format!("{at}: no kind of {schema} fits {value}")] };
        }
        if let Some(names) = schema["enum"].as_array() {
            return if names.contains(value) {
                Vec::new()
            } else {
                vec![format!("{at}: {value} is not among {names:?}")]
            };
        }
        let fits = match schema["type"].as_str() {
            None => true,
            Some("boolean") => value.is_boolean(),
            Some("number") => value.is_number(),
            Some("integer") => value.is_u64() || value.is_i64() && schema["minimum"].is_null(),
            Some("string") => value.is_string(),
            Some("array") => value.is_array(),
            Some("object") => value.is_object(),
            Some(other) => panic!("{other}"),
        };
        if !fits {
            return vec![format!("{at}: {value} is no {}", schema["type"])];
        }
        let items = value.as_array().into_iter().flatten().flat_map(|item| problems(&schema["items"], item, at));
        let keys = value.as_object().into_iter().flatten().flat_map(|(key, value)| {
            let (path, known) = (format!("{at}.{key}"), schema["properties"].get(key));
            match known {
                Some(known) => problems(known, value, &path),
                None if schema["additionalProperties"] == false => vec![format!("{path}: unknown")],
                None => Vec::new(),
            }
        });
        items.chain(keys).collect()
    }

    fn check(text: &str) -> Vec<String> {
        let value: Value = toml::from_str(text).unwrap();
        problems(&schema(), &serde_json::to_value(value).unwrap(), "")
    }

    #[test]
    fn the_schema_takes_each_file_of_this_project_and_no_unknown_key_or_value() {
        let configs = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs"));
        let files = std::fs::read_dir(configs).unwrap().map(|entry| entry.unwrap().path());
        let files: Vec<_> = files.filter(|path| path.extension().is_some_and(|end| end == "toml")).collect();
        assert!(files.len() > 5);
        for file in files {
            assert_eq!(check(&std::fs::read_to_string(&file).unwrap()), Vec::<String>::new(), "{}", file.display());
        }
        for (text, problem) in [
            ("colour = 1", ".colour: unknown"),
            ("[training]\nmax_stepz = 1", ".training.max_stepz: unknown"),
            ("[training]\nmax_steps = -1", ".training.max_steps: -1 is no \"integer\""),
            ("[training]\nmax_steps = \"1\"", ".training.max_steps: \"1\" is no \"integer\""),
            ("[precision]\nrecipe = \"fp9\"", ".precision.recipe: \"fp9\" is not among"),
            ("[[precision.overrides]]\nlayer = [\"x\"]", ".precision.overrides.layer: unknown"),
            ("[memory]\nrecompute = \"some\"", ".memory.recompute: "),
            ("[precision]\nhigh_precision_products = [\"forward\"]", ".precision.high_precision_products: "),
        ] {
            let found = check(text);
            assert!(found.len() == 1 && found[0].starts_with(problem), "{text}: {found:?}");
        }
        for text in [
            "[memory]\nrecompute = \"auto\"\noffload_optimizer = 0.5",
            "[lora]\ntarget_modules = [\"q_proj\"]",
            "[training]\nasync_save = true",
        ] {
            assert_eq!(check(text), Vec::<String>::new());
        }
    }

    #[test]
    fn each_key_has_a_kind_a_default_that_fits_and_a_description() {
        let whole = schema();
        for (path, default) in RunConfig::default().flat() {
            let key = path.split('.').fold(&whole, |table, part| &table["properties"][part]);
            let words = key["description"].as_str().unwrap();
            assert!(!words.is_empty(), "{path} has no comment in configs/reference.toml");
            assert!(["type", "anyOf", "enum"].iter().any(|word| !key[*word].is_null()), "{path}: {key}");
            let default = serde_json::to_value(default).unwrap();
            assert_eq!(problems(key, &default, &path), Vec::<String>::new());
        }
    }

    /// The file that editors read.
    #[test]
    fn the_schema_beside_the_configurations_is_this_one() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/run.schema.json");
        let text = serde_json::to_string_pretty(&schema()).unwrap() + "\n";
        assert!(
            std::fs::read_to_string(path).is_ok_and(|found| found == text),
            "write it again: `ottava schema > configs/run.schema.json`"
        );
    }
}
