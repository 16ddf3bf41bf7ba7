//! `ottava merge`.

use super::newest::{with_checkpoint, with_model};
use crate::output::{print_json, stop_on_signals};
use clap::Args;
use ottava_checkpoint::{AdapterFolder, merge, verify_model};
use ottava_common::Result;
use ottava_settings::RunConfig;
use serde_json::json;
use std::path::PathBuf;

/// Add a LoRA adapter to the weights of its base model, and write a model folder without adapters.
#[derive(Args)]
#[command(after_help = "Example:
  ottava merge smollm2 runs/lora merged
  ottava generate merged --prompt 'The capital of France'")]
pub struct MergeCommand {
    /// The folder of the base model.
    base: PathBuf,
    /// The adapter: a PEFT folder, or the folder of a run that trained an adapter (its newest checkpoint is used).
    adapter: PathBuf,
    /// The new folder, with weights in the types of the base model.
    output: PathBuf,
    /// Print one JSON object with `merged`, the number of weights to which an adapter was added.
    #[arg(long)]
    json: bool,
}

impl MergeCommand {
    pub fn run(self) -> Result<()> {
        stop_on_signals("stopping")?;
        let open = |folder: &std::path::Path| {
            verify_model(folder)?;
            AdapterFolder::open(folder)
        };
        let adapter = with_checkpoint(&self.adapter, open)?;
        let run = with_checkpoint(&self.adapter, RunConfig::saved_in)?.map(|(run, _)| run.classification);
        let labels = run.filter(|own| !own.label_names.is_empty()).map(|own| own.labels());
        let merged = with_model(&self.base, |base| {
            verify_model(base)?;
            merge(base, &adapter, labels.as_ref(), &self.output)
        })?;
        match self.json {
            true => print_json(&json!({"merged": merged})),
            false => out!("{}: {merged} weights with their adapters added", self.output.display()),
        }
        Ok(())
    }
}
