//! The data sets of Axolotl and LLaMA-Factory.

use serde_json::{Map, Value as Json};
use std::path::{Path, PathBuf};
use toml::Value;

/// The largest `dataset_info.json`.
const MAX_INFO_BYTES: u64 = 4 << 20;

/// What Axolotl's types of data sets are called here; the start of a name counts.
const TYPES: &[(&str, &str)] = &[
    ("chat_template", "auto"),
    ("alpaca", "alpaca"),
    ("sharegpt", "sharegpt"),
    ("completion", "text"),
    ("pretrain", "text"),
    ("", "auto"),
];

/// What the data sets of a file are here.
#[derive(Default)]
pub(super) struct DataSets {
    /// Our settings.
    pub(super) settings: Vec<(&'static str, Value)>,
    /// Keys without translation, each with the reason.
    pub(super) refused: Vec<(String, String)>,
}

/// The data sets that the key `path` with this `value` names, in the `table` of the file at `file`; `None` for other keys.
pub(super) fn translate(path: &str, value: &Json, table: &Map<String, Json>, file: &Path) -> Option<DataSets> {
    let mut found = DataSets::default();
    match (path, value) {
        ("datasets" | "pretraining_dataset" | "test_datasets", Json::Array(list)) => found.axolotl(path, list),
        ("dataset" | "eval_dataset", Json::String(names)) if table.contains_key("model_name_or_path") => {
            let folder = table.get("dataset_dir").and_then(Json::as_str).unwrap_or("data");
            found.llama_factory(path, names, folder, file);
        }
        ("special_tokens" | "tokens", Json::Object(inner)) if inner.values().all(Json::is_null) => {}
        _ => return None,
    }
    Some(found)
}

impl DataSets {
    fn refuse(&mut self, path: &str, reason: &str) {
        self.refused.push((path.to_string(), reason.to_string()));
    }

    fn axolotl(&mut self, path: &str, list: &[Json]) {
        let (mut files, mut formattings) = (Vec::new(), Vec::new());
        for entry in list {
            let Some(entry) = entry.as_object() else {
                self.refuse(path, "a data set is a table with `path` and `type`");
                continue;
            };
            match entry.get("data_files") {
                Some(Json::Array(list)) => files.extend(list.iter().filter_map(Json::as_str).map(str::to_string)),
                Some(Json::String(file)) => files.push(file.clone()),
                _ => files.extend(entry.get("path").and_then(Json::as_str).map(str::to_string)),
            }
            self.entry(path, entry, &mut formattings);
        }
        self.files(path, files);
        formattings.dedup();
        match formattings.as_slice() {
            [one] if one != "auto" => self.set("data.formatting", Value::String(one.clone())),
            [] | [_] => {}
            _ => self.refuse(
                path,
                "data sets of several types: `formatting` under [data] stays \"auto\", by the fields of each file",
            ),
        }
    }

    fn entry(&mut self, path: &str, entry: &Map<String, Json>, formattings: &mut Vec<String>) {
        for (key, value) in entry {
            match (key.as_str(), value) {
                ("path" | "data_files" | "ds_type" | "split" | "name", _) | (_, Json::Null) => {}
                ("type", Json::String(kind)) => {
                    let (_, ours) =
                        TYPES.iter().find(|(start, _)| kind.starts_with(start)).expect("the last start is empty");
                    if kind.starts_with("input_output")
                        || (*ours == "auto" && kind != "chat_template" && !kind.is_empty())
                    {
                        let reason = format!(
                            "type `{kind}` is not known; `formatting` under [data] stays \"auto\", by the fields of each file"
                        );
                        self.refuse(&format!("{path}.type"), &reason);
                    }
                    if *ours == "alpaca" {
                        let reason = "records become chats of the model's template; Axolotl writes `### Instruction:` and `### Response:` instead";
                        self.refuse(&format!("{path}.type"), reason);
                    }
                    formattings.push((*ours).to_string());
                }
                ("field" | "field_completion", Json::String(field)) => {
                    self.set("data.text_field", Value::String(field.clone()));
                }
                _ => self.refuse(
                    &format!("{path}.{key}"),
                    "this key of a data set is not translated; records are recognised by their fields",
                ),
            }
        }
    }

    /// The files that `dataset_info.json` gives for the names of data sets.
    fn llama_factory(&mut self, path: &str, names: &str, folder: &str, file: &Path) {
        let beside = file.parent().unwrap_or(Path::new("")).join(folder);
        let info = [PathBuf::from(folder), beside].into_iter().find_map(|folder| {
            let text = crate::input::read_text(&folder.join("dataset_info.json"), MAX_INFO_BYTES).ok()?;
            Some((folder, serde_json::from_str::<Map<String, Json>>(&text).ok()?))
        });
        let mut files = Vec::new();
        for name in names.split(',').map(str::trim) {
            let Some((folder, info)) = &info else {
                self.refuse(path, &format!("`{name}` is a name in dataset_info.json, which is not in {folder}; name its file in `train_files` under [data]"));
                continue;
            };
            match info.get(name).and_then(|entry| entry.get("file_name")).and_then(Json::as_str) {
                Some(file) => files.push(folder.join(file).display().to_string()),
                None => self.refuse(path, &format!("`{name}` has no `file_name` in {}; download it and name its file in `train_files` under [data]", folder.join("dataset_info.json").display())),
            }
        }
        self.files(path, files);
    }

    fn files(&mut self, path: &str, files: Vec<String>) {
        for file in files.iter().filter(|file| !Path::new(file).exists()) {
            let reason = match Path::new(file).extension().is_some() {
                true => format!("there is no file {file} yet"),
                false => format!(
                    "`{file}` is no file here; if it is a data set of the Hugging Face Hub, download it and name its files in `train_files` under [data]"
                ),
            };
            self.refuse(path, &reason);
        }
        if !files.is_empty() {
            let ours = if path.starts_with("test") || path.starts_with("eval") {
                "data.val_files"
            } else {
                "data.train_files"
            };
            self.set(ours, Value::Array(files.into_iter().map(Value::String).collect()));
        }
    }

    fn set(&mut self, path: &'static str, value: Value) {
        self.settings.push((path, value));
    }
}
