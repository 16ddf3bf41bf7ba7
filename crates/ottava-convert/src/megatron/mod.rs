//! Reads checkpoints of Megatron-LM's `GPTModel` (Megatron core). The parts of tensor and pipeline parallel ranks are merged, one weight at a time.

mod args;
mod arguments;
mod distributed;
mod layout;
mod ranks;

use crate::source::halves_of_heads;
use crate::torch::distributed::METADATA;
use args::{Args, NO_ARGS};
use distributed::Distributed;
use layout::Weight;
use ottava_common::error::{Error, Result};
use ottava_common::input;
use ottava_models::DecoderConfig;
use ranks::RankFiles;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The file that names the newest of several checkpoints in a folder.
const LATEST: &str = "latest_checkpointed_iteration.txt";

/// An open checkpoint.
#[derive(Debug)]
pub struct Megatron {
    path: PathBuf,
    format: Format,
}

/// The storage format of its tensors.
#[derive(Debug)]
enum Format {
    /// `torch`.
    Ranks(RankFiles),
    /// `torch_dist`.
    Distributed(Box<Distributed>),
}

impl Megatron {
    /// Opens the checkpoint in `folder`, or the newest checkpoint if the folder has several.
    ///
    /// Errors with [`Error::Model`] if files are missing or damaged, and for other formats.
    pub fn open(folder: &Path) -> Result<Megatron> {
        let path = newest(folder)?;
        let format = match path.join(METADATA).exists() {
            true => Format::Distributed(Box::new(Distributed::open(&path)?)),
            false => Format::Ranks(RankFiles::open(&path)?),
        };
        Ok(Megatron { path, format })
    }

    /// Returns the folder of the checkpoint, which may be inside the folder that the user named.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn args(&self) -> Option<Args<'_>> {
        match &self.format {
            Format::Ranks(ranks) => ranks.args(),
            Format::Distributed(checkpoint) => checkpoint.args(),
        }
    }

    /// Derives `config.json` from the arguments of the run.
    ///
    /// Errors if the checkpoint has no arguments, or arguments that are not supported.
    pub fn config(&self) -> Result<Map<String, Value>> {
        let args = self.args().ok_or_else(|| self.error(NO_ARGS))?;
        args.config(match &self.format {
            Format::Ranks(ranks) => ranks.vocabulary()?,
            Format::Distributed(checkpoint) => checkpoint.vocabulary()?,
        })
    }

    /// Compares the arguments of the run with a model of these `sizes`. If they are `given`, the sizes come from a folder of the user. Returns one
    /// sentence for each property that could not be compared.
    ///
    /// Errors with [`Error::Model`], which names the first argument that does not match.
    pub fn check_args(&self, sizes: &DecoderConfig, given: bool) -> Result<Vec<String>> {
        let Some(args) = self.args() else {
            return Ok(vec![
                "the checkpoint has no arguments of its run, so that nothing but shapes was compared with config.json of --like: check its rotary \
                 positions (rope_theta, rope_scaling; interleaved ones are not recognized), rms_norm_eps and hidden_act"
                    .into(),
            ]);
        };
        let unknown = args.check(sizes, given)?;
        let sentence = || {
            format!(
                "arguments of the checkpoint that are not known here, and may change the model: {}; compare its logits",
                unknown.join(", ")
            )
        };
        Ok(if unknown.is_empty() { Vec::new() } else { vec![sentence()] })
    }

    /// Returns the number of weight tensors of each type.
    pub fn types(&self) -> Result<BTreeMap<&'static str, usize>> {
        match &self.format {
            Format::Ranks(ranks) => ranks.types(),
            Format::Distributed(checkpoint) => Ok(checkpoint.types()),
        }
    }

    /// Returns the weights of a model of these `sizes`, in the order of its blocks.
    ///
    /// Errors if a weight is missing or has another shape, and if the checkpoint has other weights.
    pub fn weights(&self, sizes: &DecoderConfig) -> Result<Vec<Weight>> {
        if let Some(problem) = layout::problem(sizes) {
            return Err(self.error(&problem));
        }
        let weights = layout::weights(sizes)?;
        match &self.format {
            Format::Ranks(ranks) => ranks.check(&weights, sizes)?,
            Format::Distributed(checkpoint) => checkpoint.check(&weights, sizes)?,
        }
        Ok(weights)
    }

    /// Returns the values of a weight in row-major order.
    pub fn values(&self, weight: &Weight, sizes: &DecoderConfig) -> Result<Vec<f32>> {
        let values = match &self.format {
            Format::Ranks(ranks) => ranks.values(weight, sizes)?,
            Format::Distributed(checkpoint) => checkpoint.values(weight, sizes)?,
        };
        let values = match weight.rotary_heads.filter(|_| self.args().is_some_and(|args| args.rotary_interleaved())) {
            Some(heads) => halves_of_heads(&values, values.len() / weight.shape[0], heads),
            None => values,
        };
        match values.iter().all(|value| value.is_finite()) {
            true => Ok(values),
            false => {
                Err(self
                    .error(&format!("`{}` holds a value that is not finite; the checkpoint is damaged", weight.name)))
            }
        }
    }

    /// Returns an error about this checkpoint.
    fn error(&self, text: &str) -> Error {
        Error::Model(format!("{}: {text}", self.path.display()))
    }
}

/// Returns the folder itself, the newest checkpoint in it, or the weights in a folder of NeMo.
fn newest(folder: &Path) -> Result<PathBuf> {
    let weights = folder.join("weights");
    if weights.join(METADATA).exists() {
        return Ok(weights);
    }
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
mod args_tests;
#[cfg(test)]
mod tests;
