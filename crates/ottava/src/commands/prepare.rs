//! `ottava prepare`.

use crate::output::{print_json, stop_on_signals};
use clap::Args;
use ottava_lm::Result;
use ottava_lm::config::RunConfig;
use ottava_lm::data::{DataSet, Tokenizer, write_megatron};
use serde_json::json;
use std::path::PathBuf;

/// Tokenize a run's data ahead of time, which `train` does on first use; checks tokens that were prepared before.
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
    /// Also write the tokens for Megatron-LM, as PREFIX.bin and PREFIX.idx, or of several data sets as PREFIX-NAME.bin and PREFIX-NAME.idx.
    #[arg(long, value_name = "PREFIX")]
    megatron: Option<PathBuf>,
    /// Print one JSON object with `documents`, `tokens` and `bytes`, and these three numbers for each set in `datasets`.
    #[arg(long)]
    json: bool,
}

impl Prepare {
    pub fn run(self) -> Result<()> {
        stop_on_signals("stopping")?;
        let mut config = RunConfig::load(&self.config, &self.settings)?;
        let tokenizer = Tokenizer::load(config.model.tokenizer_path())?;
        // Rows are counted for the packing of the run.
        config.resolve_data()?;
        let data = config.prepare_data(&tokenizer)?;
        let (mut counts, mut sets) = ([0, 0, 0], Vec::new());
        for (DataSet { name, dataset, .. }, share) in data.sets.iter().zip(data.shares()) {
            dataset.check()?;
            if let Some(prefix) = &self.megatron {
                let suffix = if data.sets.len() > 1 { format!("-{name}") } else { String::new() };
                write_megatron(dataset, &PathBuf::from(format!("{}{suffix}", prefix.display())))?;
            }
            let of_set = [dataset.len() as u64, dataset.total_tokens(), dataset.total_bytes()];
            (0..3).for_each(|i| counts[i] += of_set[i]);
            let [documents, tokens, bytes] = of_set;
            sets.push(json!({"name": name, "documents": documents, "tokens": tokens, "bytes": bytes, "share": share}));
            if !self.json && !name.is_empty() {
                out!(
                    "{name}: {documents} documents, {tokens} tokens, {bytes} bytes of text, {:.2} % of a run's tokens",
                    share * 100.0
                );
            }
        }
        let [documents, tokens, bytes] = counts;
        match self.json {
            true => print_json(&json!({"documents": documents, "tokens": tokens, "bytes": bytes, "datasets": sets})),
            false => out!(
                "{documents} documents, {tokens} tokens, {bytes} bytes of text, in {}",
                config.cache_dir().display()
            ),
        }
        Ok(())
    }
}
