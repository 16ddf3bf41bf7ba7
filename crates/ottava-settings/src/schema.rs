//! The JSON schema of a run's file, for editors. It is derived from the types of the settings and from their doc comments.

use crate::RunConfig;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value as Json, json};

#[cfg(test)]
mod tests;

/// Returns the schema, as JSON Schema draft 7. It has neither names of other trainers nor old names.
pub fn schema() -> Json {
    let mut schema = generated();
    schema["title"] = json!("A run of Ottava");
    close(&mut schema);
    schema
}

/// Returns the schema of the types. Each inner schema is inlined, without references.
pub(super) fn generated() -> Json {
    let settings = SchemaSettings::draft07().with(|settings| settings.inline_subschemas = true);
    settings.into_generator().into_root_schema_for::<RunConfig>().to_value()
}

/// Whether a value is a table whose keys are settings.
pub(super) fn is_table(schema: &Json) -> bool {
    schema["properties"].is_object() || variants(schema).is_some()
}

/// Returns the key that chooses among the variants of a table, and the variants with their names.
pub(super) fn variants(table: &Json) -> Option<(&str, Vec<(&str, &Json)>)> {
    let all = table["oneOf"].as_array()?;
    let (tag, _) = all.first()?["properties"].as_object()?.iter().find(|(_, key)| !key["const"].is_null())?;
    let named = all.iter().map(|variant| Some((variant["properties"][tag]["const"].as_str()?, variant)));
    Some((tag, named.collect::<Option<_>>()?))
}

/// Returns the schema of a single allowed name.
pub(super) fn named(name: &str, description: &Json) -> Json {
    json!({"description": description, "type": "string", "const": name})
}

/// Returns the description of a value in lines: each paragraph is one line, and examples of TOML are indented. If the description ends with a colon,
/// the names that the value can have and their meanings follow.
pub(super) fn description(schema: &Json) -> Vec<String> {
    let text = schema["description"].as_str().unwrap_or_default();
    let (mut lines, mut is_code, mut begins) = (vec![String::new()], false, false);
    for line in text.lines() {
        match line.trim_end() {
            "" => begins = true,
            fence if fence.starts_with("```") => (is_code, begins) = (!is_code, true),
            code if is_code => lines.push(format!("  {code}")),
            line if begins => {
                lines.push(line.to_string());
                begins = false;
            }
            line => {
                let paragraph = lines.last_mut().expect("there is a first line");
                let space = if paragraph.is_empty() { "" } else { " " };
                *paragraph += &format!("{space}{line}");
            }
        }
    }
    if text.ends_with(':') {
        let named = schema["oneOf"].as_array().into_iter().flatten();
        let width = named.clone().filter_map(|name| name["const"].as_str()).map(str::len).max().unwrap_or_default() + 2;
        lines.extend(named.map(|name| {
            let quoted = format!("\"{}\"", name["const"].as_str().unwrap_or_default());
            format!("  {quoted:width$}  {}", name["description"].as_str().unwrap_or_default().replace('\n', " "))
        }));
    }
    lines
}

/// Makes unknown keys of all tables errors, joins the lines of descriptions, and removes keys that files cannot have.
fn close(schema: &mut Json) {
    let described = description(schema).join("\n");
    if let Some((tag, all)) = variants(schema) {
        let common = schema["properties"].as_object().cloned().unwrap_or_default();
        let default = schema["default"][tag].clone();
        let whole = all.into_iter().map(|(name, variant)| {
            let own = variant["properties"].as_object().cloned().unwrap_or_default();
            let mut whole =
                json!({"type": "object", "properties": common.clone().into_iter().chain(own).collect::<Map<_, _>>()});
            // A table without the tag is the default variant, so other variants require the tag.
            if default != name {
                whole["required"] = json!([tag]);
            }
            whole
        });
        *schema = json!({"oneOf": whole.collect::<Vec<_>>()});
    }
    let Some(table) = schema.as_object_mut() else { return };
    table.remove("format");
    table.remove("examples");
    if let Some(kind) = table.get_mut("type").filter(|kind| kind.is_array()) {
        *kind = kind[0].take();
    }
    if !described.is_empty() {
        table.insert("description".into(), described.into());
    }
    if let Some(properties) = table.get_mut("properties").and_then(Json::as_object_mut) {
        properties.values_mut().for_each(close);
        table.remove("default");
        table.insert("additionalProperties".into(), false.into());
    }
    for word in ["oneOf", "anyOf"] {
        table.get_mut(word).and_then(Json::as_array_mut).into_iter().flatten().for_each(close);
    }
    table.get_mut("items").into_iter().for_each(close);
}
