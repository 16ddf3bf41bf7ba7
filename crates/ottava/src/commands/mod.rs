//! One file per command: its arguments, its help, and the few lines that call the library.

pub mod bench;
mod bench_decode;
pub mod calibrate;
pub mod chat;
pub mod convert;
pub mod doctor;
pub mod eval;
pub mod export;
pub mod generate;
mod inference;
pub mod inspect;
pub mod merge;
pub mod plan;
pub mod prepare;
mod prompts;
pub mod serve;
mod text;
pub mod train;

use ottava_lm::config::RunConfig;

/// The largest count on the command line.
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

/// Warns of settings without effect.
pub fn warn_of_settings(config: &RunConfig) {
    for text in config.without_effect() {
        tracing::warn!("{text}");
    }
}
