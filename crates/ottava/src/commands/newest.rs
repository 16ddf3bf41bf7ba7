//! The folder of a model or an adapter: the folder itself, the newest checkpoint of a run, or the folder of a name of the Hub in the cache.

use super::model_links::has_links;
use ottava_checkpoint::adapter::CONFIG_FILE;
use ottava_checkpoint::{AdapterFolder, Verify, latest_complete};
use ottava_common::{Error, Result};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The maximum number of attempts to read a run's newest checkpoint. An attempt fails if the checkpoint is deleted while it is being read.
const ATTEMPTS: usize = 20;

/// Calls `read` with the model folder at `path`, with the newest complete checkpoint if `path` is the folder of a run, or with the folder in the cache
/// if `path` is a name of the Hub. If the run deletes this
/// checkpoint during the call, `read` is called again with the next checkpoint.
///
/// Errors with [`Error::Model`] for an adapter.
pub fn with_model<T>(path: &Path, mut read: impl FnMut(&Path) -> Result<T>) -> Result<T> {
    with_checkpoint(path, |folder| {
        if is_adapter(folder) {
            let (base, path) = (AdapterFolder::base(folder)?, path.display());
            let base = base.display();
            return Err(Error::Model(format!(
                "{path}: this is an adapter, and this command reads a whole model. `ottava merge {base} {path} FOLDER` writes one. `ottava chat`, `generate`, \
                 `serve` and `eval` also take the base model and the adapter: {base} --adapter {path}"
            )));
        }
        read(folder)
    })
}

fn is_adapter(folder: &Path) -> bool {
    !folder.join("config.json").is_file() && folder.join(CONFIG_FILE).is_file()
}

/// Returns the base model of the adapter at `path`; `None` if `path` is no adapter.
pub fn base_of_adapter(path: &Path) -> Result<Option<PathBuf>> {
    with_checkpoint(path, |folder| is_adapter(folder).then(|| AdapterFolder::base(folder)).transpose())
}

/// Warns if the adapter in the folder `adapter` was trained on another folder than `model`, if both are on this machine: a merged model, for example, already
/// has the adapter in its weights.
pub fn warn_of_other_base(adapter: &Path, model: &Path) {
    let Ok(base) = AdapterFolder::base(adapter) else { return };
    let (Ok(trained), Ok(given)) = (base.canonicalize(), model.canonicalize()) else { return };
    // The base may be the folder of a run, which has the checkpoint.
    if !given.starts_with(trained) {
        tracing::warn!(
            "{}: this adapter was trained on {}, and the model is {}; unless this is a copy of it, the answers are wrong",
            adapter.display(),
            base.display(),
            model.display()
        );
    }
}

/// Like [`with_model`], for a model or an adapter.
pub fn with_checkpoint<T>(path: &Path, mut read: impl FnMut(&Path) -> Result<T>) -> Result<T> {
    let path = &super::remote::model(path)?;
    let checkpoints = path.join("checkpoints");
    let is_model = path.join("config.json").is_file() || path.join(CONFIG_FILE).is_file();
    // The links of a run have no manifest, and change while the run trains.
    if is_model && !has_links(path) || !checkpoints.is_dir() {
        let runs = if is_model { Vec::new() } else { runs_in(path) };
        if !runs.is_empty() {
            let text = format!("{}: this folder holds runs; name one of them: {}", path.display(), runs.join(", "));
            return Err(Error::Model(text));
        }
        return read(path);
    }
    for attempt in 1.. {
        let latest = latest_complete(&checkpoints, Verify::Sizes)?;
        let Some((newest, _)) = latest.complete else {
            // During a deletion, the listing may contain neither the deleted checkpoint nor the new one.
            if attempt < ATTEMPTS {
                continue;
            }
            let none = format!("{}: there is no complete checkpoint yet; name a model folder", checkpoints.display());
            return Err(Error::Checkpoint(none));
        };
        log_once(&newest);
        match read(&newest) {
            Err(_) if !newest.exists() && attempt < ATTEMPTS => {}
            done => return done,
        }
    }
    unreachable!("the last attempt returns")
}

/// Returns the paths of the runs in `folder`, at most eight.
fn runs_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let runs = entries.map(|entry| entry.path()).filter(|path| path.join("checkpoints").is_dir());
    let mut runs: Vec<String> = runs.map(|path| path.display().to_string()).collect();
    runs.sort();
    runs.truncate(8);
    runs
}

/// Logs the path of the checkpoint that is read. A command that reads several parts of the checkpoint logs it once.
fn log_once(newest: &Path) {
    static LOGGED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    if LOGGED.lock().unwrap_or_else(PoisonError::into_inner).insert(newest.to_path_buf()) {
        tracing::info!("model: {}", newest.display());
    }
}
