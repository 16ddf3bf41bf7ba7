//! The files of a split of a data set, by the rules of the library `datasets`.

use crate::glob;
use ottava_common::yaml::Yaml;
use serde_json::Value;
use std::collections::BTreeMap;

/// Endings of files with data, before an ending of compression.
const ENDINGS: [&str; 8] = [".parquet", ".arrow", ".jsonl", ".json", ".csv", ".tsv", ".txt", ".md"];

/// Files that describe a data set.
const DESCRIPTIONS: [&str; 5] =
    ["README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"];

/// Words in names of files and folders, with the split that they mean.
const WORDS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "dev", "val"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];

/// The beginning of the name of a folder with the beginning of a split.
const PARTIAL: &str = "partial-";

/// The files that were chosen.
#[derive(Debug, PartialEq)]
pub(crate) enum Choice {
    /// Their paths, sorted.
    Files(Vec<String>),
    /// The repository has no file of a kind that is read.
    NoneReadable,
}

/// A configuration of a data set.
struct Config {
    name: String,
    is_default: bool,
    files: Files,
}

/// The files of a configuration.
enum Files {
    /// The patterns of each split.
    Patterns(Vec<(String, Vec<String>)>),
    /// A folder, with a slash at the end. The names of its files say the splits.
    Folder(String),
}

/// Chooses among `paths`: the files of `pattern`, or else of the first split of `wanted` that the configuration
/// `config` has. `card` is the README.md.
///
/// Errors with the reason, and with the names that exist.
pub(crate) fn choose(
    paths: &[&str],
    card: Option<&str>,
    pattern: &str,
    config: Option<&str>,
    wanted: &[&str],
) -> Result<Choice, String> {
    if !pattern.is_empty() {
        let folder = format!("{}/**", pattern.trim_end_matches('/'));
        let fits = |path: &str| glob::matches(pattern, path) || glob::matches(&folder, path) && is_data(path);
        let found: Vec<String> = paths.iter().filter(|path| fits(path)).map(|path| path.to_string()).collect();
        return match found.is_empty() {
            true => Err(format!("no file has a name of the pattern {pattern}; it has {}", examples(paths))),
            false => Ok(Choice::Files(sorted(found))),
        };
    }
    let data: Vec<&str> = paths.iter().copied().filter(|path| is_data(path)).collect();
    if data.is_empty() {
        return Ok(Choice::NoneReadable);
    }
    let configs = card.map_or(Ok(Vec::new()), configs)?;
    let splits = match (configs.is_empty(), config) {
        (false, name) => of_config(&configs, name, &data)?,
        (true, Some(name)) => of_folder(name, &data)?,
        (true, None) => by_names(&data),
    };
    of_wanted(&splits, wanted).map(Choice::Files)
}

/// Returns the files of the first split of `wanted` that exists. Errors with the names of the splits.
fn of_wanted(splits: &Splits, wanted: &[&str]) -> Result<Vec<String>, String> {
    match wanted.iter().find_map(|split| splits.get(*split)) {
        Some(files) => Ok(sorted(files.iter().map(|path| path.to_string()).collect())),
        None => {
            let quoted = |names: Vec<&str>| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>();
            let (wanted, names) = (quoted(wanted.to_vec()), quoted(splits.keys().map(String::as_str).collect()));
            let (wanted, names) = (wanted.join(" or "), names.join(", "));
            Err(format!("there is no split {wanted}; the splits are {names}; choose one with ?split=NAME"))
        }
    }
}

fn sorted(mut paths: Vec<String>) -> Vec<String> {
    paths.sort();
    paths.dedup();
    paths
}

fn examples(paths: &[&str]) -> String {
    let more = if paths.len() > 5 { format!(" and {} more", paths.len() - 5) } else { String::new() };
    format!("{}{more}", paths[..paths.len().min(5)].join(", "))
}

/// Whether a file has data of a kind that is read.
fn is_data(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let plain = name.strip_suffix(".gz").or(name.strip_suffix(".zst")).unwrap_or(name);
    let is_hidden = path.split('/').any(|part| part.starts_with(['.', '_']));
    !is_hidden && !DESCRIPTIONS.contains(&name) && ENDINGS.iter().any(|ending| plain.ends_with(ending))
}

type Splits<'a> = BTreeMap<String, Vec<&'a str>>;

