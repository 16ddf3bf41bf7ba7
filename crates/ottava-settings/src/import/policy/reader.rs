//! The rows of a trainer of reinforcement learning, and reading the keys of a file.

use crate::words::{Meaning, Row};
use serde_json::{Map, Value as Json};
use std::collections::{BTreeMap, BTreeSet};
use toml::{Table, Value};

/// The keys of a trainer.
pub(in crate::import) struct Dialect {
    /// The meaning of each key, by its whole path; a `*` at the end stands for any ending.
    pub(super) rows: &'static [Row],
    /// What comes before the path of a row in some files.
    pub(super) prefix: &'static str,
    /// Whether keys without a row have their usual meaning. Otherwise they are not known.
    pub(super) is_open: bool,
    /// Reads the keys that mean something together.
    pub(super) together: fn(&mut Reader),
    /// Our settings, as TOML, for keys that the file leaves out, where the trainer's defaults are others.
    pub(in crate::import) defaults: &'static [(&'static str, &'static str)],
}

/// The keys of a file, and what the keys say that are read together.
pub(in crate::import) struct Reader {
    keys: BTreeMap<String, Json>,
    /// Keys that are read.
    taken: BTreeSet<String>,
    /// Our settings, each with the key that says it and a comment.
    pub(in crate::import) settings: Vec<(String, &'static str, Value, String)>,
    /// Keys without translation, each with the reason.
    pub(in crate::import) refused: Vec<(String, String)>,
    /// Why the run would have another objective, with the key.
    pub(in crate::import) objective: Option<(String, String)>,
    pub(in crate::import) rewards: Vec<Table>,
}

/// What a dialect says of a key.
pub(in crate::import) enum Found {
    /// It was read with others.
    Taken,
    Row(&'static Meaning),
    /// It is not known.
    Unknown,
    /// It has its usual meaning.
    Usual,
}

impl Dialect {
    /// Reads the keys of `table` that mean something together.
    pub(in crate::import) fn read(&self, table: &Map<String, Json>) -> Reader {
        let mut keys = BTreeMap::new();
        flatten(table, "", &mut keys);
        let resolved = keys.iter().map(|(path, value)| (path.clone(), resolve(value, &keys, 0))).collect();
        let mut reader = Reader {
            keys: resolved,
            taken: BTreeSet::new(),
            settings: Vec::new(),
            refused: Vec::new(),
            objective: None,
            rewards: Vec::new(),
        };
        (self.together)(&mut reader);
        reader
    }

    /// Looks up the key `path`.
    pub(in crate::import) fn find(&self, path: &str, reader: &Reader) -> Found {
        if reader.taken.contains(path) {
            return Found::Taken;
        }
        let own = path.strip_prefix(self.prefix);
        let starts = |theirs: &str, path: &str| theirs.strip_suffix('*').is_some_and(|start| path.starts_with(start));
        let row = own.and_then(|path| {
            let whole = self.rows.iter().find(|(theirs, _)| *theirs == path);
            whole.or_else(|| self.rows.iter().find(|(theirs, _)| starts(theirs, path)))
        });
        match row {
            Some((_, meaning)) => Found::Row(meaning),
            None if self.is_open && (self.prefix.is_empty() || own.is_none()) => Found::Usual,
            None => Found::Unknown,
        }
    }

    /// Whether a table of the file is one of data sets and the like, which are recognised by their names.
    pub(in crate::import) fn is_open(&self) -> bool {
        self.is_open
    }
}

impl Reader {
    /// The value of a key, which is read by this.
    pub(super) fn take(&mut self, path: &str) -> Option<Json> {
        let value = self.keys.get(path)?.clone();
        self.taken.insert(path.to_string());
        Some(value).filter(|value| !value.is_null())
    }

