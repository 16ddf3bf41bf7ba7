//! Names of the Hugging Face Hub in settings and on the command line: the one place that replaces them by local paths.

use crate::output::Transfer;
use ottava_common::Result;
use ottava_hub::{DataId, Hub, Kind, RepoId};
use ottava_settings::{DatasetConfig, Loaded, RunConfig, WeightInit};
use std::path::{Path, PathBuf};

/// What a command reads of models.
#[derive(Clone, Copy, PartialEq)]
pub enum Reads {
    /// Configurations and tokenizers.
    Shapes,
    /// Also weights.
    Weights,
}

/// The splits that evaluations read, the first one that exists.
pub const VALIDATION: &[&str] = &["validation", "test"];

/// Reads the file of a run as [`RunConfig::load`] does, and replaces names of the Hub by local paths. If the run `resumes`, the commits of its files
/// stay the same.
pub fn load_run(path: &Path, settings: &[String], reads: Reads, resumes: bool) -> Result<Loaded> {
    RunConfig::load_with(path, settings, &mut |config| {
        let pins = if resumes { pins(&config.output_dir) } else { Vec::new() };
        resolve(config, reads, &pins)
    })
}

/// Replaces names of the Hub in `config` by local paths.
pub fn resolve(config: &mut RunConfig, reads: Reads, pins: &[(RepoId, String)]) -> Result<()> {
    let of_model = if config.model.init == WeightInit::Random { Reads::Shapes } else { reads };
    let folders = [
        (&mut config.model.path, of_model),
        (&mut config.model.tokenizer, Reads::Shapes),
        (&mut config.lora.init_from, reads),
        (&mut config.distillation.teacher, reads),
    ];
    for (path, reads) in folders {
        if let Some(local) = find(path, reads, pins)? {
            *path = local;
        }
    }
    let data = &mut config.data;
    let of_sets = data.datasets.iter_mut().map(|DatasetConfig { train_files, val_files, .. }| (train_files, val_files));
    for (train, validation) in of_sets.chain([(&mut data.train_files, &mut data.val_files)]) {
        *train = data_files(train, &["train"], pins)?;
        *validation = data_files(validation, VALIDATION, pins)?;
    }
    Ok(())
}

/// Returns the folder of a model or an adapter on the command line: `path`, or the folder in the cache if `path` is a name of the Hub.
pub fn model(path: &Path) -> Result<PathBuf> {
    Ok(find(path, Reads::Weights, &[])?.unwrap_or_else(|| path.to_path_buf()))
}

/// Returns the folder in the cache with the configurations of the model that `path` names on the Hub, without its weights; `None` if `path` is a local
/// path.
pub fn shapes(path: &Path) -> Result<Option<PathBuf>> {
    find(path, Reads::Shapes, &[])
}

/// Returns the local files of `paths`. A name of the Hub stands for the files of a split, by default the first of
/// `splits` that the data set has.
pub fn data_files(paths: &[PathBuf], splits: &[&str], pins: &[(RepoId, String)]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        match DataId::of_path(path)? {
            Some(id) => {
                let id = DataId { repo: pinned(id.repo, pins), ..id };
                files.extend(Hub::from_env()?.data_files(&id, splits, &mut Transfer::new("downloaded"))?);
            }
            None => files.push(path.clone()),
        }
    }
    Ok(files)
}

/// Returns the folder in the cache of the model that `path` names on the Hub; `None` if `path` is a local path.
fn find(path: &Path, reads: Reads, pins: &[(RepoId, String)]) -> Result<Option<PathBuf>> {
    let Some(id) = RepoId::of_path(Kind::Model, path) else { return Ok(None) };
    let (id, has_weights) = (pinned(id, pins), reads == Reads::Weights);
    Hub::from_env()?.model(&id, has_weights, &mut Transfer::new("downloaded")).map(Some)
}

fn pinned(id: RepoId, pins: &[(RepoId, String)]) -> RepoId {
    let pin = pins.iter().find(|(known, _)| known.kind == id.kind && known.name == id.name);
    id.pinned(pin.map(|(_, commit)| commit.as_str()))
}

/// Returns the commits of the files that the run in `output_dir` has used.
fn pins(output_dir: &Path) -> Vec<(RepoId, String)> {
    let text = std::fs::read_to_string(output_dir.join("config.toml")).unwrap_or_default();
    text.split('"').filter_map(|part| RepoId::of_snapshot(Path::new(part))).collect()
}
