//! Loading a model, shared by `eval` and `generate`.

use clap::Args;
use ottava_lm::checkpoint::{Verify, latest_complete, verify_model};
use ottava_lm::config::{DeviceChoice, RunConfig};
use ottava_lm::models::{ConfigFile, Decoder, decoder_config};
use ottava_lm::param::Purpose;
use ottava_lm::recipe::RecipeName;
use ottava_lm::trainer::{build, log_exceptions};
use ottava_lm::{Error, Result};
use std::path::Path;

/// Recipe and device.
#[derive(Args)]
pub struct Inference {
    /// The recipe, as fp8-current; by default that of the run that saved the model, else bf16. Linears that
    /// the run kept in high precision stay so.
    #[arg(long)]
    recipe: Option<RecipeName>,
    /// Change a setting of [precision], as `train` does: a dotted path, or a bare key that is unique.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// Where to run: auto, cuda or cpu.
    #[arg(long, default_value = "auto", value_parser = crate::device::parse)]
    device: DeviceChoice,
}

/// How often a run's newest checkpoint may be deleted while it is being read.
const ATTEMPTS: usize = 20;

/// Calls `read` with the model folder that `path` names: itself, or the newest complete checkpoint of a run. A run that
/// trains meanwhile may delete that one; then `read` is called with the next.
pub fn with_model<T>(path: &Path, mut read: impl FnMut(&Path) -> Result<T>) -> Result<T> {
    let checkpoints = path.join("checkpoints");
    if path.join("config.json").is_file() || !checkpoints.is_dir() {
        return read(path);
    }
    for attempt in 1.. {
        let latest = latest_complete(&checkpoints, Verify::Sizes)?;
        let Some((newest, _)) = latest.complete else {
            if attempt < ATTEMPTS && latest.damaged.iter().any(|(path, _)| !path.exists()) {
                continue;
            }
            let none = format!("{}: there is no complete checkpoint yet; name a model folder", checkpoints.display());
            return Err(Error::Checkpoint(none));
        };
        tracing::info!("model: {}", newest.display());
        match read(&newest) {
            Err(_) if !newest.exists() && attempt < ATTEMPTS => {}
            done => return done,
        }
    }
    unreachable!("the last attempt returns")
}

impl Inference {
    /// The model of `folder` with its weights cast, for sequences up to `seq_len`. Errors when files of a checkpoint are
    /// not those of its manifest.
    pub fn load(&self, folder: &Path, config: &ConfigFile, seq_len: usize) -> Result<Decoder> {
        verify_model(folder)?;
        let (run, casts) = RunConfig::saved_in(folder)?.unzip();
        let saved = run.unwrap_or_default();
        let mut run = saved.with_precision(&self.settings)?;
        run.precision.recipe = self.recipe.unwrap_or(run.precision.recipe);
        let same = run.precision == saved.precision;
        let mut plain = saved.clone();
        plain.precision.recipe = run.precision.recipe;
        let known = plain.without_effect();
        for text in run.without_effect().into_iter().filter(|text| !known.contains(text)) {
            tracing::warn!("{text}");
        }
        tracing::info!("recipe: {}", run.precision.recipe.as_str());
        let device = crate::device::open(self.device)?;
        let recipe = run.recipe_on(&device);
        let sizes = decoder_config(config)?;
        let mut model = build(Some(folder), 0, &device, &sizes, |weights| {
            Decoder::new(&sizes, &recipe, &device, Purpose::Infer, seq_len, weights)
        })?;
        log_exceptions(&model, casts.as_deref().filter(|_| same));
        model.quantize_weights()?;
        Ok(model)
    }
}
