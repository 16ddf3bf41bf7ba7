//! The known keys of a configuration, and how unknown keys are answered.

use crate::keys::{self, Key};
use crate::old_keys;
use crate::paths::{self, flatten, insert};
use crate::schema;
use crate::words::{self, Translation};
use serde_json::{Map, Value as Json};
use toml::{Table, Value};

/// The maximum length of a key that gets a suggestion, in bytes.
const MAX_KEY_BYTES: usize = 100;

/// The maximum number of problems that are listed. The search ends there.
pub(super) const MAX_PROBLEMS: usize = 20;

/// The dotted paths of all keys.
pub(super) struct Known(pub(super) Vec<String>);

impl Known {
    pub(super) fn new() -> Known {
        Known(keys::all().iter().map(|key| key.path.clone()).collect())
    }

    /// Returns all tables, in the order of their first keys.
    fn tables(&self) -> Vec<&str> {
        let mut tables: Vec<&str> = self.0.iter().filter_map(|key| Some(key.rsplit_once('.')?.0)).collect();
        tables.dedup();
        tables
    }

    fn is_table(&self, path: &str) -> bool {
        self.0.iter().any(|key| key.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')))
    }

    /// Replaces aliases and reports keys that do not exist.
    pub(super) fn canonical(&self, table: &mut Table, problems: &mut Vec<String>) {
        let mut without = Vec::new();
        self.canonical_in(table, "", &mut without, problems);
        for (text, ours, values) in without {
            if let Some(value) = self.given(table, ours, &values) {
                problems.push(format!("{text} and {} contradict each other; leave out one", line(ours, &value)));
            } else if let Some(problem) = self.default_problem(table, ours, &values) {
                problems.push(format!("{text}: {problem}"));
            }
        }
    }

    fn canonical_in(&self, table: &mut Table, prefix: &str, without: &mut Vec<Without>, problems: &mut Vec<String>) {
        let keys: Vec<String> = table.keys().cloned().collect();
        for key in keys {
            if problems.len() > MAX_PROBLEMS {
                return;
            }
            let path = format!("{prefix}{key}");
            if self.is_table(&path) {
                match table.get_mut(&key) {
                    Some(Value::Table(inner)) => self.canonical_in(inner, &format!("{path}."), without, problems),
                    _ => problems.push(format!("`{path}` is a table: write its settings under [{path}]")),
                }
                continue;
            }
            for item in table[&key].as_array().into_iter().flatten() {
                if let Some(keys) = keys_of_item(&path, item) {
                    unknown_in_list(&path, &keys, item, problems);
                }
                continue;
            }
            if let Some(old) = old_keys::find(&path) {
                match words::value_of(old.new, last(&path), &table[&key]) {
                    Ok(value) => drop(table.insert(key, value)),
                    Err(reason) => problems.push(format!("`{path}`: {reason}")),
                }
                continue;
            }
            match words::translate(&path, &table[&key]) {
                None if self.0.contains(&path) => {}
                None if table[&key].is_table() => problems.push(self.unknown_table(&path)),
                None => problems.push(self.unknown(&path)),
                Some(Translation::Refused(reason) | Translation::Needless(reason)) => {
                    problems.push(format!("`{path}`: {reason}"));
                }
                Some(Translation::Nothing) => drop(table.remove(&key)),
                Some(Translation::Without(ours, values)) => {
                    let text = line(&path, &table.remove(&key).expect("the key is there"));
                    without.push((text, ours, values));
                }
                Some(Translation::Ours(ours, value)) => {
                    // At the top of the file, a dotted key belongs to another table.
                    match ours.strip_prefix(prefix).filter(|name| !name.contains('.') || !prefix.is_empty()) {
                        None => problems.push(in_other_table(&path, ours, &value, &table[&key])),
                        Some(name) if name != key && paths::get(table, name).is_some() => {
                            problems.push(format!("`{path}` and `{ours}` mean the same; keep one"));
                        }
                        Some(name) => {
                            table.remove(&key);
                            problems.extend(insert(table, name, value).err());
                        }
                    }
                }
            }
        }
    }

    fn unknown(&self, path: &str) -> String {
        if let Some(text) = too_long(path) {
            return text;
        }
        let (table, name) = path.rsplit_once('.').map_or((None, path), |(table, name)| (Some(table), name));
        // Among equally near names, prefers the name in the same table.
        let distance = |key: &&String| {
            let (of, last) = key.rsplit_once('.').map_or((None, key.as_str()), |(table, name)| (Some(table), name));
            (distance(name, last).unwrap_or(usize::MAX), of != table)
        };
        match self.0.iter().min_by_key(distance).filter(|key| distance(key).0 < usize::MAX) {
            Some(key) => format!("`{path}` is not a setting; did you mean `{key}`?"),
            None => match table.filter(|table| self.is_table(table)) {
                Some(table) => {
                    let keys = self.0.iter().filter_map(|key| key.strip_prefix(table)?.strip_prefix('.'));
                    let keys: Vec<_> = keys.map(|key| format!("`{key}`")).collect();
                    format!("`{path}` is not a setting; [{table}] has {}", keys.join(", "))
                }
                None => format!("`{path}` is not a setting; `ottava config reference` lists all of them"),
            },
        }
    }

    fn unknown_table(&self, path: &str) -> String {
        if let Some(text) = too_long(path) {
            return text;
        }
        let tables = self.tables();
        // A name may be abbreviated, such as `train`.
        let distance = |table: &str| match table.starts_with(path) && path.len() >= 4 {
            true => Some(0),
            false => distance(path, table),
        };
        let near =
            tables.iter().filter_map(|table| Some((distance(table)?, table))).min_by_key(|(distance, _)| *distance);
        match near {
            Some((_, table)) => format!("`{path}` is not a table of settings; did you mean `[{table}]`?"),
            None => {
                let tables: Vec<_> = tables.iter().map(|table| format!("[{table}]")).collect();
                format!("`{path}` is not a table of settings; there are {}", tables.join(", "))
            }
        }
    }

    /// Reports texts where lists are expected.
    pub(super) fn texts_for_lists(&self, table: &Table, problems: &mut Vec<String>) {
        let mut given = Vec::new();
        flatten("", table, &mut given);
        let is_list = |path: &str| keys::find(path).is_some_and(|key| key.is("array"));
        for (path, value) in given.iter().filter(|(path, value)| value.is_str() && is_list(path)) {
            problems.push(format!("`{path}` is a list: write `{} = [{value}]`", last(path)));
        }
    }

    /// Reports keys of variants that a table does not choose.
    pub(super) fn keys_of_other_variants(&self, table: &Table, problems: &mut Vec<String>) {
        let mut given = Vec::new();
        flatten("", table, &mut given);
        for (path, _) in given {
            let Some(Key { variants: Some(variants), .. }) = keys::find(&path) else { continue };
            let (tag, names) = (&variants.tag, &variants.names);
            let Some(name) = keys::variant(table, tag) else { continue };
            if !names.iter().any(|known| known == name) {
                problems.push(format!("`{path}` is for {}, and `{tag}` is {name}; remove it", names.join(", ")));
            }
        }
    }

    /// Applies `key=value`.
    pub(super) fn set(&self, table: &mut Table, setting: &str) -> Result<(), String> {
        let (key, text) = setting.split_once('=').ok_or("expected key=value")?;
        let key = key.trim();
        // A value that is not TOML is read as a string, so `--set recipe=bf16` needs no quotes.
        let value = format!("value = {text}").parse::<Table>().ok().and_then(|mut t| t.remove("value"));
        let mut value = value.unwrap_or_else(|| Value::String(text.trim().to_string()));
        if let Some(old) = old_keys::find(key) {
            old_keys::forget(table, old.old);
            return insert(table, old.old, words::value_of(old.new, last(old.old), &value)?);
        }
        match words::translate(key, &value) {
            Some(Translation::Refused(reason) | Translation::Needless(reason)) => return Err(reason.to_string()),
            Some(Translation::Nothing) => return Ok(()),
            Some(Translation::Without(ours, values)) => return self.reset(table, ours, &values),
            Some(Translation::Ours(_, ours)) => value = ours,
            None => {}
        }
        let path = self.resolve(key)?;
        if let Some(old) = old_keys::beside(table, &path, key) {
            return insert(table, old, value);
        }
        old_keys::forget(table, &path);
        // A number of steps on the command line replaces the epochs of the file.
        if path == "training.max_steps" {
            paths::remove(table, "training.num_train_epochs");
        }
        let value = old_keys::converted(&path, &value).unwrap_or(value);
        insert(table, &path, value)
    }

    /// Returns the value at `path` in `table` if it is one of `values`. If `values` is empty, returns any value except the default.
    fn given(&self, table: &Table, path: &str, values: &[Value]) -> Option<Value> {
        let value = paths::get(table, path)?;
        let is_given = match values {
            [] => Some(value) != keys::find(path)?.default.as_ref(),
            values => values.contains(value),
        };
        is_given.then(|| value.clone())
    }

    /// Removes the value at `path` from `table` if it is one of `values`. If `values` is empty, removes any value.
    ///
    /// Errors if the default is one of `values`.
    fn reset(&self, table: &mut Table, path: &str, values: &[Value]) -> Result<(), String> {
        if self.given(table, path, values).is_some() {
            paths::remove(table, path);
        }
        self.default_problem(table, path, values).map_or(Ok(()), Err)
    }

    /// Returns a sentence if `path` has its default in `table` and the default is one of `values`.
    fn default_problem(&self, table: &Table, path: &str, values: &[Value]) -> Option<String> {
        let default = keys::find(path)?.default.as_ref().filter(|default| values.contains(default))?;
        let is_default = self.given(table, path, &[]).is_none();
        is_default.then(|| format!("{} is the default; write another value", line(path, default)))
    }

    fn resolve(&self, key: &str) -> Result<String, String> {
        if self.0.iter().any(|known| known == key) {
            return Ok(key.to_string());
        }
        let (section, name) = key.rsplit_once('.').map_or((None, key), |(s, n)| (Some(s), n));
        if let Some(ours) = words::ours(key) {
            let table = ours.rsplit_once('.').map_or("", |(table, _)| table);
            return match section.is_none_or(|section| section == table) {
                true => Ok(ours.to_string()),
                false => Err(format!("`{key}` is `{ours}` here")),
            };
        }
        let matches = |known: &&String| match section {
            Some(section) => **known == format!("{section}.{name}"),
            None => known.rsplit('.').next() == Some(name),
        };
        let found: Vec<&String> = self.0.iter().filter(matches).collect();
        match found.as_slice() {
            [] => Err(self.unknown(key)),
            [one] => Ok((*one).clone()),
            many => Err(format!(
                "`{key}` could be {}; write the whole path",
                many.iter().map(|k| format!("`{k}`")).collect::<Vec<_>>().join(" or ")
            )),
        }
    }
}

/// Returns the keys that `table`, an item of the list at `path`, can have; for a list of variants, the keys of the variant that `table` names.
/// Returns `None` if the list does not hold tables, or if the variant is unknown, which is reported elsewhere.
fn keys_of_item(path: &str, table: &Value) -> Option<Vec<&'static str>> {
    let items = &keys::find(path)?.schema["items"];
    let keys_of = |schema: &'static Json| schema["properties"].as_object().into_iter().flat_map(Map::keys);
    let own = match schema::variants(items) {
        None => items["properties"].is_object().then_some(&Json::Null)?,
        Some((tag, variants)) => {
            let name = table.get(tag)?.as_str()?;
            variants.into_iter().find(|(variant, _)| *variant == name)?.1
        }
    };
    Some(keys_of(items).chain(keys_of(own)).map(String::as_str).collect())
}

