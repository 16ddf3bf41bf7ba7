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

use ottava_settings::RunConfig;

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

/// Warns about old names of keys, and about settings without effect.
pub fn warn_of_settings(config: &RunConfig, old_keys: Option<String>) {
    for text in old_keys.into_iter().chain(config.without_effect()) {
        tracing::warn!("{text}");
    }
}

/// Formats `value` as indented JSON that ends with a newline.
pub fn pretty(value: &serde_json::Value) -> String {
    serde_json::to_string_pretty(value).expect("values are plain data") + "\n"
}

/// Writes `text` to a new file. Errors if the file exists.
pub fn write_new(path: &std::path::Path, text: &str) -> ottava_common::Result<()> {
    let written =
        std::fs::File::create_new(path).and_then(|mut file| std::io::Write::write_all(&mut file, text.as_bytes()));
    written.map_err(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => ottava_common::Error::Config(format!(
            "{}: the file exists, and is not overwritten; name another one with --output",
            path.display()
        )),
        _ => ottava_common::Error::Config(format!("{}: {error}", path.display())),
    })
}
