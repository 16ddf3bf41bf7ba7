//! One file per command: its arguments, its help, and the few lines that call the library.

pub mod average;
pub mod bench;
pub mod calibrate;
pub mod chat;
mod chat_input;
pub mod compare;
pub mod completions;
pub mod config;
pub mod convert;
mod decoding;
mod disk;
pub mod doctor;
pub mod download;
mod endpoint;
pub mod eval;
mod eval_output;
mod eval_tasks;
pub mod export;
pub mod generate;
pub mod import;
mod inference;
pub mod init;
pub mod inspect;
pub mod logits;
mod lora_modules;
pub mod man;
pub mod merge;
mod model_card;
mod model_links;
pub mod monitor;
mod newest;
pub mod plan;
mod plan_data;
mod plan_hosts;
mod plan_verdict;
pub mod prepare;
mod prompts;
mod public_settings;
pub mod push;
mod remote;
mod remote_objects;
mod remote_shards;
mod sampling_flags;
pub mod schema;
pub mod serve;
mod text;
pub mod train;

use ottava_common::{Error, Result};
use ottava_settings::RunConfig;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::Path;

/// The maximum count on the command line.
const MAX_COUNT: usize = 1 << 24;

/// Parses a count of at least 1.
pub fn count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count @ 1..=MAX_COUNT) => Ok(count),
        _ => Err(format!("expected a number of at least 1 and at most {MAX_COUNT}")),
    }
}

/// Parses a number of at least 1.
pub fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("expected a number of at least 1".into()),
        Ok(number) => Ok(number),
    }
}

/// Warns about old names of keys, about settings without effect, and about a learning rate that trains no model.
pub fn warn_of_settings(config: &RunConfig, old_keys: Option<String>) {
    for text in old_keys.into_iter().chain(config.without_effect()).chain(config.optimizer.large_learning_rate()) {
        tracing::warn!("{text}");
    }
}

/// Formats `value` as indented JSON that ends with a newline.
pub fn pretty(value: &serde_json::Value) -> String {
    serde_json::to_string_pretty(value).expect("values are plain data") + "\n"
}

/// Writes `text` to a new file. Errors if the file exists.
pub fn write_new(path: &Path, text: &str) -> Result<()> {
    let written = File::create_new(path).and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => exists(path),
        _ => Error::Config(format!("{}: {error}", path.display())),
    })
}

/// Errors if [`write_new`] cannot write the file `path`, so that a command does not fail after its work.
pub fn expect_new(path: &Path) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new(""));
    match path.symlink_metadata().is_ok() {
        true => Err(exists(path)),
        false if !disk::is_writable(folder) => Err(Error::Config(format!(
            "{}: its folder does not exist or cannot be written to; name another file with --output",
            path.display()
        ))),
        false => Ok(()),
    }
}

fn exists(path: &Path) -> Error {
    Error::Config(format!(
        "{}: the file exists, and is not overwritten; name another one with --output",
        path.display()
    ))
}
