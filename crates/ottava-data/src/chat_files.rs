//! The files of a folder that have chat templates, and the special tokens that templates write by name.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::edges::read_json;
use ottava_common::{Error, Result, input};

/// The maximum size of a template file in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The maximum number of files in `additional_chat_templates`.
const MAX_TEMPLATES: usize = 64;

/// The tokens of `tokenizer_config.json` that templates write by name.
const SPECIAL_TOKENS: [&str; 8] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "additional_special_tokens",
];

/// The chat templates of a folder.
pub(super) struct Found {
    /// The file of the template named `default`.
    pub(super) path: PathBuf,
    /// The names and the texts of the templates.
    pub(super) templates: Vec<(String, String)>,
}

/// Finds the templates of `folder`, or the template in the file `other`.
///
/// The template named `default` is read from the first of `chat_template.jinja`, `tokenizer_config.json` and `chat_template.json` that has one. A
/// JSON file has one text, or a list or an object of named texts. `additional_chat_templates/NAME.jinja` has the template of this name, and overrides
/// a template of the same name in a JSON file. Returns `None` if there are no templates. Errors with [`Error::Model`] if no template is named
/// `default`.
pub(super) fn find(folder: &Path, other: Option<&Path>) -> Result<Option<Found>> {
    let default = |path: PathBuf| Ok(Some(Found { templates: vec![("default".into(), read(&path)?)], path }));
    if let Some(other) = other {
        return default(other.to_path_buf());
    }
    let mut found = match folder.join("chat_template.jinja") {
        own if own.exists() => default(own)?,
        _ => match in_json(&folder.join("tokenizer_config.json"))? {
            None => in_json(&folder.join("chat_template.json"))?,
            found => found,
        },
    };
    let more = additional(&folder.join("additional_chat_templates"))?;
    if let Some((path, _, _)) = more.first() {
        let found = found.get_or_insert_with(|| Found { path: path.clone(), templates: Vec::new() });
        for (_, name, text) in &more {
            found.templates.retain(|(known, _)| known != name);
            found.templates.push((name.clone(), text.clone()));
        }
    }
    match &found {
        Some(Found { path, templates }) if !templates.iter().any(|(name, _)| name == "default") => Err(wrong(
            path,
            "`chat_template` is neither a text nor a list with a template named `default`; add chat_template.jinja",
        )),
        _ => Ok(found),
    }
}

fn wrong(path: &Path, reason: impl std::fmt::Display) -> Error {
    Error::Model(format!("{}: {reason}", path.display()))
}

fn read(path: &Path) -> Result<String> {
    let bytes = input::read(path, MAX_FILE_BYTES).map_err(|error| wrong(path, error))?;
    String::from_utf8(bytes).map_err(|_| wrong(path, "it is not UTF-8"))
}

/// Reads the templates in `chat_template` of a JSON file.
fn in_json(path: &Path) -> Result<Option<Found>> {
    let templates = match read_json(path)?.get("chat_template") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) => vec![("default".to_string(), text.clone())],
        Some(Value::Array(list)) => {
            let named = |entry: &Value| Some((entry["name"].as_str()?.into(), entry["template"].as_str()?.into()));
            list.iter().map(named).collect::<Option<Vec<_>>>().unwrap_or_default()
        }
        Some(Value::Object(named)) => {
            let text = |(name, text): (&String, &Value)| Some((name.clone(), text.as_str()?.to_string()));
            named.iter().map(text).collect::<Option<Vec<_>>>().unwrap_or_default()
        }
        Some(_) => Vec::new(),
    };
    Ok(Some(Found { path: path.to_path_buf(), templates }))
}

/// Returns the files of `folder`, each with the name and the text of its template.
fn additional(folder: &Path) -> Result<Vec<(PathBuf, String, String)>> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(Vec::new()) };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "jinja"));
    paths.sort();
    if paths.len() > MAX_TEMPLATES {
        return Err(wrong(folder, format!("it has more than {MAX_TEMPLATES} templates")));
    }
    let named = |path: PathBuf| {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        read(&path).map(|text| (path, name, text))
    };
    paths.into_iter().map(named).collect()
}

/// Returns the special tokens that templates write by name.
pub(super) fn special_tokens(folder: &Path) -> Result<Map<String, Value>> {
    let mut special_tokens = Map::new();
    for file in ["tokenizer_config.json", "special_tokens_map.json"] {
        let source = read_json(&folder.join(file))?;
        for key in SPECIAL_TOKENS {
            let value = source.get(key).map(|value| value.get("content").unwrap_or(value));
            if let Some(value) = value.filter(|value| !value.is_null() && !special_tokens.contains_key(key)) {
                special_tokens.insert(key.into(), value.clone());
            }
        }
    }
    Ok(special_tokens)
}