/// Reports keys of a table of the list at `path` that are not among `keys`.
fn unknown_in_list(path: &str, keys: &[&str], table: &Value, problems: &mut Vec<String>) {
    for key in table.as_table().into_iter().flat_map(Table::keys).filter(|key| !keys.contains(&key.as_str())) {
        let near = keys.iter().filter_map(|known| Some((distance(key, known)?, known))).min();
        let is_files = path == words::DATASETS && ["path", "data_files", "data_path"].contains(&key.as_str());
        problems.push(match is_files.then_some((0, &"train_files")).or(near) {
            Some((_, known)) => format!("`{key}` is not a setting of [[{path}]]; did you mean `{known}`?"),
            None => {
                let keys: Vec<_> = keys.iter().map(|key| format!("`{key}`")).collect();
                format!("`{key}` is not a setting of [[{path}]], which has {}", keys.join(", "))
            }
        });
    }
}

/// Returns the part of a path after its last dot.
fn last(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// Returns the message for the key at `path`. Its name in Ottava is `ours`, in another table, and its value there is `value` instead of `theirs`.
fn in_other_table(path: &str, ours: &str, value: &Value, theirs: &Value) -> String {
    match value == theirs {
        true => format!("`{path}` is `{ours}` here"),
        false => format!("`{path}` is `{ours}` here: write {}", line(ours, value)),
    }
}

/// A key of another trainer that excludes values of one of our keys: the line to write, our key, and the excluded values.
type Without = (String, &'static str, Vec<Value>);

/// Returns the line that sets `path` to `value`.
pub(super) fn line(path: &str, value: &Value) -> String {
    match path.rsplit_once('.') {
        Some((table, name)) => format!("`{name} = {value}` under [{table}]"),
        None => format!("`{path} = {value}` at the top of the file"),
    }
}

/// Returns the message for a name that is too long for suggestions. No key is nearly as long, and the time of a comparison grows with the square of
/// the length.
fn too_long(path: &str) -> Option<String> {
    (path.len() > MAX_KEY_BYTES).then(|| {
        let start: String = path.chars().take(20).collect();
        format!("`{start}…`, {} bytes long, is not a setting; `ottava config reference` lists all of them", path.len())
    })
}

/// Returns the number of letters to insert, remove, replace or swap to change one name into the other; `None` beyond a quarter of the longer name.
pub(super) fn distance(a: &str, b: &str) -> Option<usize> {
    let distance = strsim::damerau_levenshtein(a, b);
    (distance * 4 <= a.len().max(b.len())).then_some(distance)
}
