//! Reads `config.json`: each key has a type, and errors name file and key.

use ottava_common::error::{Error, Result};
use ottava_common::{input, python_json};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// The maximum size of a `config.json` in bytes.
const MAX_BYTES: u64 = 16 << 20;

/// A parsed `config.json`.
#[derive(Clone, Debug)]
pub struct ConfigFile {
    path: PathBuf,
    values: Map<String, Value>,
    /// The default values of keys that the file lacks.
    defaults: Map<String, Value>,
}

impl ConfigFile {
    /// Reads `config.json` of a model folder, or a file if `folder` is the path of a file.
    pub fn read(folder: &Path) -> Result<ConfigFile> {
        if folder.is_file() && folder.extension().is_none_or(|extension| extension != "json") {
            let remedy = match folder.extension().is_some_and(|extension| extension == "gguf") {
                true => "`ottava convert` makes a folder of it",
                false => "name its folder",
            };
            let text = format!("{}: this is a file, and a model is a folder: {remedy}", folder.display());
            return Err(Error::Model(text));
        }
        let path = if folder.is_dir() { folder.join("config.json") } else { folder.to_path_buf() };
        let text = input::read_text(&path, MAX_BYTES).map_err(|error| {
            let remedy = match snapshot(folder) {
                Some(snapshot) => format!(
                    "this is a model of the Hugging Face cache, whose folders are under snapshots; name {}",
                    snapshot.display()
                ),
                None if input::is_hub_id(folder) => format!(
                    "a model is a folder on this machine, and nothing is downloaded: `hf download {0} --local-dir {1}` makes one; name {1}",
                    folder.display(),
                    folder.file_name().unwrap_or_default().display()
                ),
                None => "a model folder holds config.json, tokenizer.json and *.safetensors".into(),
            };
            Error::Model(format!("{}: {error}; {remedy}", path.display()))
        })?;
        let value: Value =
            python_json::parse(&text).map_err(|e| Error::Model(format!("{}: not valid JSON: {e}", path.display())))?;
        match value {
            Value::Object(values) => Ok(ConfigFile::from_values(path, values)),
            _ => Err(Error::Model(format!("{}: expected one JSON object", path.display()))),
        }
    }

    /// Wraps `values` that are not from a folder, such as `[model]` of a run. Error messages call them `path`.
    pub fn from_values(path: impl Into<PathBuf>, values: Map<String, Value>) -> ConfigFile {
        ConfigFile { path: path.into(), values, defaults: Map::new() }
    }

    /// Returns all keys, for copying them to a new folder.
    pub fn values(&self) -> &Map<String, Value> {
        &self.values
    }

    /// Returns this file with other `values`.
    pub fn with_values(&self, values: Map<String, Value>) -> ConfigFile {
        ConfigFile { values, ..self.clone() }
    }

    /// Returns this file with default values for missing keys.
    pub(super) fn with_defaults(&self, defaults: Map<String, Value>) -> ConfigFile {
        ConfigFile { defaults, ..self.clone() }
    }

    /// Returns whether the defaults of the file's family contain `key`.
    pub(super) fn has_default(&self, key: &str) -> bool {
        self.defaults.contains_key(key)
    }

    /// Returns an error about this file.
    pub fn error(&self, text: &str) -> Error {
        Error::Model(format!("{}: {text}", self.path.display()))
    }

    /// Returns whether `key` is present and not null.
    pub fn has(&self, key: &str) -> bool {
        self.values.get(key).is_some_and(|v| !v.is_null())
    }

    /// Returns the value of a required key, or the family's default of the key.
    pub fn required<T: DeserializeOwned>(&self, key: &str) -> Result<T> {
        match self.value(key) {
            None => Err(self.error(&format!("the key `{key}` is missing"))),
            Some(value) => self.parse(key, value),
        }
    }

    /// Returns the value of a key. If the key is missing or null, returns the family's default, or `default` if the family has no default.
    pub fn optional<T: DeserializeOwned>(&self, key: &str, default: T) -> Result<T> {
        match self.value(key) {
            None => Ok(default),
            Some(value) => self.parse(key, value),
        }
    }

    /// Returns the value of a key for which null has a meaning. The family's default is used only if the key is missing.
    pub fn nullable<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>> {
        match self.values.get(key).or_else(|| self.defaults.get(key)) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => self.parse(key, value).map(Some),
        }
    }

    /// Returns the two numbers of a required key, which may be infinite.
    pub fn limits(&self, key: &str) -> Result<[f64; 2]> {
        let list: [Value; 2] = self.required(key)?;
        let number = |value: &Value| match python_json::special(value) {
            Some(name) => name.parse().map_err(|_| self.error(&format!("`{key}` has the number {name}"))),
            None => self.parse(key, value),
        };
        Ok([number(&list[0])?, number(&list[1])?])
    }

    /// Returns a nested object, which error messages name like a file.
    pub fn section(&self, key: &str) -> Result<Option<ConfigFile>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Object(values)) => {
                Ok(Some(ConfigFile::from_values(format!("{}: {key}", self.path.display()), values.clone())))
            }
            Some(_) => Err(self.error(&format!("`{key}` must be an object"))),
        }
    }

    /// Returns the first of `architectures`.
    pub fn architecture(&self) -> Result<Option<String>> {
        let names: Vec<String> = self.optional("architectures", Vec::new())?;
        Ok(names.into_iter().next())
    }

    /// Returns the value of a key if the value is not null, else the family's default.
    fn value(&self, key: &str) -> Option<&Value> {
        let is_stated = |value: &&Value| !value.is_null();
        self.values.get(key).filter(is_stated).or_else(|| self.defaults.get(key).filter(is_stated))
    }

    fn parse<T: DeserializeOwned>(&self, key: &str, value: &Value) -> Result<T> {
        serde_json::from_value(value.clone()).map_err(|_| match python_json::special(value) {
            Some(number) => self.error(&format!("`{key}` is {number}, and must be finite")),
            None => {
                self.error(&format!("`{key}` has the value {}, which is not of its kind", python_json::excerpt(value)))
            }
        })
    }
}

/// Returns the newest snapshot in a `folder` of the Hugging Face cache, `models--OWNER--NAME`.
fn snapshot(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder.join("snapshots")).ok()?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths.max_by_key(|path| path.metadata().and_then(|metadata| metadata.modified()).ok())
}
