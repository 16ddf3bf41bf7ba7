//! The data sets of Axolotl, LLaMA-Factory and TRL.

use super::fields::Fields;
use ottava_hub::is_name;
use serde_json::{Map, Value as Json};
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// The largest `dataset_info.json`.
const MAX_INFO_BYTES: u64 = 4 << 20;

/// Our names for Axolotl's types of data sets; the start of a name counts.
const TYPES: &[(&str, &str)] = &[
    ("chat_template", "auto"),
    ("alpaca", "alpaca"),
    ("sharegpt", "sharegpt"),
    ("completion", "text"),
    ("pretrain", "text"),
    ("", "auto"),
];

/// The data sets of a file, translated.
#[derive(Default)]
pub(super) struct DataSets {
    /// Our settings.
    pub(super) settings: Vec<(&'static str, Value)>,
    /// What the shares of the sets are in the other trainer.
    pub(super) comment: &'static str,
    /// Keys without translation, each with the reason.
    pub(super) refused: Vec<(String, String)>,
    /// Other names of fields and roles.
    fields: Fields,
}

/// The data sets that the key `path` with this `value` names, in the `table` of the file at `file`; `None` for other keys.
pub(super) fn translate(path: &str, value: &Json, table: &Map<String, Json>, file: &Path) -> Option<DataSets> {
    let mut found = DataSets::default();
    match (path, value) {
        ("datasets" | "pretraining_dataset" | "test_datasets", Json::Array(list)) => found.axolotl(path, list),
        ("dataset" | "eval_dataset", Json::String(names)) if table.contains_key("model_name_or_path") => {
            found.llama_factory(path, names, table, file);
        }
        ("dataset_name", Json::String(name)) if table.contains_key("model_name_or_path") => {
            let text = |key: &str| table.get(key).and_then(Json::as_str);
            found.files(path, vec![of_split(name, text("dataset_config"), text("dataset_train_split"))]);
            if let Some(split) = text("dataset_test_split").filter(|_| is_hub(name) && evaluates(table)) {
                let files = vec![of_split(name, text("dataset_config"), Some(split)).into()];
                found.set("data.val_files", Value::Array(files));
            }
        }
        // They are read with the name of the data set.
        ("dataset_config" | "dataset_train_split" | "dataset_test_split", Json::String(_))
            if table.get("dataset_name").and_then(Json::as_str).is_some_and(is_hub) => {}
        // They are read with the names of the data sets.
        ("mix_strategy" | "interleave_probs", _) if table.get("dataset").is_some_and(Json::is_string) => {}
        ("special_tokens" | "tokens", Json::Object(inner)) if inner.values().all(Json::is_null) => {}
        _ => return None,
    }
    found.settings.extend(std::mem::take(&mut found.fields).settings());
    Some(found)
}

/// A data set with its files, and its share of whatever the trainer counts.
struct Set {
    name: String,
    files: Vec<String>,
    share: Option<f64>,
}

/// Whether `path` names a data set of the Hub, and no file or folder.
fn is_hub(path: &str) -> bool {
    is_name(path)
        && !Path::new(path).exists()
        && Path::new(path).extension().is_none_or(|end| !DATA.iter().any(|known| end == *known))
}

/// Endings of files with data.
const DATA: [&str; 7] = ["jsonl", "json", "csv", "tsv", "parquet", "arrow", "txt"];

/// Whether a file of TRL evaluates.
fn evaluates(table: &Map<String, Json>) -> bool {
    table.get("eval_strategy").and_then(Json::as_str).is_some_and(|strategy| strategy != "no")
}

/// The data set `path`, with the configuration and the split if it is of the Hub. The default of the split is `train` in all trainers.
fn of_split(path: &str, config: Option<&str>, split: Option<&str>) -> String {
    let keys = [("config", config), ("split", split.filter(|split| *split != "train"))];
    let query: Vec<_> = keys.into_iter().filter_map(|(key, value)| Some(format!("{key}={}", value?))).collect();
    match is_hub(path) && !query.is_empty() {
        true => format!("{path}?{}", query.join("&")),
        false => path.to_string(),
    }
}

/// A name for the data set `path`, of characters that names may have.
fn stem(path: &str) -> String {
    let name = Path::new(path).file_stem().unwrap_or_default().to_string_lossy();
    name.chars().map(|c| if c.is_ascii_alphanumeric() || "_-.".contains(c) { c } else { '-' }).collect()
}

impl DataSets {
    fn refuse(&mut self, path: &str, reason: &str) {
        self.refused.push((path.to_string(), reason.to_string()));
    }

