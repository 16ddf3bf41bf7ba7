//! `ottava import`.

use super::write_new;
use crate::output::print_json;
use clap::Args;
use ottava_common::Result;
use ottava_settings::import;
use serde_json::json;
use std::path::PathBuf;

/// Translate a configuration of Axolotl, LLaMA-Factory, TRL, verl, NeMo-RL, Accelerate or DeepSpeed to the TOML file of a run.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava import axolotl.yaml --output run.toml
  ottava import examples/train_lora/llama3_lora_sft.yaml
  ottava import run_qwen2_5-7b.sh --output grpo.toml

Keys that were not translated are listed with the reason, on the terminal and as comments in the file. For keys that
the file does not set, the other trainer's default is written if it differs from Ottava's.")]
pub struct Import {
    /// The YAML or JSON file, or a script that starts verl.
    file: PathBuf,
    /// The new TOML file; without this option, the text goes to standard output.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print one JSON object: `toml`, the keys that were not translated (`refused`) or need no translation (`needless`), and the remaining problems
    /// of the new file (`problems`).
    #[arg(long)]
    json: bool,
}

impl Import {
    pub fn run(self) -> Result<()> {
        let imported = import(&self.file)?;
        if let Some(path) = &self.output {
            write_new(path, &imported.toml)?;
        }
        if self.json {
            print_json(&json!({
                "toml": imported.toml,
                "refused": imported.refused,
                "needless": imported.needless,
                "problems": imported.problems,
            }));
            return Ok(());
        }
        if self.output.is_none() {
            out!("{}", imported.toml.trim_end());
        }
        let (refused, needless) = (imported.refused.len(), imported.needless.len());
        imported.refused.iter().for_each(|text| note!("not translated: {text}"));
        imported.problems.iter().for_each(|text| note!("still to do: {text}"));
        let keys = |count: usize, one: &str, several: &str| match count {
            1 => format!("1 key {one}"),
            _ => format!("{count} keys {several}"),
        };
        let refused = keys(refused, "was not translated", "were not translated");
        note!("{refused}; {} in Ottava, as the file explains", keys(needless, "has no effect", "have no effect"));
        if let Some(path) = &self.output {
            note!("wrote {}; `ottava plan {0}` checks it", path.display());
        }
        Ok(())
    }
}