    /// [`Reader::take`] of the first of several names of a key that the file has, with the name.
    pub(super) fn take_one(&mut self, paths: &[&'static str]) -> Option<(&'static str, Json)> {
        paths.iter().find_map(|path| Some((*path, self.take(path)?)))
    }

    pub(super) fn flag(&mut self, path: &str) -> Option<bool> {
        self.take(path)?.as_bool()
    }

    /// A whole number; another value is refused.
    pub(super) fn count(&mut self, path: &str) -> Option<u64> {
        let value = self.take(path)?;
        let count =
            value.as_u64().or_else(|| value.as_f64().filter(|x| x.fract() == 0.0 && *x >= 0.0).map(|x| x as u64));
        if count.is_none() {
            self.refuse(path, format!("{value} is no whole number"));
        }
        count
    }

    pub(super) fn number(&mut self, path: &str) -> Option<f64> {
        let value = self.take(path)?;
        let number = value.as_f64().or_else(|| value.as_str()?.parse().ok());
        if number.is_none() {
            self.refuse(path, format!("{value} is no number"));
        }
        number
    }

    pub(super) fn text(&mut self, path: &str) -> Option<String> {
        let value = self.take(path)?;
        Some(value.as_str().map_or_else(|| value.to_string(), str::to_string))
    }

    /// Whether a key has this text.
    pub(super) fn is(&self, path: &str, expected: &str) -> bool {
        self.keys.get(path).and_then(Json::as_str) == Some(expected)
    }

    /// The names of keys that begin so.
    pub(super) fn beginning(&self, start: &str) -> Vec<String> {
        self.keys.keys().filter(|path| path.starts_with(start)).cloned().collect()
    }

    /// Marks all keys that begin so as read.
    pub(super) fn take_all(&mut self, start: &str) {
        self.taken.extend(self.beginning(start));
    }

    /// A setting of ours, from the key `path`.
    pub(super) fn set(&mut self, path: &str, ours: &'static str, value: impl Into<Value>) {
        self.settings.push((path.to_string(), ours, value.into(), String::new()));
    }

    /// [`Reader::set`] with a comment beside the setting.
    pub(super) fn set_noted(&mut self, path: &str, ours: &'static str, value: impl Into<Value>, comment: &str) {
        self.settings.push((path.to_string(), ours, value.into(), format!("  # {comment}")));
    }

    pub(super) fn refuse(&mut self, path: &str, reason: impl Into<String>) {
        self.refused.push((path.to_string(), reason.into()));
    }

    /// A key without which the run would have another objective.
    pub(super) fn refuse_objective(&mut self, path: &str, reason: impl Into<String>) {
        self.objective.get_or_insert((path.to_string(), reason.into()));
    }
}

/// Adds the values of `table` by their dotted paths.
fn flatten(table: &Map<String, Json>, prefix: &str, keys: &mut BTreeMap<String, Json>) {
    for (key, value) in table {
        let path = format!("{prefix}{key}");
        match value {
            Json::Object(inner) if !inner.is_empty() => flatten(inner, &format!("{path}."), keys),
            value => drop(keys.insert(path, value.clone())),
        }
    }
}

/// References to other keys that are followed, so that a circle ends.
const MOST_REFERENCES: usize = 8;

/// A value, or the value of the key that it refers to, as `${table.key}` does in files of OmegaConf. What else such a file computes stays as it is.
pub(in crate::import) fn resolve(value: &Json, keys: &BTreeMap<String, Json>, depth: usize) -> Json {
    let path = value.as_str().and_then(|text| text.strip_prefix("${")?.strip_suffix('}'));
    let path =
        path.map(|path| path.strip_prefix("oc.select:").map_or(path, |rest| rest.split(',').next().unwrap_or(rest)));
    match path.and_then(|path| keys.get(path.trim())) {
        Some(other) if depth < MOST_REFERENCES => resolve(other, keys, depth + 1),
        _ => value.clone(),
    }
}

impl Reader {
    /// The value of a key with references followed.
    pub(in crate::import) fn value_of(&self, path: &str) -> Option<&Json> {
        self.keys.get(path)
    }
}

/// `data.max_length` from the tokens of prompts and completions.
pub(super) fn set_lengths(reader: &mut Reader, path: &str, prompt: Option<u64>, completion: Option<u64>) {
    let (prompt, completion) = (prompt.unwrap_or(DEFAULT_LENGTH), completion.unwrap_or(DEFAULT_LENGTH));
    let comment = format!("{prompt} tokens of a prompt and {completion} of a completion");
    reader.set_noted(path, "data.max_length", (prompt + completion) as i64, &comment);
}

/// Tokens of a prompt, and of a completion, by default.
pub(super) const DEFAULT_LENGTH: u64 = 512;

/// Rows about sampling: completions are drawn from the whole distribution.
pub(super) const WHOLE: &str = "completions are drawn from the whole distribution at `reinforcement.sampling.temperature`, to which ratios and losses refer";
pub(super) const ONE: &[&str] = &["1", "1.0"];
pub(super) const ALL_TOKENS: &[&str] = &["-1", "0"];
pub(super) const SAMPLER: &str =
    "the model that is trained draws the completions; no other process holds a second model";
pub(super) const RANKS: &str = "`--gpus N` or a launcher starts one process for each GPU";
pub(super) const LOGGED: &str = "metrics.jsonl and files of TensorBoard have all metrics of a run";
