//! Settings and metrics of a run as a whole, for a page that compares settings or stores metrics.

use ottava_common::error::{Error, Result};
use ottava_common::input;
use ottava_settings::{flatten, without_queries};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use toml::Table;

/// The maximum size of `config.toml` in bytes.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// The maximum size of an exported `metrics.jsonl` in bytes.
const MAX_EXPORT_BYTES: u64 = 512 << 20;

/// The size of a part of an export in bytes, beyond which it is sent.
const PART_BYTES: usize = 64 << 10;

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

/// Reads the settings in `config.toml` of the run in `folder`, by their dotted paths. A run that has not written the file has none. Addresses have no
/// queries, which may have keys.
///
/// Errors if the file cannot be read.
pub(super) fn settings(folder: &Path) -> Result<BTreeMap<String, String>> {
    let path = folder.join("config.toml");
    let Some(text) = read(&path, MAX_CONFIG_BYTES)? else { return Ok(BTreeMap::new()) };
    let table: Table =
        text.parse().map_err(|error| Error::Config(format!("{}: this is not valid TOML: {error}", path.display())))?;
    let mut keys = Vec::new();
    flatten("", &table, &mut keys);
    Ok(keys.into_iter().map(|(key, value)| (key, without_queries(&value.to_string()))).collect())
}

/// The form of exported metrics.
#[derive(Clone, Copy, Debug)]
pub enum Form {
    /// A JSON array of all lines.
    Json,
    /// A table with the column `step` and a column for each other key, in the form of RFC 4180.
    Csv,
}

/// The metrics of a run: one object for each line of `metrics.jsonl`. Lines that are no objects, such as a line that is not complete yet, are left out.
/// Lines that are added after `Metrics::open` are not read.
pub struct Metrics {
    path: PathBuf,
    /// The file and its size in bytes; `None` if it does not exist.
    file: Option<(File, u64)>,
}

impl Metrics {
    /// Opens the metrics of the run in `folder`. Errors if the file cannot be read, or if it is larger than 512 MiB.
    pub(super) fn open(folder: &Path) -> Result<Metrics> {
        let path = folder.join("metrics.jsonl");
        let file = match input::open_unlinked(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            opened => Some(opened.map_err(Error::io(&path))?),
        };
        match file {
            Some((_, size)) if size > MAX_EXPORT_BYTES => Err(Error::Config(format!(
                "{}: the file has {size} bytes, and {MAX_EXPORT_BYTES} are exported; read the file itself",
                path.display()
            ))),
            file => Ok(Metrics { path, file }),
        }
    }

    /// Calls `send` with the parts of a text of all metrics, until it returns false. Reads one line at a time.
    ///
    /// Errors if the file cannot be read.
    pub fn write(&self, form: Form, send: &mut dyn FnMut(String) -> bool) -> Result<()> {
        let mut part = String::new();
        let mut add = |text: &str| {
            part += text;
            part.len() < PART_BYTES || send(std::mem::take(&mut part))
        };
        match form {
            Form::Json => self.write_json(&mut add)?,
            Form::Csv => self.write_csv(&mut add)?,
        };
        send(part);
        Ok(())
    }

    fn write_json(&self, add: &mut dyn FnMut(&str) -> bool) -> Result<()> {
        let mut before = "[";
        self.each(&mut |line| {
            let text = serde_json::to_string(&line).expect("lines are plain data");
            add(std::mem::replace(&mut before, ",")) && add(&text)
        })?;
        add(if before == "[" { "[]" } else { "]" });
        Ok(())
    }

    fn write_csv(&self, add: &mut dyn FnMut(&str) -> bool) -> Result<()> {
        let mut keys = BTreeSet::new();
        self.each(&mut |line| {
            keys.extend(line.into_iter().map(|(key, _)| key).filter(|key| key != "step"));
            true
        })?;
        let row = |cells: Vec<String>| cells.join(",") + "\r\n";
        let head = ["step".to_string()].into_iter().chain(keys.iter().map(|key| cell(key)));
        add(&row(head.collect()));
        self.each(&mut |line| {
            let value = |key: &str| match line.get(key) {
                None | Some(Value::Null) => String::new(),
                Some(Value::String(value)) => cell(value),
                Some(value) => cell(&value.to_string()),
            };
            add(&row(["step"].into_iter().chain(keys.iter().map(String::as_str)).map(value).collect()))
        })
    }

    /// Calls `each` with the lines, until it returns false.
    fn each(&self, each: &mut dyn FnMut(Map<String, Value>) -> bool) -> Result<()> {
        let Some((file, size)) = &self.file else { return Ok(()) };
        let mut file = file;
        let mut read = || -> std::io::Result<()> {
            file.seek(SeekFrom::Start(0))?;
            let (mut reader, mut line) = (BufReader::new(file.take(*size)), Vec::new());
            while reader.read_until(b'\n', &mut line)? > 0 {
                if let Ok(object) = serde_json::from_slice(&line)
                    && !each(object)
                {
                    break;
                }
                line.clear();
            }
            Ok(())
        };
        read().map_err(Error::io(&self.path))
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
        std::fs::write(
            &path,
            "seed = 1\nurl = \"https://a/b?key=1\"\n[optimizer]\nname = \"adamw\"\nlearning_rate = 1e-3\n",
        )
        .unwrap();
        let found = settings(folder.path()).unwrap();
        assert_eq!((found["seed"].as_str(), found["optimizer.name"].as_str()), ("1", "\"adamw\""));
        assert_eq!(found["url"], "\"https://a/b\"");
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
        let metrics = Metrics::open(folder.path()).unwrap();
        let text = |form: Form| {
            let mut text = String::new();
            metrics
                .write(form, &mut |part| {
                    text += &part;
                    true
                })
                .unwrap();
            text
        };
        assert_eq!(text(Form::Csv), "step,eval_loss,loss,note\r\n0,2.5,,\r\n1,,2.25,\"a, \"\"b\"\"\"\r\n");
        let json: Vec<Map<String, Value>> = serde_json::from_str(&text(Form::Json)).unwrap();
        assert_eq!((json.len(), &json[1]["loss"]), (2, &Value::from(2.25)));
    }
}
