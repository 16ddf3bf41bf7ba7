//! The splits that a data set's card (README.md) names under `configs` in its front matter, read like in the library `datasets`.

use std::path::Path;

use ottava_common::input;
use ottava_recipe::glob;

/// The maximum size of a card in bytes. Larger cards are ignored.
const MAX_BYTES: u64 = 8 << 20;

/// The files of a data set, by split.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Card {
    /// The name of the configuration.
    name: String,
    is_default: bool,
    /// The names of splits, each with a pattern of paths in the folder.
    files: Vec<(String, String)>,
}

impl Card {
    /// Returns the split of the file at `path` in the folder.
    pub(super) fn split_of(&self, path: &Path) -> Option<&str> {
        let path = path.to_string_lossy();
        let fits = |pattern: &str| {
            let pattern = pattern.trim_start_matches("./").trim_end_matches('/');
            glob(&pattern.replace("**/", "*"), &path)
                || path.strip_prefix(pattern).is_some_and(|rest| rest.starts_with('/'))
        };
        self.files.iter().find(|(_, pattern)| fits(pattern)).map(|(split, _)| split.as_str())
    }
}

/// Reads the card of `folder`; `None` if there is no card that names files. Errors if the card has several configurations and none of them is the
/// default.
pub(super) fn read(folder: &Path) -> Result<Option<Card>, String> {
    let text = input::read(&folder.join("README.md"), MAX_BYTES).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    let mut cards = text.map_or_else(Vec::new, |text| parse(&text));
    cards.retain(|card| !card.files.is_empty());
    match cards.iter().position(|card| card.is_default || card.name == "default") {
        Some(default) => Ok(Some(cards.swap_remove(default))),
        None if cards.len() < 2 => Ok(cards.pop()),
        None => {
            let names: Vec<String> = cards.iter().map(|card| format!("`{}`", card.name)).collect();
            Err(format!(
                "its README.md names the configurations {}; name the files of one of them by a pattern",
                names.join(", ")
            ))
        }
    }
}

/// Parses the configurations in the front matter of a card. Only the layout that `datasets` and the Hub write is supported.
fn parse(text: &str) -> Vec<Card> {
    let Some(front) = text.strip_prefix("---").and_then(|rest| rest.split_once("\n---")).map(|(front, _)| front) else {
        return Vec::new();
    };
    let lines = front.lines().skip_while(|line| line.trim_end() != "configs:").skip(1);
    let lines = lines.take_while(|line| line.starts_with([' ', '-']) || line.trim().is_empty());
    let (mut cards, mut split): (Vec<Card>, String) = (Vec::new(), "train".into());
    for line in lines {
        let entry = line.trim().trim_start_matches("- ").trim();
        let (key, value) = entry.split_once(':').map_or(("", entry), |(key, value)| (key.trim(), value));
        let values = value.trim().trim_matches(['[', ']']).split(',');
        let mut values =
            values.map(|value| value.trim().trim_matches(['"', '\'']).to_string()).filter(|value| !value.is_empty());
        match (key, cards.last_mut()) {
            ("config_name", _) => {
                cards.push(Card { name: values.next().unwrap_or_default(), ..Card::default() });
                split = "train".into();
            }
            ("default", Some(card)) => card.is_default = values.next().as_deref() == Some("true"),
            ("split", _) => split = values.next().unwrap_or_default(),
            ("path" | "data_files" | "", Some(card)) => card.files.extend(values.map(|path| (split.clone(), path))),
            _ => {}
        }
    }
    cards
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configurations_of_cards_name_files() {
        let text = "---\nlicense: mit\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: \"data/train-*\"\n  - split: test\n    \
                    path:\n    - a.jsonl\n    - b\ntags:\n- x\n---\n# Otters\n";
        let [card] = parse(text).try_into().unwrap();
        for (path, split) in [
            ("data/train-00000.parquet", Some("train")),
            ("a.jsonl", Some("test")),
            ("b/c.jsonl", Some("test")),
            ("c.jsonl", None),
        ] {
            assert_eq!(card.split_of(Path::new(path)), split, "{path}");
        }
        let several = "---\nconfigs:\n- config_name: en\n  data_files: en/*.jsonl\n- config_name: fr\n  data_files: [\"fr/a.jsonl\", 'fr/b.jsonl']\n---\n";
        assert_eq!(
            parse(several)[1].files,
            [("train".into(), "fr/a.jsonl".into()), ("train".into(), "fr/b.jsonl".into())]
        );
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("README.md"), several).unwrap();
        assert!(read(folder.path()).unwrap_err().contains("the configurations `en`, `fr`"));
        std::fs::write(folder.path().join("README.md"), several.replace("fr\n", "fr\n  default: true\n")).unwrap();
        assert_eq!(read(folder.path()).unwrap().unwrap().name, "fr");
        assert!(parse("# Otters").is_empty() && parse("---\nconfigs:\n---\n").is_empty());
    }
}
