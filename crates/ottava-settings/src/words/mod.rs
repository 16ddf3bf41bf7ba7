//! Keys and flags of other trainers: translated if one of our keys means the same, refused with a reason otherwise.

mod data;
mod meaning;
mod parallel;
mod precision;
mod tables;
#[cfg(test)]
mod tests;
mod training;

pub(crate) use meaning::{Answer, Meaning, NONE, Row};
use toml::Value;

/// Our key; its last part is also a key of other trainers.
pub(super) const DATASETS: &str = "data.datasets";

/// Our key of rewards, a list of tables.
pub(super) const REWARDS: &str = "reinforcement.rewards";

/// The starts of our keys of reinforcement learning and distillation. Some keys for preferences have the same last part.
pub(super) const OTHER_OBJECTIVES: [&str; 2] = ["reinforcement.", "distillation."];

/// The translation of one key.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Translation {
    /// Our key, as a dotted path, and its value.
    Ours(&'static str, Value),
    /// Nothing has to be written.
    Nothing,
    /// Our key must not have one of these values; an empty list means that our key has its default.
    Without(&'static str, Vec<Value>),
    /// Nothing is lost without the key, for this reason.
    Needless(&'static str),
    /// There is no such setting, for this reason.
    Refused(&'static str),
}

/// The name without the dashes of a command line.
fn plain(name: &str) -> String {
    name.trim_start_matches("--").replace('-', "_")
}

/// The row of `path`, which may have tables: a row for the last two parts of the path counts more than a row for the last part.
fn meaning(path: &str) -> Option<&'static Meaning> {
    let path = plain(path);
    if path == DATASETS || OTHER_OBJECTIVES.iter().any(|table| path.starts_with(table)) {
        // The tables are ours. Other trainers have keys of these names in other tables, with other meanings.
        return None;
    }
    let last_two = path.rmatch_indices('.').nth(1).map_or(path.as_str(), |(at, _)| &path[at + 1..]);
    let last = path.rsplit('.').next().unwrap_or_default();
    let dotted = if last_two.contains('.') { row(last_two) } else { None };
    dotted.or_else(|| row(last))
}

/// The row of `name`: of the name itself, or of its beginning.
fn row(name: &str) -> Option<&'static Meaning> {
    let rows = || [training::ROWS, data::ROWS, precision::ROWS, parallel::ROWS].into_iter().flatten();
    let whole = rows().find(|(theirs, _)| *theirs == name);
    // The beginning of a key is no beginning of its table.
    let starts = |theirs: &str| {
        let start = theirs.strip_suffix('*').filter(|start| start.contains('.') == name.contains('.'));
        start.is_some_and(|start| name.starts_with(start))
    };
    whole.or_else(|| rows().find(|(theirs, _)| starts(theirs))).map(|(_, meaning)| meaning)
}

/// What a key of another trainer's file is.
pub(super) enum InFile {
    /// A word with its translation, if it has one, and its name, which may also be a name of ours.
    Word(String, Option<Translation>),
    /// A key of a table that is no word, with the answer of the row for its whole path or of its table.
    OfTable(Option<Translation>),
}

/// Looks up the key at `path` of another trainer's file. A key in a table is a word only if [`tables`] lists its whole path.
pub(super) fn in_file(path: &str, value: &Value) -> InFile {
    let path = tables::own_path(path);
    if tables::is_word(&path) {
        let translation = translate(&path, value);
        let name = path.rsplit('.').next().unwrap_or_default().to_string();
        return InFile::Word(name, translation);
    }
    let whole = row(&path).map(|meaning| translate_by(meaning, value));
    let table = || translate(path.split('.').next()?, value);
    let is_reason = |found: &Translation| matches!(found, Translation::Refused(_) | Translation::Needless(_));
    InFile::OfTable(whole.or_else(table).filter(is_reason))
}

/// Whether the key at `path` of another trainer's file is translated to our key `ours`.
pub(super) fn is_in_file(path: &str, key: &str) -> bool {
    let path = tables::own_path(path);
    tables::is_word(&path) && ours(&path) == Some(key)
}

/// Whether the key at `path` is one of DeepSpeed's file, within a file of another trainer.
pub(super) fn is_of_deepspeed(path: &str) -> bool {
    tables::of_deepspeed(path).is_some()
}

/// Our key for another trainer's `name`, if there is one.
pub(super) fn ours(name: &str) -> Option<&'static str> {
    match meaning(name)? {
        Meaning::Is(ours) | Meaning::Values(ours, _) => Some(*ours),
        Meaning::Only(..) | Meaning::Needless(_) | Meaning::Not(_) => None,
    }
}

/// The value of our key `ours` for `value`, which other trainers may spell differently in their key `name`; errors with the reason why there is
/// none.
pub(super) fn value_of(ours: &str, name: &str, value: &Value) -> Result<Value, String> {
    match translate(name, value) {
        Some(Translation::Ours(path, value)) if path == ours => Ok(value),
        Some(Translation::Refused(reason)) => Err(reason.to_string()),
        _ => Ok(value.clone()),
    }
}

/// Translates another trainer's `name = value`; `None` for unknown names.
pub(super) fn translate(name: &str, value: &Value) -> Option<Translation> {
    Some(translate_by(meaning(name)?, value))
}

/// The translation of `value` by the meaning of its key.
pub(super) fn translate_by(meaning: &Meaning, value: &Value) -> Translation {
    match meaning {
        Meaning::Is(ours) => Translation::Ours(ours, value.clone()),
        Meaning::Values(ours, values) => match values.iter().find(|(theirs, _)| says(value, theirs)) {
            Some((_, Answer::As(text))) => Translation::Ours(ours, toml_value(text)),
            Some((_, Answer::Nothing)) => Translation::Nothing,
            Some((_, Answer::Default)) => Translation::Without(ours, Vec::new()),
            Some((_, Answer::Unset)) => {
                let given = values.iter().filter_map(|(_, answer)| match answer {
                    Answer::As(text) => Some(toml_value(text)),
                    Answer::Nothing | Answer::Unset | Answer::Default | Answer::Never(_) => None,
                });
                Translation::Without(ours, given.collect())
            }
            Some((_, Answer::Never(reason))) => Translation::Refused(reason),
            None => Translation::Ours(ours, value.clone()),
        },
        Meaning::Only(values, _) if values.iter().any(|theirs| says(value, theirs)) => Translation::Nothing,
        Meaning::Only(_, reason) | Meaning::Not(reason) => Translation::Refused(reason),
        Meaning::Needless(reason) => Translation::Needless(reason),
    }
}

/// Whether `value` is `theirs`: a word, or another value as TOML writes it.
fn says(value: &Value, theirs: &str) -> bool {
    value.as_str().map_or_else(|| value.to_string() == theirs, |word| word == theirs)
}

fn toml_value(text: &str) -> Value {
    let table: toml::Table = format!("value = {text}").parse().expect("our own values are TOML");
    table["value"].clone()
}
