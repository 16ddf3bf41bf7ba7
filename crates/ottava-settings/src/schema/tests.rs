//! Tests that the schema accepts the files that the reader accepts.

use super::*;
use crate::keys;
use std::path::PathBuf;
use toml::Value;

/// Lists where `value` violates `schema`, for the words of JSON Schema that [`schema`] uses.
fn problems(schema: &Json, value: &Json, at: &str) -> Vec<String> {
    if let Some(kinds) = schema["anyOf"].as_array().or(schema["oneOf"].as_array()) {
        let fits = kinds.iter().any(|kind| problems(kind, value, at).is_empty());
        return if fits { Vec::new() } else { vec![format!("{at}: no kind of {schema} fits {value}")] };
    }
    if schema.get("const").is_some_and(|name| name != value) {
        return vec![format!("{at}: {value} is not {}", schema["const"])];
    }
    if let Some(missing) =
        schema["required"].as_array().into_iter().flatten().find(|key| value[key.as_str().unwrap()].is_null())
    {
        return vec![format!("{at}: {missing} is missing")];
    }
    let fits = match schema["type"].as_str() {
        None => true,
        Some("boolean") => value.is_boolean(),
        Some("number") => value.is_number(),
        Some("integer") => {
            value.as_i64().is_some_and(|number| schema["minimum"].as_i64().is_none_or(|least| number >= least))
        }
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
        ("[precision]\nrecipe = \"fp9\"", ".precision.recipe: no kind of"),
        ("[optimizer]\nmomentum = 0.9", ".optimizer: no kind of"),
        ("[optimizer]\nname = \"lion\"\neps = 1e-8", ".optimizer: no kind of"),
        ("[[precision.overrides]]\nlayers = [\"x\"]\nlayer = [\"x\"]", ".precision.overrides.layer: unknown"),
        ("[memory]\nrecompute = \"some\"", ".memory.recompute: "),
        (
            "[precision.exceptions]\nhigh_precision_products = [\"forward\"]",
            ".precision.exceptions.high_precision_products: ",
        ),
    ] {
        let found = check(text);
        assert!(found.len() == 1 && found[0].starts_with(problem), "{text}: {found:?}");
    }
    for text in [
        "[memory]\nrecompute = \"auto\"\noffload_optimizer = 0.5",
        "[lora]\ntarget_modules = [\"q_proj\"]",
        "[checkpoint]\nasync_save = true\nsave_steps = \"end\"",
        "[optimizer]\nname = \"muon\"\nmomentum = 0.9\nbeta1 = 0.9",
        "[lr_scheduler]\nwarmup_steps = 0.03",
    ] {
        assert_eq!(check(text), Vec::<String>::new());
    }
}

#[test]
fn each_key_has_a_kind_and_a_default_that_fits() {
    for key in keys::all() {
        let words = ["type", "anyOf", "oneOf"];
        assert!(words.iter().any(|word| !key.schema[*word].is_null()), "{}: {}", key.path, key.schema);
        if let Some(default) = &key.default {
            let default = serde_json::to_value(default).unwrap();
            assert_eq!(problems(&key.schema, &default, &key.path), Vec::<String>::new());
        }
    }
}

/// The schema file that editors read must be up to date.
#[test]
fn the_schema_beside_the_configurations_is_this_one() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/run.schema.json");
    let text = serde_json::to_string_pretty(&schema()).unwrap() + "\n";
    crate::tests::expect_file(path, &text);
}