/// Returns the splits of the configuration with this name; without a name, of the only configuration or the default.
fn of_config<'a>(configs: &[Config], name: Option<&str>, data: &[&'a str]) -> Result<Splits<'a>, String> {
    let names = || configs.iter().map(|config| format!("`{}`", config.name)).collect::<Vec<_>>().join(", ");
    let chosen = match name {
        Some(name) => configs
            .iter()
            .find(|config| config.name == name)
            .ok_or_else(|| format!("there is no configuration `{name}`; there are {}", names()))?,
        None => match configs {
            [only] => only,
            all => all
                .iter()
                .find(|config| config.is_default)
                .or(all.iter().find(|config| config.name == "default"))
                .ok_or_else(|| {
                format!("it has several configurations: {}; choose one with ?config=NAME", names())
            })?,
        },
    };
    let splits = match &chosen.files {
        Files::Patterns(splits) => of_patterns(splits, data),
        Files::Folder(folder) => within(folder, data),
    };
    match splits.is_empty() {
        true => Err(format!("no file of a kind that is read belongs to the configuration `{}`", chosen.name)),
        false => Ok(splits),
    }
}

/// Returns the splits whose patterns match a file.
fn of_patterns<'a>(patterns: &[(String, Vec<String>)], data: &[&'a str]) -> Splits<'a> {
    let mut splits = Splits::new();
    for (split, patterns) in patterns {
        let fits = |path: &&str| patterns.iter().any(|pattern| glob::matches(pattern, path));
        splits.entry(split.clone()).or_default().extend(data.iter().copied().filter(fits));
    }
    splits.retain(|_, files| !files.is_empty());
    splits
}

/// Returns the splits of the files in `folder` (with a slash at the end), by their names below this folder.
fn within<'a>(folder: &str, data: &[&'a str]) -> Splits<'a> {
    let inside: Vec<&str> = data.iter().filter_map(|path| path.strip_prefix(folder)).collect();
    let full = |name: &str| data.iter().copied().find(|path| path.strip_prefix(folder) == Some(name));
    let splits = if inside.is_empty() { Splits::new() } else { by_names(&inside) };
    splits.into_iter().map(|(split, names)| (split, names.into_iter().filter_map(full).collect())).collect()
}

/// Returns the splits of the files in a folder, which is the configuration of a data set without a list of configurations.
fn of_folder<'a>(name: &str, data: &[&'a str]) -> Result<Splits<'a>, String> {
    let splits = within(&format!("{name}/"), data);
    match splits.is_empty() {
        true => Err(format!("its README.md lists no configurations, and it has no folder `{name}`")),
        false => Ok(splits),
    }
}

/// Chooses among the `paths` of a Parquet copy, which are `CONFIG/SPLIT/FILE`: the first split of `wanted` that the configuration `config` has. Without
/// `config`, it is the only configuration, or `default`. The Hub copies only the beginning of a large split, to `CONFIG/partial-SPLIT/`.
///
/// Errors with the names of configurations or splits that exist.
pub(crate) fn choose_copy(paths: &[&str], config: Option<&str>, wanted: &[&str]) -> Result<Vec<String>, String> {
    let mut configs: BTreeMap<&str, Splits> = BTreeMap::new();
    for path in paths.iter().filter(|path| is_data(path)) {
        if let [config, split, _] = path.split('/').collect::<Vec<_>>()[..] {
            let split = split.strip_prefix(PARTIAL).unwrap_or(split).to_string();
            configs.entry(config).or_default().entry(split).or_default().push(path);
        }
    }
    let names = configs.keys().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let splits = match (config, configs.len()) {
        (Some(name), _) => {
            configs.get(name).ok_or_else(|| format!("there is no configuration `{name}`; there are {names}"))?
        }
        (None, 0) => return Err("its Parquet copy has no files".into()),
        (None, 1) => configs.values().next().expect("there is one"),
        (None, _) => configs
            .get("default")
            .ok_or_else(|| format!("it has several configurations: {names}; choose one with ?config=NAME"))?,
    };
    of_wanted(splits, wanted)
}

/// Whether a file of a Parquet copy is from the beginning of a split only.
pub(crate) fn is_partial(path: &str) -> bool {
    path.split('/').any(|part| part.starts_with(PARTIAL))
}

/// Returns splits by the names of files: `data/SPLIT-00000-of-00001*`, else words in folders, else words in names. Without such names, all files are
/// of the split `train`.
fn by_names<'a>(data: &[&'a str]) -> Splits<'a> {
    let mut splits = Splits::new();
    let rules: [fn(&str) -> Option<String>; 3] = [
        shard_split,
        |path| path.rsplit_once('/').and_then(|(folder, _)| word_split(folder)),
        |path| word_split(path.rsplit('/').next().unwrap_or(path)),
    ];
    for rule in rules {
        for path in data {
            if let Some(split) = rule(path) {
                splits.entry(split).or_default().push(path);
            }
        }
        if !splits.is_empty() {
            return splits;
        }
    }
    Splits::from([("train".to_string(), data.to_vec())])
}

