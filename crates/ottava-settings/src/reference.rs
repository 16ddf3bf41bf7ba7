//! `configs/reference.toml`: every key at its default, with the doc comment of its field.

use crate::keys::{self, Key};
use crate::schema;
use serde_json::Value as Json;
use std::fmt::Write;
use toml::Value;

/// The maximum length of a line, in letters.
const WIDTH: usize = 140;

/// Returns the text of the file that shows every key. Keys without a default, and keys of variants that are not the default, are comments.
pub fn reference() -> String {
    let mut text = "#:schema run.schema.json\n# Every key at its default, with its meaning. The file of a run needs only the keys that differ.\n\
                    # Written by `ottava config reference` from the comments in the source.\n"
        .to_string();
    let root = schema::generated();
    let mut table = "";
    for key in keys::all() {
        let (of, name) = key.path.rsplit_once('.').unwrap_or(("", &key.path));
        if of != table {
            text.push('\n');
            let schema = of.split('.').fold(&root, |table, name| &table["properties"][name]);
            schema::description(schema).iter().for_each(|line| comment(&mut text, line));
            let _ = writeln!(text, "[{of}]");
            table = of;
        } else if text.lines().count() == 3 {
            text.push('\n');
        }
        write(&mut text, key, name);
    }
    text
}

/// Writes a key with its comment.
fn write(text: &mut String, key: &Key, name: &str) {
    let lines = schema::description(&key.schema);
    let Some(variants) = &key.variants else {
        lines.iter().for_each(|line| comment(text, line));
        return write_value(text, key, name, true);
    };
    let tag = keys::find(&variants.tag).expect("the key that chooses variants is one");
    let with = |name: &str| format!("With {} = \"{name}\"", variants.tag.rsplit('.').next().unwrap_or_default());
    let is_default = tag.default.as_ref().and_then(Value::as_str).is_some_and(|name| key.is_of(name));
    let has_all = tag.schema["oneOf"].as_array().is_some_and(|all| all.len() == variants.names.len());
    if !has_all {
        let others: Vec<_> = variants.names[1..].iter().map(|name| format!(", \"{name}\"")).collect();
        comment(text, &format!("{}{}:", with(&variants.names[0]), others.concat()));
    }
    lines.iter().for_each(|line| comment(text, line));
    // The variants in which the key has another description or another default.
    let differs = |schema: &&Json| ["description", "default"].iter().any(|word| schema[*word] != key.schema[*word]);
    for (name, schema) in variants.names.iter().zip(&variants.schemas).filter(|(_, schema)| differs(schema)) {
        let lines = schema::description(schema);
        comment(text, &format!("{}: {} Default {}.", with(name), lines.join(" "), schema["default"]));
    }
    write_value(text, key, name, is_default);
}

/// Writes a key with its default. If a file with defaults does not have the key (`has` is false), the key is written as a comment, with an example.
fn write_value(text: &mut String, key: &Key, name: &str, has: bool) {
    let value = key.default.as_ref().map_or_else(|| key.schema["examples"][0].to_string(), shown);
    let hidden = if has && key.default.is_some() { "" } else { "# " };
    let _ = writeln!(text, "{hidden}{name} = {value}");
}

/// Returns a value in its usual spelling.
fn shown(value: &Value) -> String {
    match value {
        Value::Float(number) if *number != 0.0 && number.abs() < 1e-2 => format!("{number:e}"),
        value => value.to_string(),
    }
}

/// Writes `line` as comments of at most [`WIDTH`] letters. Continuation lines are indented like the words of the first line.
fn comment(text: &mut String, line: &str) {
    let indent = line.len() - line.trim_start().len();
    let inner = if indent > 0 {
        line.rfind("\"  ").map_or(indent, |at| line.len() - line[at + 1..].trim_start().len())
    } else {
        0
    };
    let mut row = format!("# {}", &line[..indent]);
    let mut is_empty = true;
    for word in line.trim_start().split_inclusive(' ') {
        if !is_empty && row.len() + word.trim_end().len() > WIDTH {
            let _ = writeln!(text, "{}", row.trim_end());
            row = format!("# {:inner$}", "");
        }
        row += word;
        is_empty = false;
    }
    let _ = writeln!(text, "{}", row.trim_end());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RunConfig, paths};
    use toml::Table;

    const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/reference.toml");

    #[test]
    fn the_reference_beside_the_configurations_is_this_one() {
        crate::tests::expect_file(PATH, &reference());
    }

    #[test]
    fn the_reference_shows_every_key_at_its_default() {
        let shown: Table = reference().parse().unwrap();
        assert_eq!(shown.clone().try_into::<RunConfig>().unwrap(), RunConfig::default());
        for key in keys::all() {
            let (_, name) = key.path.rsplit_once('.').unwrap_or(("", &key.path));
            let is_shown = paths::get(&shown, &key.path).is_some();
            assert!(is_shown || reference().contains(&format!("\n# {name} = ")), "{} is not shown", key.path);
            assert!(!schema::description(&key.schema)[0].is_empty(), "the field of {} has no comment", key.path);
        }
        // Values of commented keys must have the type of their key.
        let commented = reference();
        for line in commented.lines().filter_map(|line| line.strip_prefix("# ")).filter(|line| line.contains(" = ")) {
            let is_key = line
                .split(" = ")
                .next()
                .is_some_and(|name| name.bytes().all(|byte| byte == b'_' || byte.is_ascii_alphanumeric()));
            assert!(!is_key || line.parse::<Table>().is_ok(), "{line}");
        }
    }
}
