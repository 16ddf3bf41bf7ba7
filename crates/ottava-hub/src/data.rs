//! The files of a split of a data set, by the rules of the library `datasets`.

use crate::glob;
use std::collections::BTreeMap;
use yaml_rust2::{Yaml, YamlLoader};

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

/// The files that were chosen.
#[derive(Debug, PartialEq)]
pub(crate) enum Choice {
    /// Their paths, sorted.
    Files(Vec<String>),
    /// The repository has no file of a kind that is read.
    NoneReadable,
}

/// A configuration of a data set: the patterns of each split.
struct Config {
    name: String,
    is_default: bool,
    splits: Vec<(String, Vec<String>)>,
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
    let configs = card.map(configs).unwrap_or_default();
    let splits = match (configs.is_empty(), config) {
        (false, name) => of_config(&configs, name, &data)?,
        (true, Some(name)) => of_folder(name, &data)?,
        (true, None) => by_names(&data),
    };
    match wanted.iter().find_map(|split| splits.get(*split)) {
        Some(files) => Ok(Choice::Files(sorted(files.iter().map(|path| path.to_string()).collect()))),
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
    let mut splits = Splits::new();
    for (split, patterns) in &chosen.splits {
        let fits = |path: &&str| patterns.iter().any(|pattern| glob::matches(pattern, path));
        splits.entry(split.clone()).or_default().extend(data.iter().copied().filter(fits));
    }
    splits.retain(|_, files| !files.is_empty());
    match splits.is_empty() {
        true => Err(format!("no file of a kind that is read belongs to the configuration `{}`", chosen.name)),
        false => Ok(splits),
    }
}

/// Returns the splits of the files in a folder, which is the configuration of a data set without a list of configurations.
fn of_folder<'a>(name: &str, data: &[&'a str]) -> Result<Splits<'a>, String> {
    let inside: Vec<&str> = data.iter().copied().filter(|path| path.starts_with(&format!("{name}/"))).collect();
    match inside.is_empty() {
        true => Err(format!("its README.md lists no configurations, and it has no folder `{name}`")),
        false => Ok(by_names(&inside)),
    }
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

/// Reads `configs` of the YAML at the beginning of a README.md.
fn configs(card: &str) -> Vec<Config> {
    let Some(header) = card.strip_prefix("---\n").and_then(|rest| rest.split("\n---").next()) else {
        return Vec::new();
    };
    let Ok(documents) = YamlLoader::load_from_str(header) else { return Vec::new() };
    let Some(list) = documents.first().and_then(|card| card["configs"].as_vec()) else { return Vec::new() };
    list.iter().filter_map(config).collect()
}

fn config(entry: &Yaml) -> Option<Config> {
    let name = entry["config_name"].as_str().unwrap_or("default").to_string();
    let folder = entry["data_dir"].as_str().map_or(String::new(), |dir| format!("{}/", dir.trim_matches('/')));
    let patterns = |paths: &Yaml| -> Vec<String> {
        let texts = match paths {
            Yaml::String(text) => vec![text.as_str()],
            Yaml::Array(texts) => texts.iter().filter_map(Yaml::as_str).collect(),
            _ => Vec::new(),
        };
        texts.into_iter().map(|text| format!("{folder}{text}")).collect()
    };
    let files = &entry["data_files"];
    let splits = match files {
        Yaml::Array(list) if list.iter().any(|item| item.as_hash().is_some()) => list
            .iter()
            .filter_map(|item| Some((item["split"].as_str()?.to_string(), patterns(&item["path"]))))
            .collect(),
        Yaml::BadValue if !folder.is_empty() => vec![("train".to_string(), vec![format!("{folder}**")])],
        files => vec![("train".to_string(), patterns(files))],
    };
    Some(Config { name, is_default: entry["default"].as_bool() == Some(true), splits })
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
    fn patterns_name_files_or_folders() {
        let paths = ["data/a.jsonl", "data/b.txt", "other/c.jsonl", "data/script.py"];
        let chosen = |pattern| choose(&paths, None, pattern, None, &["train"]);
        assert_eq!(chosen("data/*.jsonl"), Ok(Choice::Files(vec!["data/a.jsonl".into()])));
        assert_eq!(chosen("data"), Ok(Choice::Files(vec!["data/a.jsonl".into(), "data/b.txt".into()])));
        assert!(chosen("x*").unwrap_err().contains("data/a.jsonl"));
    }
}
