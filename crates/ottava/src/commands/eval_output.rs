//! The file of `ottava eval --output`.

use ottava_common::fs::{RealFs, parent, replace_file};
use ottava_common::{Error, Result};
use serde::Serialize;
use std::path::Path;

/// Errors if `path` cannot be the file of samples, before the model computes for hours.
pub(super) fn check_output(path: &Path) -> Result<()> {
    if path.is_dir() || path.file_name().is_none() {
        return Err(Error::Config(format!("--output {}: this is a folder; name a file", path.display())));
    }
    match parent(path).is_dir() {
        true => Ok(()),
        false => Err(Error::Config(format!(
            "--output {}: there is no folder {}; make it, or name another file",
            path.display(),
            parent(path).display()
        ))),
    }
}

/// Writes a line of JSON for each of `rows` to the file `path`.
pub(super) fn write_lines<T: Serialize>(path: &Path, rows: impl IntoIterator<Item = T>) -> Result<()> {
    let mut text = String::new();
    for row in rows {
        text += &(serde_json::to_string(&row).expect("a row is written without fail") + "\n");
    }
    replace_file(&RealFs, path, text.as_bytes())
}
