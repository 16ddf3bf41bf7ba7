//! `ottava prepare`.

use super::remote::{Reads, load_run};
use crate::output::{print_json, stop_on_signals};
use clap::Args;
use ottava_common::{Error, Result};
use ottava_data::{DataSet, Part, PreparedPart, Tokenizer, write_megatron};
use ottava_settings::Loaded;
use serde_json::json;
use std::path::PathBuf;

/// Tokenize a run's data ahead of time; otherwise, `train` tokenizes them on first use. If the tokens exist already, they are checked.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava prepare configs/quickstart.toml
  ottava prepare run.toml --part 2/8
  ottava prepare run.toml --megatron corpus_text_document")]
pub struct Prepare {
    /// The run's TOML file.
    config: PathBuf,
    /// Override a setting: `table.key=VALUE`, or `key=VALUE` if only one table has the key.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// Also write the tokens for Megatron-LM, as PREFIX.bin and PREFIX.idx; with several data sets, as PREFIX-NAME.bin and PREFIX-NAME.idx.
    #[arg(long, value_name = "PREFIX")]
    megatron: Option<PathBuf>,
    /// Tokenize only part I of N, so that N processes share the work; the process that finishes last joins all parts.
    #[arg(long, value_name = "I/N", conflicts_with = "megatron")]
    part: Option<Part>,
    /// Print one JSON object with `documents`, `tokens` and `bytes`, and `datasets` with these three numbers for each data set. With `--part`, the
    /// object has `part`, `parts` and `datasets`, which also has the `missing` parts of each data set.
    #[arg(long)]
    json: bool,
}

impl Prepare {
    pub fn run(self) -> Result<()> {
        stop_on_signals("stopping")?;
        let Loaded { mut config, old_keys } = load_run(&self.config, &self.settings, Reads::Shapes)?;
        old_keys.into_iter().for_each(|text| tracing::warn!("{text}"));
        if config.data.streaming {
            return Err(Error::Config(format!(
                "{}: `data.streaming` is true, so `ottava train` tokenizes files while it trains; to tokenize all files now, add --set data.streaming=false",
                self.config.display()
            )));
        }
        let tokenizer = Tokenizer::load(config.tokenizer_path())?;
        // `resolve_data` sets the packing of the run, for which rows are counted.
        config.resolve_data()?;
        if let Some(part) = self.part {
            let sets = config.prepare_part(&tokenizer, part)?;
            self.print_part(part, &sets);
            return Ok(());
        }
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

    /// Prints the counts of a part, and the parts that are missing.
    fn print_part(&self, part: Part, sets: &[(String, PreparedPart)]) {
        for (_, prepared) in sets {
            prepared.outdated.iter().for_each(|text| tracing::warn!("{text}"));
        }
        if self.json {
            let json = |(name, prepared): &(String, PreparedPart)| {
                let [documents, tokens, bytes] = prepared.counts;
                let missing = &prepared.missing;
                json!({"name": name, "documents": documents, "tokens": tokens, "bytes": bytes, "missing": missing})
            };
            let sets: Vec<_> = sets.iter().map(json).collect();
            print_json(&json!({"part": part.number, "parts": part.of, "datasets": sets}));
            return;
        }
        for (name, PreparedPart { counts: [documents, tokens, bytes], missing, .. }) in sets {
            let set = if name.is_empty() { String::new() } else { format!("{name}, ") };
            let others = match missing.is_empty() {
                true => "all parts are joined".into(),
                false => format!("missing: {}", missing.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
            };
            out!("{set}part {part}: {documents} documents, {tokens} tokens, {bytes} bytes of text; {others}");
        }
    }
}
