//! The file of DeepSpeed that another trainer's file names.

use ottava_common::input;
use ottava_common::yaml::Yaml;
use serde_json::{Map, Value as Json};
use std::path::{Path, PathBuf};

/// The key of transformers, Axolotl and LLaMA-Factory that names the file, and the table that gets its keys.
const KEY: &str = "deepspeed";

/// The table of Accelerate with a key that names the file.
const OF_ACCELERATE: (&str, &str) = ("deepspeed_config", "deepspeed_config_file");

/// Replaces the name of DeepSpeed's file in `table`, of the file at `path`, by the table in the file, of at most `max_bytes`. A name without a
/// file stays.
///
/// Errors with the reason if the named file cannot be read.
pub(super) fn read_into(table: &mut Map<String, Json>, path: &Path, max_bytes: u64) -> Result<(), String> {
    let of_accelerate = table.get(OF_ACCELERATE.0).and_then(|config| config.get(OF_ACCELERATE.1));
    let Some(name) = table.get(KEY).or(of_accelerate).and_then(Json::as_str) else { return Ok(()) };
    let Some(file) = find(name, path) else { return Ok(()) };
    let wrong = |reason: String| format!("`{KEY}` names {}: {reason}", file.display());
    let text = input::read_text(&file, max_bytes).map_err(|error| wrong(error.to_string()))?;
    let read = Yaml::parse(&text).map_err(|error| wrong(format!("this is not JSON: {error}")))?;
    if let Some(config) = table.get_mut(OF_ACCELERATE.0).and_then(Json::as_object_mut) {
        config.remove(OF_ACCELERATE.1);
    }
    table.insert(KEY.into(), Json::Object(read.table));
    Ok(())
}

/// Finds the file `name`, which the file at `path` names: in the working folder, or in a folder above `path`, since trainers start at the root of
/// their repositories.
fn find(name: &str, path: &Path) -> Option<PathBuf> {
    let above = path.ancestors().skip(1).map(|folder| folder.join(name));
    std::iter::once(PathBuf::from(name)).chain(above).find(|file| file.is_file())
}

/// Whether `path` is a key of DeepSpeed's table `fp16` or `bf16` that is not switched on. The value "auto" of the switch is the value of the key with
/// the name of the table at the top of the trainer's file, which has the keys of `table`.
pub(super) fn is_switched_off(path: &str, table: &Map<String, Json>) -> bool {
    let mut parts: Vec<&str> = path.split('.').collect();
    let (Some(key), Some(name)) = (parts.pop(), parts.last().copied()) else { return false };
    if key == "enabled" || !["fp16", "bf16"].contains(&name) {
        return false;
    }
    let (first, rest) = (parts[0], &parts[1..]);
    let inner = rest.iter().try_fold(table.get(first), |inner, part| Some(inner?.get(*part))).flatten();
    match inner.and_then(|inner| inner.get("enabled")) {
        Some(Json::String(auto)) if auto == "auto" => table.get(name) != Some(&Json::Bool(true)),
        enabled => enabled != Some(&Json::Bool(true)),
    }
}
