//! `ottava init`.

use super::remote::{Reads, Remote};
use super::{expect_new, pretty, write_new};
use crate::output::print_json;
use clap::Args;
use ottava_common::Result;
use ottava_recipe::RecipeName;
use ottava_settings::{SCHEMA, StarterOptions, parse_recipe, schema, starter};
use serde_json::json;
use std::path::PathBuf;

/// Write a starter configuration for a model folder and data.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava init models/Qwen2.5-0.5B chats.jsonl
  ottava init Qwen/Qwen3-0.6B HuggingFaceH4/no_robots
  ottava init Qwen/Qwen3-0.6B 'OWNER/NAME?split=train_sft'
  ottava init Qwen/Qwen3-8B chats.jsonl --recipe fp8-delayed --lora
  ottava init models/Llama-3.1-8B books.txt.gz more.jsonl --output books.toml

A name of the Hub is OWNER/NAME or OWNER/NAME@REVISION; of a data set also OWNER/NAME?split=NAME or OWNER/NAME?config=NAME&split=NAME. If the data are
small, the file has small batches, so that the run has at least about 30 steps. If the records have other names of fields than Ottava's, the file has a guess under
[data.records].")]
pub struct Init {
    /// A Hugging Face model folder, a name of the Hub such as Qwen/Qwen3-0.6B, or a config.json to start from random weights.
    model: PathBuf,
    /// Files, folders or patterns with the training data, or data sets of the Hub.
    #[arg(required = true)]
    data: Vec<PathBuf>,
    /// The new file.
    #[arg(long, value_name = "FILE", default_value = "run.toml")]
    output: PathBuf,
    /// The recipe that the file has, such as fp8-delayed, fp8-row or bf16.
    #[arg(long, value_name = "NAME", default_value = "bf16", value_parser = parse_recipe)]
    recipe: RecipeName,
    /// Write a run that trains adapters, with a learning rate for adapters.
    #[arg(long)]
    lora: bool,
    /// Print one JSON object with `output` and `found`.
    #[arg(long)]
    json: bool,
}

impl Init {
    pub fn run(self) -> Result<()> {
        expect_new(&self.output)?;
        let remote = Remote::default();
        let options = StarterOptions { recipe: self.recipe, lora: self.lora };
        let starter = starter(&self.model, &self.data, &options, &mut |config| remote.resolve(config, Reads::Weights))?;
        write_new(&self.output, &starter.toml)?;
        // An editor that knows the schema completes and checks keys. An existing schema file is kept, since it may belong to another run.
        let beside = self.output.with_file_name(SCHEMA);
        if !beside.exists() {
            write_new(&beside, &pretty(&schema()))?;
        }
        if self.json {
            print_json(&json!({"output": self.output, "found": starter.found}));
            return Ok(());
        }
        for line in &starter.found {
            note!("{line}");
        }
        let path = self.output.display();
        out!("wrote {path}; next: `ottava plan {path} --show-data`, then `ottava train {path}`");
        Ok(())
    }
}
