//! Replaces the keys of earlier versions in files of runs by the current keys.

use crate::old_keys::{self, Now};
use ottava_common::error::{Error, Result};
use std::path::Path;
use toml::{Table, Value};
use toml_edit::{DocumentMut, Item, Key};

/// A file with the current keys.
#[derive(Debug)]
pub struct Migrated {
    /// The text of the file, with the comments of the old file.
    pub toml: String,
    /// The changes, one sentence for each key.
    pub changes: Vec<String>,
}

/// Replaces old keys in the text of a run's file. Error messages name the file `path`.
///
/// Errors with [`Error::Config`] if the text is not TOML, or if it has a key both by its old and by its new name.
pub fn migrate(path: &Path, text: &str) -> Result<Migrated> {
    let wrong = |reason: String| Error::Config(format!("{}: {reason}", path.display()));
    let table: Table = text.parse().map_err(|error| wrong(format!("this is not valid TOML: {error}")))?;
    let mut document: DocumentMut = text.parse().map_err(|error| wrong(format!("this is not valid TOML: {error}")))?;
    let mut changes = Vec::new();
    for change in old_keys::changes(&table) {
        let table = change.old.split('.').next().unwrap_or_default();
        let position = document.get(table).and_then(Item::as_table).and_then(toml_edit::Table::position);
        let (key, item) = take(&mut document, change.old).expect("both readers find the same keys");
        if let Now::Is(new, value) = &change.now {
            let item = if *value == change.was { item } else { with_value(item, value) };
            let is_put = put(&mut document, new, &key, item, position);
            is_put.ok_or_else(|| wrong(format!("`{}` and `{new}` mean the same; keep one", change.old)))?;
        }
        changes.push(change.told());
    }
    if !changes.is_empty() {
        document.retain(|_, item| !is_bare(item));
    }
    Ok(Migrated { toml: document.to_string(), changes })
}

/// Removes the key at the dotted `path` from its table and returns it.
fn take(document: &mut DocumentMut, path: &str) -> Option<(Key, Item)> {
    let (tables, name) = path.rsplit_once('.')?;
    let table = tables.split('.').try_fold(document.as_item_mut(), |item, name| item.get_mut(name))?;
    match table.as_inline_table_mut() {
        Some(inline) => inline.remove_entry(name).map(|(key, value)| (key, Item::Value(value))),
        None => table.as_table_mut()?.remove_entry(name),
    }
}

/// Replaces the value of the item, and keeps its white space and comments.
fn with_value(mut item: Item, value: &Value) -> Item {
    if let Some(old) = item.as_value_mut() {
        let decor = old.decor().clone();
        *old = value.to_string().parse().expect("TOML reads what it writes");
        *old.decor_mut() = decor;
    }
    item
}

/// Writes `item` at the dotted `path`, with the comments of its old `key`. Returns `None` if the path already has a value. A new table gets
/// `position`, so it follows the table that has this position.
fn put(document: &mut DocumentMut, path: &str, key: &Key, item: Item, position: Option<isize>) -> Option<()> {
    let (tables, name) = path.rsplit_once('.')?;
    let mut table = document.as_item_mut();
    for name in tables.split('.') {
        table = table.as_table_like_mut()?.entry(name).or_insert_with(|| {
            let mut new = toml_edit::Table::new();
            new.set_position(position);
            Item::Table(new)
        });
    }
    if table.as_table_like()?.contains_key(name) {
        return None;
    }
    let key = Key::new(name).with_leaf_decor(key.leaf_decor().clone());
    match table {
        Item::Table(table) => drop(table.insert_formatted(&key, item)),
        table => drop(table.as_table_like_mut()?.insert(name, item)),
    }
    Some(())
}

/// Whether a table has neither keys nor a comment.
fn is_bare(item: &Item) -> bool {
    let Some(table) = item.as_table() else { return false };
    let before = table.decor().prefix().and_then(|text| text.as_str()).unwrap_or_default();
    table.is_empty() && !before.contains('#')
}
