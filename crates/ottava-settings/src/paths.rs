//! Dotted paths of keys in tables.

use toml::{Table, Value};

/// Appends the values of `table` to `out`, each with its dotted path after `prefix`.
pub fn flatten(prefix: &str, table: &Table, out: &mut Vec<(String, Value)>) {
    for (key, value) in table {
        match value {
            Value::Table(inner) => flatten(&format!("{prefix}{key}."), inner, out),
            value => out.push((format!("{prefix}{key}"), value.clone())),
        }
    }
}

/// Returns the value at the dotted `path` of `table`.
pub(super) fn get<'a>(table: &'a Table, path: &str) -> Option<&'a Value> {
    let (first, rest) = path.split_once('.').map_or((path, None), |(first, rest)| (first, Some(rest)));
    match (table.get(first)?, rest) {
        (value, None) => Some(value),
        (value, Some(rest)) => get(value.as_table()?, rest),
    }
}

/// Writes `value` at the dotted `path` of `table`.
pub(super) fn insert(table: &mut Table, path: &str, value: Value) -> Result<(), String> {
    let mut inner = table;
    let mut names: Vec<&str> = path.split('.').collect();
    let name = names.pop().expect("a path has a last part");
    for section in names {
        let entry = inner.entry(section).or_insert_with(|| Value::Table(Table::new()));
        inner = entry.as_table_mut().ok_or_else(|| format!("`{section}` is not a table in the file"))?;
    }
    inner.insert(name.to_string(), value);
    Ok(())
}

/// Removes and returns the value at the dotted `path` of `table`.
pub(super) fn remove(table: &mut Table, path: &str) -> Option<Value> {
    match path.split_once('.') {
        None => table.remove(path),
        Some((first, rest)) => remove(table.get_mut(first)?.as_table_mut()?, rest),
    }
}
