//! Checkpoints of Megatron-LM's `GPTModel` (Megatron core). Ranks of tensor and pipeline parallelism are merged, a weight at a time.

mod args;
mod distributed;
mod layout;
mod ranks;

use super::torch::distributed::METADATA;
use crate::error::{Error, Result};
use crate::input;
use crate::models::DecoderConfig;
use distributed::Distributed;
use layout::Weight;
use ranks::Ranks;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Names the newest of several checkpoints in a folder.
const LATEST: &str = "latest_checkpointed_iteration.txt";

/// An open checkpoint.
#[derive(Debug)]
pub struct Megatron {
    path: PathBuf,
    format: Format,
}

/// How its tensors are stored.
#[derive(Debug)]
enum Format {
    /// `torch`.
    Ranks(Ranks),
    /// `torch_dist`.
    Distributed(Box<Distributed>),
}

impl Megatron {
    /// Opens the checkpoint in `folder`, or the newest one in a folder of several.
    ///
    /// Errors with [`Error::Model`] when files are missing or damaged, and for other formats.
    pub fn open(folder: &Path) -> Result<Megatron> {
        let path = newest(folder)?;
        let format = match path.join(METADATA).exists() {
            true => Format::Distributed(Box::new(Distributed::open(&path)?)),
            false => Format::Ranks(Ranks::open(&path)?),
        };
        Ok(Megatron { path, format })
    }

    /// `config.json` from the arguments of the run.
    ///
    /// Errors when the checkpoint has none, or those of another model.
    pub fn config(&self) -> Result<Map<String, Value>> {
        match &self.format {
            Format::Ranks(ranks) => ranks.config(),
            Format::Distributed(checkpoint) => checkpoint.config(),
        }
    }

    /// Types of the tensors that are weights, with their numbers.
    pub fn types(&self) -> Result<BTreeMap<&'static str, usize>> {
        match &self.format {
            Format::Ranks(ranks) => ranks.types(),
            Format::Distributed(checkpoint) => Ok(checkpoint.types()),
        }
    }

    /// The weights of a model of these `sizes`, in the order of its blocks.
    ///
    /// Errors when one is missing or of another shape, and when the checkpoint has others.
    pub fn weights(&self, sizes: &DecoderConfig) -> Result<Vec<Weight>> {
        if let Some(problem) = layout::problem(sizes) {
            return Err(self.error(&problem));
        }
        let weights = layout::weights(sizes);
        match &self.format {
            Format::Ranks(ranks) => ranks.check(&weights, sizes)?,
            Format::Distributed(checkpoint) => checkpoint.check(&weights, sizes)?,
        }
        Ok(weights)
    }

    /// The values of a weight, row-major.
    pub fn values(&self, weight: &Weight, sizes: &DecoderConfig) -> Result<Vec<f32>> {
        let values = match &self.format {
            Format::Ranks(ranks) => ranks.values(weight, sizes)?,
            Format::Distributed(checkpoint) => checkpoint.values(weight, sizes)?,
        };
        match values.iter().all(|value| value.is_finite()) {
            true => Ok(values),
            false => {
                Err(self
                    .error(&format!("`{}` holds a value that is not finite; the checkpoint is damaged", weight.name)))
            }
        }
    }

    /// An error about this checkpoint.
    fn error(&self, text: &str) -> Error {
        Error::Model(format!("{}: {text}", self.path.display()))
    }
}

/// The folder itself, or the newest checkpoint in it.
fn newest(folder: &Path) -> Result<PathBuf> {
    let latest = folder.join(LATEST);
    if !latest.is_file() {
        return Ok(folder.to_path_buf());
    }
    let text = input::read_text(&latest, 64).map_err(Error::io(&latest))?;
    match text.trim() {
        "release" => Ok(folder.join("release")),
        number => match number.parse::<u64>() {
            Ok(step) => Ok(folder.join(format!("iter_{step:07}"))),
            Err(_) => Err(Error::Model(format!("{}: {number:?} is neither a number nor `release`", latest.display()))),
        },
    }
}

#[cfg(test)]
mod tests;
