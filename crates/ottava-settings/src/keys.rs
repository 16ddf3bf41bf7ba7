//! The keys of a table as dotted paths.

use toml::{Table, Value};

pub(super) fn flatten(prefix: &str, table: &Table, out: &mut Vec<(String, Value)>) {
    for (key, value) in table {
        match value {
            Value::Table(inner) => flatten(&format!("{prefix}{key}."), inner, out),
            value => out.push((format!("{prefix}{key}"), value.clone())),
        }
    }
}
