//! `ottava prepare`.

use crate::output::{print_json, stop_on_signals};
use clap::Args;
use ottava_lm::Result;
use ottava_lm::config::RunConfig;
use ottava_lm::data::{Tokenizer, write_megatron};
use serde_json::json;
use std::path::PathBuf;

/// Tokenize a run's data ahead of time; `train` does it on first use.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava prepare configs/quickstart.toml
  ottava prepare run.toml --megatron corpus_text_document")]
pub struct Prepare {
    /// The run's TOML file.
    config: PathBuf,
    /// Override a setting: `table.key=VALUE`, or `key=VALUE` if only one table has the key.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// Also write the tokens for Megatron-LM, as PREFIX.bin and PREFIX.idx.
    #[arg(long, value_name = "PREFIX")]
    megatron: Option<PathBuf>,
    /// Print one JSON object with `documents`, `tokens` and `bytes`.
    #[arg(long)]
    json: bool,
}

impl Prepare {
    pub fn run(self) -> Result<()> {
        stop_on_signals("stopping")?;
        let config = RunConfig::load(&self.config, &self.settings)?;
        let tokenizer = Tokenizer::load(config.model.tokenizer_path())?;
        let (data, _) = config.prepare_data(&tokenizer)?;
        if let Some(prefix) = &self.megatron {
            write_megatron(&data, prefix)?;
        }
        let (documents, tokens, bytes) = (data.len(), data.total_tokens(), data.total_bytes());
        match self.json {
            true => print_json(&json!({"documents": documents, "tokens": tokens, "bytes": bytes})),
            false => out!(
                "{documents} documents, {tokens} tokens, {bytes} bytes of text, in {}",
                config.cache_dir().display()
            ),
        }
        Ok(())
    }
}