/// Returns the split of `data/SPLIT-00000-of-00001*`.
fn shard_split(path: &str) -> Option<String> {
    let name = path.strip_prefix("data/").filter(|name| !name.contains('/'))?;
    let (start, rest) = name.split_once("-of-")?;
    let (split, number) = start.rsplit_once('-')?;
    let is_number = |text: &str| text.len() >= 5 && text.bytes().take(5).all(|byte| byte.is_ascii_digit());
    (is_number(number) && is_number(rest) && !split.is_empty()).then(|| split.to_string())
}

/// Returns the split whose word is in `text`, between characters that are no letters.
fn word_split(text: &str) -> Option<String> {
    let words: Vec<&str> = text.split(|c: char| !c.is_ascii_alphabetic()).collect();
    let found = WORDS.iter().find(|(_, known)| known.iter().any(|word| words.contains(word)));
    found.map(|(split, _)| split.to_string())
}

/// Reads `configs` of the YAML at the beginning of a README.md. Errors with the reason if the YAML lists configurations and cannot be read.
fn configs(card: &str) -> Result<Vec<Config>, String> {
    let card = card.replace("\r\n", "\n");
    let Some(header) = card.strip_prefix("---\n").and_then(|rest| rest.split("\n---").next()) else {
        return Ok(Vec::new());
    };
    match Yaml::parse(header) {
        Ok(yaml) => Ok(yaml.table.get("configs").and_then(Value::as_array).into_iter().flatten().map(config).collect()),
        Err(_) if !header.lines().any(|line| line.starts_with("configs:")) => Ok(Vec::new()),
        Err(why) => Err(format!(
            "the configurations in its README.md cannot be read: {why}; name its files, as in \
             hf://datasets/OWNER/NAME/data/*.parquet"
        )),
    }
}

/// Reads a name or a pattern. YAML reads a name such as `2024` as a number.
fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

