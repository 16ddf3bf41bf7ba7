//! Settings and metrics of a run as a whole, for a page that compares settings or stores metrics.

use crate::report::MAX_METRICS_BYTES;
use ottava_common::error::{Error, Result};
use ottava_common::input;
use ottava_settings::flatten;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::Path;
use toml::Table;

/// The maximum size of `config.toml` in bytes.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// Reads a file of a run without following a link. Returns `None` if the file does not exist.
///
/// Errors if the file is larger than `most` bytes or is no text.
fn read(path: &Path, most: u64) -> Result<Option<String>> {
    let (file, size) = match input::open_unlinked(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(Error::io(path))?,
    };
    if size > most {
        return Err(Error::Config(format!("{}: the file has {size} bytes, and {most} are read", path.display())));
    }
    let mut text = String::new();
    file.take(most).read_to_string(&mut text).map_err(Error::io(path))?;
    Ok(Some(text))
}

/// Reads the settings in `config.toml` of the run in `folder`, by their dotted paths. A run that has not written the file has none.
///
/// Errors if the file cannot be read.
pub(super) fn settings(folder: &Path) -> Result<BTreeMap<String, String>> {
    let path = folder.join("config.toml");
    let Some(text) = read(&path, MAX_CONFIG_BYTES)? else { return Ok(BTreeMap::new()) };
    let table: Table =
        text.parse().map_err(|error| Error::Config(format!("{}: this is not valid TOML: {error}", path.display())))?;
    let mut keys = Vec::new();
    flatten("", &table, &mut keys);
    Ok(keys.into_iter().map(|(key, value)| (key, value.to_string())).collect())
}

/// The metrics of a run: one object for each line of `metrics.jsonl`.
pub struct Metrics(Vec<Map<String, Value>>);

impl Metrics {
    /// Reads the metrics of the run in `folder`. Lines that are no objects, such as a line that is not complete yet, are left out.
    ///
    /// Errors if the file cannot be read.
    pub(super) fn read(folder: &Path) -> Result<Metrics> {
        let text = read(&folder.join("metrics.jsonl"), MAX_METRICS_BYTES)?.unwrap_or_default();
        Ok(Metrics(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()))
    }

    /// Returns a JSON array of all lines.
    pub fn json(&self) -> String {
        serde_json::to_string(&self.0).expect("lines are plain data")
    }

    /// Returns a table with the column `step` and a column for each other key, in the form of RFC 4180.
    pub fn csv(&self) -> String {
        let keys: BTreeSet<&String> = self.0.iter().flat_map(Map::keys).filter(|key| *key != "step").collect();
        let row = |cells: Vec<String>| cells.join(",") + "\r\n";
        let head = ["step".to_string()].into_iter().chain(keys.iter().map(|key| cell(key)));
        let mut text = row(head.collect());
        for line in &self.0 {
            let value = |key: &str| match line.get(key) {
                None | Some(Value::Null) => String::new(),
                Some(Value::String(value)) => cell(value),
                Some(value) => cell(&value.to_string()),
            };
            text += &row(["step"].into_iter().chain(keys.iter().map(|key| key.as_str())).map(value).collect());
        }
        text
    }
}

/// Returns `text` as a cell, in quotes if it needs them.
fn cell(text: &str) -> String {
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_flat_and_links_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        assert!(settings(folder.path()).unwrap().is_empty());
        let path = folder.path().join("config.toml");
        std::fs::write(&path, "seed = 1\n[optimizer]\nname = \"adamw\"\nlearning_rate = 1e-3\n").unwrap();
        let found = settings(folder.path()).unwrap();
        assert_eq!((found["seed"].as_str(), found["optimizer.name"].as_str()), ("1", "\"adamw\""));
        let elsewhere = folder.path().join("elsewhere");
        std::fs::rename(&path, &elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        assert!(settings(folder.path()).unwrap_err().to_string().contains("this is a link"));
    }

    #[test]
    fn metrics_become_a_table_with_all_keys() {
        let folder = tempfile::tempdir().unwrap();
        let lines =
            "{\"step\":0,\"eval_loss\":2.5}\n{\"step\":1,\"loss\":2.25,\"note\":\"a, \\\"b\\\"\"}\n{\"step\":2,\"lo";
        std::fs::write(folder.path().join("metrics.jsonl"), lines).unwrap();
        let metrics = Metrics::read(folder.path()).unwrap();
        assert_eq!(metrics.csv(), "step,eval_loss,loss,note\r\n0,2.5,,\r\n1,,2.25,\"a, \"\"b\"\"\"\r\n");
        let json: Vec<Map<String, Value>> = serde_json::from_str(&metrics.json()).unwrap();
        assert_eq!((json.len(), &json[1]["loss"]), (2, &Value::from(2.25)));
    }
}