    fn axolotl(&mut self, path: &str, list: &[Json]) {
        let (mut sets, mut formattings) = (Vec::new(), Vec::new());
        for entry in list {
            let Some(entry) = entry.as_object() else {
                self.refuse(path, "a data set is a table with `path` and `type`");
                continue;
            };
            let text = |key: &str| entry.get(key).and_then(Json::as_str);
            let named: Vec<&str> = match entry.get("data_files") {
                Some(Json::Array(list)) => list.iter().filter_map(Json::as_str).collect(),
                Some(Json::String(file)) => vec![file],
                _ => Vec::new(),
            };
            let files: Vec<String> = match text("path") {
                Some(hub) if is_hub(hub) && !named.is_empty() => {
                    named.iter().map(|file| format!("hf://datasets/{hub}/{file}")).collect()
                }
                Some(path) if named.is_empty() => vec![of_split(path, text("name"), text("split"))],
                _ => named.into_iter().map(str::to_string).collect(),
            };
            let name = files.first().map_or(String::new(), |file| stem(file));
            sets.push(Set { name, files, share: entry.get("weight").and_then(Json::as_f64) });
            self.entry(path, entry, &mut formattings);
        }
        // A share of the records of a set is what of it is read in an epoch.
        match sets.iter().any(|set| set.share.is_some_and(|share| share != 1.0)) && path == "datasets" {
            true => {
                self.mixture(path, sets, "repeat", "weight of Axolotl, which reads the same records in every epoch")
            }
            false => self.files(path, sets.into_iter().flat_map(|set| set.files).collect()),
        }
        formattings.dedup();
        match formattings.as_slice() {
            [one] if one != "auto" => self.set("data.records.formatting", Value::String(one.clone())),
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
                ("weight", Json::Number(_)) => {}
                ("type", Json::String(kind)) => {
                    let (_, ours) =
                        TYPES.iter().find(|(start, _)| kind.starts_with(start)).expect("the last start is empty");
                    if kind.starts_with("input_output")
                        || (*ours == "auto" && !kind.starts_with("chat_template") && !kind.is_empty())
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
                // A format with fields of other names.
                ("type", Json::Object(kind)) => {
                    formattings.push("auto".to_string());
                    for (key, value) in kind.iter().filter(|(_, value)| !value.is_null()) {
                        if !self.fields.axolotl(key, value) {
                            let reason =
                                "records become chats of the model's template, whatever the format of a prompt";
                            self.refuse(&format!("{path}.type.{key}"), reason);
                        }
                    }
                }
                ("roles_to_train", Json::Array(roles)) if roles.iter().all(Json::is_string) => {
                    let roles = roles.iter().filter_map(Json::as_str).map(Value::from).collect();
                    self.set("data.chat.roles_to_train", Value::Array(roles));
                }
                ("train_on_eos", Json::String(choice)) => self.set("data.chat.train_on_eos", choice.as_str().into()),
                ("chat_template", Json::String(choice)) if choice == "tokenizer_default" => {}
                ("field" | "field_completion", Json::String(field)) => {
                    self.set("data.records.text_field", Value::String(field.clone()));
                }
                (_, value) if self.fields.axolotl(key, value) => {}
                _ => self.refuse(
                    &format!("{path}.{key}"),
                    "this key of a data set is not translated; records are recognised by their fields",
                ),
            }
        }
    }

    /// The files that `dataset_info.json` gives for the names of data sets.
    fn llama_factory(&mut self, path: &str, names: &str, table: &Map<String, Json>, file: &Path) {
        let folder = table.get("dataset_dir").and_then(Json::as_str).unwrap_or("data");
        let beside = file.parent().unwrap_or(Path::new("")).join(folder);
        let info = [PathBuf::from(folder), beside].into_iter().find_map(|folder| {
            let text = ottava_common::input::read_text(&folder.join("dataset_info.json"), MAX_INFO_BYTES).ok()?;
            Some((folder, serde_json::from_str::<Map<String, Json>>(&text).ok()?))
        });
        let (mut sets, mut texts) = (Vec::new(), Vec::new());
        let is_of_texts = table.get("stage").is_some_and(|stage| stage == "pt");
        for name in names.split(',').map(str::trim) {
            let Some((folder, info)) = &info else {
                self.refuse(path, &format!("`{name}` is a name in dataset_info.json, which is not in {folder}; name its file in `train_files` under [data]"));
                continue;
            };
            let text = |key: &str| info.get(name)?.get(key)?.as_str();
            let file = match (text("file_name"), text("hf_hub_url").filter(|url| is_hub(url))) {
                (Some(file), _) => Some(folder.join(file).display().to_string()),
                (None, Some(hub)) => Some(of_split(hub, text("subset"), text("split"))),
                (None, None) => None,
            };
            match file {
                Some(file) => {
                    let entry = info.get(name).and_then(Json::as_object);
                    entry.into_iter().for_each(|entry| self.fields.llama_factory(entry, is_of_texts));
                    texts.extend(entry.and_then(|entry| entry.get("columns")?.get("prompt")?.as_str()));
                    sets.push(Set { name: stem(name), files: vec![file], share: None });
                }
                None => self.refuse(path, &format!("`{name}` has neither `file_name` nor `hf_hub_url` in {}; download it and name its file in `train_files` under [data]", folder.join("dataset_info.json").display())),
            }
        }
        texts.dedup();
        match texts.as_slice() {
            [field] if is_of_texts => self.set("data.records.text_field", Value::String(field.to_string())),
            [_, _, ..] if is_of_texts => {
                self.refuse(path, "the texts of these data sets have fields of several names, and `text_field` is one name; rename them");
            }
            _ => {}
        }
        match table.get("mix_strategy").and_then(Json::as_str) {
            Some(strategy) if path == "dataset" && strategy != "concat" => {
                self.interleaved(path, strategy, sets, table)
            }
            _ => self.files(path, sets.into_iter().flat_map(|set| set.files).collect()),
        }
    }

