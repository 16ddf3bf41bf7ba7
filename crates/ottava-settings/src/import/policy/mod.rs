//! Keys of trainers of reinforcement learning, as settings of `[reinforcement]`.
//!
//! A [`Dialect`] is a trainer's rows of keys, by their whole paths, and a function that reads the keys which mean something only together: rewards,
//! batches, losses. To add a key: a row in the file of the trainer, or a `take` in its `together`.

mod nemo_rl;
mod overrides;
mod rewards;
#[cfg(test)]
mod tests;
mod trl;
mod verl;

use super::defaults::Trainer;
use crate::words::{Meaning, NONE, Row};
use serde_json::{Map, Value as Json};
use std::collections::{BTreeMap, BTreeSet};
use toml::{Table, Value};

pub(super) use overrides::yaml_of_script;

/// The keys of a trainer.
pub(super) struct Dialect {
    /// The meaning of each key, by its whole path; a `*` at the end stands for any ending.
    rows: &'static [Row],
    /// What comes before the path of a row in some files.
    prefix: &'static str,
    /// Whether keys without a row have their usual meaning. Otherwise they are not known.
    is_open: bool,
    /// Reads the keys that mean something together.
    together: fn(&mut Reader),
    /// Our settings, as TOML, for keys that the file leaves out, where the trainer's defaults are others.
    pub(super) defaults: &'static [(&'static str, &'static str)],
}

/// The keys of a file, and what those of them say that are read together.
pub(super) struct Reader {
    keys: BTreeMap<String, Json>,
    /// Keys that are read.
    taken: BTreeSet<String>,
    /// Our settings, each with the key that says it and a comment.
    pub(super) settings: Vec<(String, &'static str, Value, String)>,
    /// Keys without translation, each with the reason.
    pub(super) refused: Vec<(String, String)>,
    /// Why the run would have another objective, with the key.
    pub(super) objective: Option<(String, String)>,
    pub(super) rewards: Vec<Table>,
}

/// What another trainer's rewards are in Ottava.
pub(super) use rewards::table as reward;

/// The dialect of a file of `trainer` with these keys, if it is one of reinforcement learning.
pub(super) fn dialect(trainer: Trainer, table: &Map<String, Json>) -> Option<&'static Dialect> {
    let has = |keys: &[&str]| keys.iter().any(|key| table.contains_key(*key));
    match trainer {
        Trainer::Verl => Some(&verl::DIALECT),
        Trainer::NemoRl => Some(&nemo_rl::DIALECT),
        Trainer::Axolotl if table.get("rl").is_some_and(|rl| rl == "grpo") => Some(&trl::OF_AXOLOTL),
        Trainer::Axolotl | Trainer::LlamaFactory => None,
        _ if !has(&["num_generations", "reward_funcs", "max_completion_length"]) => None,
        _ if has(&["normalize_advantages", "reward_clip_range"]) => Some(&trl::RLOO),
        _ => Some(&trl::GRPO),
    }
}

/// What a dialect says of a key.
pub(super) enum Found {
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
    pub(super) fn read(&self, table: &Map<String, Json>) -> Reader {
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
    pub(super) fn find(&self, path: &str, reader: &Reader) -> Found {
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
    pub(super) fn is_open(&self) -> bool {
        self.is_open
    }
}

impl Reader {
    /// The value of a key, which is read by this.
    fn take(&mut self, path: &str) -> Option<Json> {
        let value = self.keys.get(path)?.clone();
        self.taken.insert(path.to_string());
        Some(value).filter(|value| !value.is_null())
    }

    /// [`Reader::take`] of the first of several names of a key that the file has, with the name.
    fn take_one(&mut self, paths: &[&'static str]) -> Option<(&'static str, Json)> {
        paths.iter().find_map(|path| Some((*path, self.take(path)?)))
    }

    fn flag(&mut self, path: &str) -> Option<bool> {
        self.take(path)?.as_bool()
    }

    /// A whole number; another value is refused.
    fn count(&mut self, path: &str) -> Option<u64> {
        let value = self.take(path)?;
        let count =
            value.as_u64().or_else(|| value.as_f64().filter(|x| x.fract() == 0.0 && *x >= 0.0).map(|x| x as u64));
        if count.is_none() {
            self.refuse(path, format!("{value} is no whole number"));
        }
        count
    }

    fn number(&mut self, path: &str) -> Option<f64> {
        let value = self.take(path)?;
        let number = value.as_f64().or_else(|| value.as_str()?.parse().ok());
        if number.is_none() {
            self.refuse(path, format!("{value} is no number"));
        }
        number
    }

    fn text(&mut self, path: &str) -> Option<String> {
        let value = self.take(path)?;
        Some(value.as_str().map_or_else(|| value.to_string(), str::to_string))
    }

    /// Whether a key that is not taken yet has this value.
    fn is(&self, path: &str, expected: &str) -> bool {
        self.keys.get(path).is_some_and(|value| value.as_str().map_or(value.to_string() == expected, |v| v == expected))
    }

    /// The names of keys that begin so.
    fn beginning(&self, start: &str) -> Vec<String> {
        self.keys.keys().filter(|path| path.starts_with(start)).cloned().collect()
    }

    /// Marks all keys that begin so as read.
    fn take_all(&mut self, start: &str) {
        self.taken.extend(self.beginning(start));
    }

    /// A setting of ours, from the key `path`.
    fn set(&mut self, path: &str, ours: &'static str, value: impl Into<Value>) {
        self.settings.push((path.to_string(), ours, value.into(), String::new()));
    }

    /// [`Reader::set`] with a comment beside the setting.
    fn set_noted(&mut self, path: &str, ours: &'static str, value: impl Into<Value>, comment: &str) {
        self.settings.push((path.to_string(), ours, value.into(), format!("  # {comment}")));
    }

    fn refuse(&mut self, path: &str, reason: impl Into<String>) {
        self.refused.push((path.to_string(), reason.into()));
    }

    /// A key without which the run would have another objective.
    fn refuse_objective(&mut self, path: &str, reason: impl Into<String>) {
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
pub(super) fn resolve(value: &Json, keys: &BTreeMap<String, Json>, depth: usize) -> Json {
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
    pub(super) fn value_of(&self, path: &str) -> Option<&Json> {
        self.keys.get(path)
    }
}

/// `data.max_length` from the tokens of prompts and completions.
fn set_lengths(reader: &mut Reader, path: &str, prompt: Option<u64>, completion: Option<u64>) {
    let (prompt, completion) = (prompt.unwrap_or(DEFAULT_LENGTH), completion.unwrap_or(DEFAULT_LENGTH));
    let comment = format!("{prompt} tokens of a prompt and {completion} of a completion");
    reader.set_noted(path, "data.max_length", (prompt + completion) as i64, &comment);
}

/// Tokens of a prompt, and of a completion, by default.
const DEFAULT_LENGTH: u64 = 512;

/// Rows about sampling: completions are drawn from the whole distribution.
const WHOLE: &str = "completions are drawn from the whole distribution at `reinforcement.temperature`, to which ratios and losses refer";
const ONE: &[&str] = &["1", "1.0"];
const ALL_TOKENS: &[&str] = &["-1", "0"];
const SAMPLER: &str = "the model that is trained draws the completions; no other process holds a second model";
const RANKS: &str = "`--gpus N` or a launcher starts one process for each GPU";
const LOGGED: &str = "metrics.jsonl and files of TensorBoard have all metrics of a run";
