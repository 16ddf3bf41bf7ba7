//! How a run begins: its folder, the checkpoint that it goes on from, its model.

use crate::checkpoint::{FolderWeights, Progress, RandomWeights, Verify, latest_complete, training, verify};
use crate::config::RunConfig;
use crate::error::{Error, Result};
use crate::param::{Description, WeightSource};
use crate::recipe::Recipe;
use ottava_tensor::Device;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Where a run starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// At step 1, in a folder that holds no run yet.
    New,
    /// After the newest complete checkpoint of the run's folder.
    Resume,
    /// After this checkpoint.
    ResumeFrom(PathBuf),
}

/// Losses by step.
pub(super) type Losses = Vec<(u64, f64)>;

/// Builds a model, or a run around it, from the weights of a folder, or from the seed where `folder` is `None`.
///
/// Errors when the folder has tensors that the model, whose head may be `tied`, does not.
pub fn build<T>(
    folder: Option<&Path>,
    seed: u64,
    device: &Device,
    tied: bool,
    make: impl FnOnce(&mut dyn WeightSource) -> Result<T>,
) -> Result<T> {
    let Some(folder) = folder else { return make(&mut RandomWeights { seed, device: device.clone() }) };
    let mut weights = FolderWeights::open(folder)?;
    let made = make(&mut weights)?;
    weights.finish(tied)?;
    Ok(made)
}

/// Says how many linears a recipe that casts leaves in high precision, and why: that must not happen silently.
pub(super) fn tell_of_exceptions(model: &Description, recipe: &Recipe) {
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    let decisions = model.linears.iter().map(|(_, decision)| decision);
    for decision in decisions.filter(|decision| recipe.casts.is_some() && decision.fp8.is_none()) {
        *reasons.entry(&decision.reason).or_default() += 1;
    }
    for (reason, count) in reasons {
        tracing::warn!("{count} of {} linears stay in {}: {reason}", model.linears.len(), recipe.compute);
    }
}

pub(super) fn checkpoints(folder: &Path) -> PathBuf {
    folder.join("checkpoints")
}

/// Takes the run's folder for this process.
pub(super) fn lock(folder: &Path) -> Result<File> {
    let path = folder.join(".lock");
    let file = File::options().create(true).append(true).open(&path).map_err(Error::io(&path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(Error::Config(format!(
            "{}: another process is training into this folder; choose another `output_dir`",
            folder.display()
        ))),
        Err(std::fs::TryLockError::Error(error)) => Err(Error::io(&path)(error)),
    }
}

pub(super) fn find_checkpoint(config: &RunConfig, start: &Start) -> Result<Option<(PathBuf, Progress)>> {
    let folder = checkpoints(&config.output_dir);
    let (path, manifest) = match start {
        Start::New => {
            // Metrics without a checkpoint are left by a run that failed before its first: nothing of it can be gone on with.
            let has_entries = |path: &Path| std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_some());
            if has_entries(&folder) {
                return Err(Error::Config(format!(
                    "{} already holds a run; go on with it by --resume, or start another with --set output_dir=FOLDER",
                    config.output_dir.display()
                )));
            }
            return Ok(None);
        }
        Start::Resume => {
            let latest = latest_complete(&folder, Verify::Hashes)?;
            for (path, error) in latest.damaged {
                tracing::warn!("{} is damaged and passed over: {error}", path.display());
            }
            latest.complete.ok_or_else(|| {
                Error::Checkpoint(format!("{}: there is no complete checkpoint to resume from", folder.display()))
            })?
        }
        Start::ResumeFrom(path) => (path.clone(), verify(path, Verify::Hashes)?),
    };
    let progress = training::progress(&path, &manifest)?;
    Ok(Some((path, progress)))
}

/// Losses of the steps that a resumed run already has, from its metrics.
pub(super) fn read_losses(metrics: &Path) -> (Losses, Losses) {
    let text = std::fs::read_to_string(metrics).unwrap_or_default();
    let lines: Vec<serde_json::Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let series =
        |key: &str| lines.iter().filter_map(|line| Some((line["step"].as_u64()?, line[key].as_f64()?))).collect();
    (series("loss"), series("eval_loss"))
}