    /// The data sets of a `strategy` of LLaMA-Factory, which takes records of sets in turns or by probabilities.
    fn interleaved(&mut self, path: &str, strategy: &str, mut sets: Vec<Set>, table: &Map<String, Json>) {
        let probabilities: Vec<Option<f64>> = match table.get("interleave_probs") {
            None | Some(Json::Null) => vec![Some(1.0); sets.len()],
            Some(Json::String(text)) => text.split(',').map(|one| one.trim().parse().ok()).collect(),
            Some(Json::Array(list)) => list.iter().map(Json::as_f64).collect(),
            Some(other) => vec![other.as_f64()],
        };
        if probabilities.len() != sets.len() || probabilities.contains(&None) {
            let reason = format!(
                "{} numbers are needed, one for each data set whose file is known; set `weight` of each table of [[data.datasets]]",
                sets.len()
            );
            self.refuse("interleave_probs", &reason);
            return self.files(path, sets.into_iter().flat_map(|set| set.files).collect());
        }
        let epoch = match strategy {
            "interleave_under" => "ends with its smallest set",
            "interleave_over" => "ends when each set was read once",
            // Every record is read once, in whatever order.
            "interleave_once" => return self.files(path, sets.into_iter().flat_map(|set| set.files).collect()),
            _ => {
                self.refuse(
                    "mix_strategy",
                    "this strategy is not known; set `weight` of each table of [[data.datasets]]",
                );
                return self.files(path, sets.into_iter().flat_map(|set| set.files).collect());
            }
        };
        let length = format!(
            "an epoch there {epoch}, and here has the tokens of all sets; `max_steps` under [training] sets a length"
        );
        self.refuse("mix_strategy", &length);
        sets.iter_mut().zip(probabilities).for_each(|(set, share)| set.share = share);
        self.mixture(path, sets, "weight", "of the tokens; in LLaMA-Factory, of the records");
    }

    /// Tables of `[[data.datasets]]`, with the share of each under this `key`.
    fn mixture(&mut self, path: &str, sets: Vec<Set>, key: &str, comment: &'static str) {
        let mut names: Vec<String> = Vec::new();
        let mut tables = Vec::new();
        for Set { name, files, share } in sets {
            self.expect_files(path, &files);
            let others = names.iter().filter(|other| **other == name).count();
            let unique = if others == 0 { name.clone() } else { format!("{name}-{}", others + 1) };
            names.push(name);
            let mut table = Table::new();
            table.insert("name".into(), unique.into());
            table.insert("train_files".into(), files.into());
            table.insert(key.into(), share.unwrap_or(1.0).into());
            tables.push(Value::Table(table));
        }
        self.comment = comment;
        self.set("data.datasets", Value::Array(tables));
    }

    /// The names of `files`, which are all of a run or of its validation.
    fn files(&mut self, path: &str, files: Vec<String>) {
        self.expect_files(path, &files);
        if !files.is_empty() {
            let ours = if path.starts_with("test") || path.starts_with("eval") {
                "data.val_files"
            } else {
                "data.train_files"
            };
            self.set(ours, Value::Array(files.into_iter().map(Value::String).collect()));
        }
    }

    fn expect_files(&mut self, path: &str, files: &[String]) {
        let is_remote = |file: &str| file.starts_with("hf://") || is_hub(file.split('?').next().unwrap_or(file));
        for file in files.iter().filter(|file| !Path::new(file).exists() && !is_remote(file)) {
            let what = "name a file, a folder, or a data set of the Hub (OWNER/NAME) in `train_files` under [data]";
            let reason = match Path::new(file).extension().is_some() {
                true => format!("there is no file {file} yet"),
                false => format!("`{file}` is no file here; {what}"),
            };
            self.refuse(path, &reason);
        }
    }

    fn set(&mut self, path: &'static str, value: Value) {
        self.settings.push((path, value));
    }
}