fn config(entry: &Value) -> Config {
    let name = text(&entry["config_name"]).unwrap_or_else(|| "default".into());
    let folder = text(&entry["data_dir"]).map(|folder| folder.trim_start_matches("./").trim_matches('/').to_string());
    let folder = folder.filter(|folder| !folder.is_empty()).map_or(String::new(), |folder| format!("{folder}/"));
    let patterns = |paths: &Value| -> Vec<String> {
        let texts = match paths {
            Value::Array(texts) => texts.iter().filter_map(text).collect(),
            one => text(one).into_iter().collect::<Vec<_>>(),
        };
        texts.into_iter().map(|text| format!("{folder}{text}")).collect()
    };
    let files = match &entry["data_files"] {
        Value::Null => Files::Folder(folder),
        Value::Array(list) if list.iter().any(Value::is_object) => Files::Patterns(
            list.iter().filter_map(|item| Some((text(&item["split"])?, patterns(&item["path"])))).collect(),
        ),
        Value::Object(splits) => {
            Files::Patterns(splits.iter().map(|(split, paths)| (split.clone(), patterns(paths))).collect())
        }
        files => Files::Patterns(vec![("train".to_string(), patterns(files))]),
    };
    Config { name, is_default: entry["default"] == true, files }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(paths: &[&str], card: Option<&str>, config: Option<&str>, split: &str) -> Result<Vec<String>, String> {
        match choose(paths, card, "", config, &[split])? {
            Choice::Files(files) => Ok(files),
            Choice::NoneReadable => Err("none".into()),
        }
    }

    #[test]
    fn splits_follow_from_names() {
        let shards = [
            "README.md",
            "data/train-00000-of-00002.parquet",
            "data/train-00001-of-00002-abc.parquet",
            "data/test_sft-00000-of-00001.parquet",
        ];
        assert_eq!(files(&shards, None, None, "train").unwrap(), shards[1..3]);
        assert_eq!(files(&shards, None, None, "test_sft").unwrap(), shards[3..]);
        let error = files(&shards, None, None, "validation").unwrap_err();
        assert!(error.contains("`test_sft`") && error.contains("`train`"), "{error}");
        let folders = ["train/a.csv", "dev/a.csv"];
        assert_eq!(files(&folders, None, None, "validation").unwrap(), ["dev/a.csv"]);
        let named = ["my_train.jsonl", "my-eval.jsonl.gz", "dataset_infos.json"];
        assert_eq!(files(&named, None, None, "test").unwrap(), ["my-eval.jsonl.gz"]);
        // `trainable` is no word of a split.
        assert_eq!(files(&["a.json", "trainable.json"], None, None, "train").unwrap(), ["a.json", "trainable.json"]);
        assert_eq!(choose(&["script.py", "x.zip"], None, "", None, &["train"]), Ok(Choice::NoneReadable));
    }

    #[test]
    fn configurations_follow_from_the_card() {
        let card = "---\nlicense: mit\nconfigs:\n- config_name: en\n  data_files:\n  - split: train\n    path: en/*.parquet\n  - split: test\n    path:\n    - en-test/*.parquet\n- config_name: de\n  data_dir: de\n---\n# Text";
        let paths = ["README.md", "en/0.parquet", "en/1.parquet", "en-test/0.parquet", "de/0.parquet"];
        assert_eq!(files(&paths, Some(card), Some("en"), "train").unwrap(), ["en/0.parquet", "en/1.parquet"]);
        assert_eq!(files(&paths, Some(card), Some("en"), "test").unwrap(), ["en-test/0.parquet"]);
        assert_eq!(files(&paths, Some(card), Some("de"), "train").unwrap(), ["de/0.parquet"]);
        let error = files(&paths, Some(card), None, "train").unwrap_err();
        assert!(error.contains("`en`, `de`") && error.contains("?config="), "{error}");
        assert!(files(&paths, Some(card), Some("fr"), "train").unwrap_err().contains("`fr`"));
        let default = card.replace("data_dir: de", "data_dir: de\n  default: true");
        assert_eq!(files(&paths, Some(&default), None, "train").unwrap(), ["de/0.parquet"]);
    }

    #[test]
    fn a_folder_of_a_card_is_divided_by_its_names() {
        let card = "---\r\nconfigs:\r\n- config_name: 2024\r\n  data_dir: ./de/\r\n- config_name: x\r\n  data_files:\r\n    dev: x/*\r\n---\r\n";
        let paths = ["de/train.csv", "de/test.csv", "de/data/more.csv", "train.csv", "x/1.csv"];
        assert_eq!(files(&paths, Some(card), Some("2024"), "train").unwrap(), ["de/train.csv"]);
        assert_eq!(files(&paths, Some(card), Some("2024"), "test").unwrap(), ["de/test.csv"]);
        assert_eq!(files(&paths, Some(card), Some("x"), "dev").unwrap(), ["x/1.csv"]);
        let shards = ["de/data/train-00000-of-00001.csv", "de/data/extra-00000-of-00001.csv"];
        assert_eq!(files(&shards, Some(card), Some("2024"), "extra").unwrap(), shards[1..]);
    }

    #[test]
    fn a_card_cannot_grow_and_its_faults_are_told() {
        let bomb = "---\na: &a [x, x]\nb: &b [*a, *a]\nconfigs:\n- config_name: c\n  data_files: *b\n---\n";
        let error = files(&["a.csv"], Some(bomb), None, "train").unwrap_err();
        assert!(error.contains("alias") && error.contains("hf://datasets/"), "{error}");
        // Other parts of a card do not matter here.
        let other = "---\na: &a 1\nb: *a\n---\n";
        assert_eq!(files(&["a.csv"], Some(other), None, "train").unwrap(), ["a.csv"]);
    }

    #[test]
    fn a_parquet_copy_has_configurations_and_splits() {
        let one = ["en/train_sft/0000.parquet", "en/train_sft/0001.parquet", "en/partial-test/0000.parquet"];
        let chosen = |paths: &[&str], config, split| choose_copy(paths, config, &[split]);
        assert_eq!(chosen(&one, None, "train_sft").unwrap(), one[..2]);
        assert_eq!(chosen(&one, None, "test").unwrap(), one[2..]);
        assert!(is_partial(one[2]) && !is_partial(one[0]));
        let two = ["de/train/0000.parquet", "en/train/0000.parquet"];
        let error = chosen(&two, None, "train").unwrap_err();
        assert!(error.contains("`de`, `en`") && error.contains("?config="), "{error}");
        assert_eq!(chosen(&two, Some("de"), "train").unwrap(), two[..1]);
        assert!(chosen(&two, Some("fr"), "train").unwrap_err().contains("`fr`"));
        assert!(chosen(&two, Some("de"), "test").unwrap_err().contains("`train`"));
        let default = ["default/train/0000.parquet", "en/train/0000.parquet"];
        assert_eq!(chosen(&default, None, "train").unwrap(), default[..1]);
    }

    #[test]
    fn patterns_name_files_or_folders() {
        let paths = ["data/a.jsonl", "data/b.txt", "other/c.jsonl", "data/script.py"];
        let chosen = |pattern| choose(&paths, None, pattern, None, &["train"]);
        assert_eq!(chosen("data/*.jsonl"), Ok(Choice::Files(vec!["data/a.jsonl".into()])));
        assert_eq!(chosen("data"), Ok(Choice::Files(vec!["data/a.jsonl".into(), "data/b.txt".into()])));
        assert!(chosen("x*").unwrap_err().contains("data/a.jsonl"));
    }
}
