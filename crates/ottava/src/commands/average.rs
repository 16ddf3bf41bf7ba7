//! `ottava average`.

use super::newest::with_model;
use crate::output::{print_json, stop_on_signals};
use clap::Args;
use ottava_checkpoint::{average, verify_model};
use ottava_common::{Error, Result};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Average the weights of several models, such as checkpoints of a run, and write a model folder.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava average run/checkpoints/checkpoint-800 run/checkpoints/checkpoint-900 --output averaged
  ottava average first second --weights 3,1 --output averaged")]
pub struct AverageCommand {
    /// The model folders, or folders of runs (their newest checkpoints are used): models of one architecture and size.
    #[arg(required = true, num_args = 1..)]
    models: Vec<PathBuf>,
    /// The new folder. It has the settings, the tokenizer and the types of weights of the first model.
    #[arg(long, value_name = "FOLDER")]
    output: PathBuf,
    /// The weight of each model, separated by commas; by default 1 for each. Weights are divided by their sum.
    #[arg(long, value_name = "WEIGHTS", value_delimiter = ',', allow_negative_numbers = true)]
    weights: Vec<f64>,
    /// Print one JSON object with `models` and `tensors`, the numbers of models and of averaged tensors.
    #[arg(long)]
    json: bool,
}

impl AverageCommand {
    pub fn run(self) -> Result<()> {
        stop_on_signals("stopping")?;
        let count = self.models.len();
        let weights = match self.weights.len() {
            0 => vec![1.0; count],
            given if given == count => self.weights.clone(),
            given => {
                return Err(Error::Config(format!(
                    "--weights has {given} numbers, and there are {count} models; give one number for each model"
                )));
            }
        };
        let tensors = self.average(&self.models, &weights, &mut Vec::new())?;
        match self.json {
            true => print_json(&json!({"models": count, "tensors": tensors})),
            false => out!("{}: {tensors} tensors averaged over {count} models", self.output.display()),
        }
        Ok(())
    }

    /// Opens the `rest` of the models one inside the other, since a run may replace a checkpoint that is read, and averages all models.
    fn average(&self, rest: &[PathBuf], weights: &[f64], opened: &mut Vec<PathBuf>) -> Result<usize> {
        let Some((next, rest)) = rest.split_first() else {
            let folders: Vec<(&Path, f64)> = opened.iter().map(PathBuf::as_path).zip(weights.iter().copied()).collect();
            return average(&folders, &self.output);
        };
        with_model(next, |folder| {
            verify_model(folder)?;
            opened.push(folder.to_path_buf());
            let averaged = self.average(rest, weights, opened);
            opened.pop();
            averaged
        })
    }
}
