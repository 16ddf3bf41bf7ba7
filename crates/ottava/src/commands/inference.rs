//! What the commands that run a finished model share.

use clap::Args;
use ottava_lm::checkpoint::{Verify, latest_complete};
use ottava_lm::config::{DeviceChoice, RunConfig};
use ottava_lm::models::{ConfigFile, Decoder, decoder_config};
use ottava_lm::param::Purpose;
use ottava_lm::recipe::{Recipe, RecipeName};
use ottava_lm::trainer::build;
use ottava_lm::{Error, Result};
use std::path::{Path, PathBuf};

/// In which precision, and where.
#[derive(Args)]
pub struct Inference {
    /// The recipe, as fp8-current; by default that of the run that saved the model, else bf16. Linears that
    /// the run kept in high precision stay so.
    #[arg(long)]
    recipe: Option<RecipeName>,
    /// Where to run: auto, cuda or cpu.
    #[arg(long, default_value = "auto", value_parser = crate::device::parse)]
    device: DeviceChoice,
}

/// The model folder that `path` names: itself, or the newest complete checkpoint of a run.
pub fn model_folder(path: PathBuf) -> Result<PathBuf> {
    let checkpoints = path.join("checkpoints");
    if path.join("config.json").is_file() || !checkpoints.is_dir() {
        return Ok(path);
    }
    let newest = latest_complete(&checkpoints, Verify::Sizes)?.complete;
    let (newest, _) = newest.ok_or_else(|| {
        Error::Checkpoint(format!(
            "{}: there is no complete checkpoint yet; name a model folder",
            checkpoints.display()
        ))
    })?;
    tracing::info!("model: {}", newest.display());
    Ok(newest)
}

impl Inference {
    /// The model of `folder` with its weights cast, for sequences up to `seq_len`.
    pub fn load(&self, folder: &Path, config: &ConfigFile, seq_len: usize) -> Result<Decoder> {
        let recipe = self.recipe(folder)?;
        tracing::info!("recipe: {}", recipe.name.as_str());
        let device = crate::device::open(self.device)?;
        let sizes = decoder_config(config)?;
        let mut model = build(Some(folder), 0, &device, sizes.tied, |weights| {
            Decoder::new(&sizes, &recipe, &device, Purpose::Infer, seq_len, weights)
        })?;
        model.quantize_weights()?;
        Ok(model)
    }

    fn recipe(&self, folder: &Path) -> Result<Recipe> {
        // What speed decided in the run is decided by the run's sizes here too: it is the trained model that runs.
        let mut run = RunConfig::saved_in(folder)?.unwrap_or_default();
        run.precision.recipe = self.recipe.unwrap_or(run.precision.recipe);
        Ok(run.recipe())
    }
}
