//! All keys that a run's file can have, derived from the schema.

use crate::paths::get;
use crate::schema;
use serde_json::Value as Json;
use std::sync::LazyLock;
use toml::{Table, Value};

/// A key that a file may have once.
pub(super) struct Key {
    /// The dotted path of the key.
    pub path: String,
    /// The schema of the value, with the description of the key.
    pub schema: Json,
    /// The value of the key in a file without the key, from the first variant that has the key; `None` for keys that may be missing.
    pub default: Option<Value>,
    /// The variants of the table that have the key; `None` if all variants have it.
    pub variants: Option<Variants>,
}

/// The variants of a table that have a key.
pub(super) struct Variants {
    /// The path of the tag: the key that chooses the variant.
    pub tag: String,
    /// The names of the variants.
    pub names: Vec<String>,
    /// The schema of the key's value in each variant.
    pub schemas: Vec<Json>,
}

impl Key {
    /// Whether the values of the key have this `kind`, a type of JSON Schema.
    pub(super) fn is(&self, kind: &str) -> bool {
        self.schema["type"] == kind
    }

    /// Whether the variant `name` of the table has the key.
    pub(super) fn is_of(&self, name: &str) -> bool {
        self.variants.as_ref().is_none_or(|variants| variants.names.iter().any(|known| known == name))
    }
}

/// Returns all keys. The keys of a table are consecutive: first the tag, then the keys of all variants, then the keys of some variants, and last the
/// keys of inner tables.
pub(super) fn all() -> &'static [Key] {
    static KEYS: LazyLock<Vec<Key>> = LazyLock::new(|| {
        let mut keys = Vec::new();
        add(&schema::generated(), "", &mut keys);
        keys
    });
    &KEYS
}

/// Returns the dotted paths of all keys that a run's file can have.
pub fn key_paths() -> impl Iterator<Item = &'static str> {
    all().iter().map(|key| key.path.as_str())
}

/// Finds the key at `path`.
pub(super) fn find(path: &str) -> Option<&'static Key> {
    all().iter().find(|key| key.path == path)
}

/// Adds the keys of `table`.
fn add(table: &Json, prefix: &str, keys: &mut Vec<Key>) {
    let tagged = schema::variants(table);
    if let Some((tag, variants)) = &tagged {
        let names: Vec<_> =
            variants.iter().map(|(name, variant)| schema::named(name, &variant["description"])).collect();
        let schema = serde_json::json!({"description": "One of:", "oneOf": names});
        let default = Value::try_from(&table["default"][tag]).ok();
        keys.push(Key { path: format!("{prefix}{tag}"), schema, default, variants: None });
    }
    let properties = || table["properties"].as_object().into_iter().flatten();
    for (name, schema) in properties().filter(|(_, schema)| !schema::is_table(schema)) {
        keys.push(key(format!("{prefix}{name}"), schema));
    }
    if let Some((tag, variants)) = tagged {
        add_of_variants(tag, &variants, prefix, keys);
    }
    for (name, schema) in properties().filter(|(_, schema)| schema::is_table(schema)) {
        add(schema, &format!("{prefix}{name}."), keys);
    }
}

/// Adds the keys of the `variants` of a table. The key `tag` chooses the variant.
fn add_of_variants(tag: &str, variants: &[(&str, &Json)], prefix: &str, keys: &mut Vec<Key>) {
    for (variant, schema) in variants {
        for (name, schema) in schema["properties"].as_object().into_iter().flatten().filter(|(name, _)| *name != tag) {
            let path = format!("{prefix}{name}");
            let at = keys.iter().position(|key| key.path == path).unwrap_or(keys.len());
            if at == keys.len() {
                let variants = Some(Variants { tag: format!("{prefix}{tag}"), names: Vec::new(), schemas: Vec::new() });
                keys.push(Key { variants, ..key(path, schema) });
            }
            keys[at].variants.iter_mut().for_each(|variants| {
                variants.names.push(variant.to_string());
                variants.schemas.push(schema.clone());
            });
        }
    }
}

fn key(path: String, schema: &Json) -> Key {
    let default = schema.get("default").and_then(|default| Value::try_from(default).ok());
    Key { path, schema: schema.clone(), default, variants: None }
}

/// Returns the name of the variant that the key at the path `tag` chooses in `table`.
pub(super) fn variant<'a>(table: &'a Table, tag: &str) -> Option<&'a str> {
    get(table, tag).or_else(|| find(tag)?.default.as_ref()).and_then(Value::as_str)
}
