//! The start of a run: its folder, the checkpoint from which it resumes, and its model.

use crate::plan::ParallelSearch;
use ottava_checkpoint::{
    AdaptedWeights, AdapterFolder, FolderWeights, Progress, RandomWeights, Verify, abandon_after, atomic,
    holds_checkpoints, latest_complete, latest_complete_until, remove_leftovers, training, verify,
};
use ottava_common::error::{Error, Result};
use ottava_common::fs::{RealFs, create_dirs, expect_folder, expect_regular, set_aside, sync_parent};
use ottava_models::{ConfigFile, Decoder, DecoderConfig, FolderCounts, labels_of};
use ottava_parallel::Ranks;
use ottava_recipe::param::WeightSource;
use ottava_recipe::recompute::Recompute;
use ottava_settings::{ParallelConfig, RunConfig};
use ottava_tensor::Device;
use ottava_tensor::comm::Group;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The starting point of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// Start at step 1, in a folder that does not hold a run.
    New,
    /// Continue after the newest complete checkpoint in the run's folder.
    Resume,
    /// Resume like [`Start::Resume`] if the run's folder holds a checkpoint. Otherwise start like [`Start::New`].
    Auto,
    /// Continue after this checkpoint.
    ResumeFrom(PathBuf),
    /// Continue after the snapshot of this run in this folder of the host's memory. Each rank reads the folder of its own host.
    Memory(PathBuf),
}

/// Builds a model, or a run with a model, by `make`. The weights come from `folder`, or from the seed if `folder` is `None`. The adapters of a model
/// come from the folder `adapter`, or from the seed if `adapter` is `None`. If a classifier or a reward model starts from the folder of a language
/// model, or of a classifier with another number of labels, its head also comes from the seed.
///
/// Errors if the folder or the adapter holds tensors that a model of these `sizes` does not have.
pub fn build<T>(
    folder: Option<&Path>,
    adapter: Option<AdapterFolder>,
    seed: u64,
    device: &Device,
    sizes: &DecoderConfig,
    make: impl FnOnce(&mut dyn WeightSource) -> Result<T>,
) -> Result<T> {
    let random = || RandomWeights { seed, device: device.clone() };
    let Some(folder) = folder else {
        let mut base = random();
        // Without a folder of adapters, the base also makes the tensors of adapters.
        if adapter.is_none() {
            return make(&mut base);
        }
        let mut weights = AdaptedWeights::new(&mut base, adapter, random(), false);
        let made = make(&mut weights)?;
        weights.finish()?;
        return Ok(made);
    };
    let mut base = FolderWeights::open_for(folder, sizes)?.on(device);
    let known = labels_of(&ConfigFile::read(folder)?)?.map(|labels| labels.names.len());
    let new_score = sizes.head.labels.is_some() && known != sizes.head.labels;
    if let (true, Some(known)) = (new_score, known) {
        tracing::warn!(
            "{}: the head has {known} labels, and the run has others, so a new head is drawn",
            folder.display()
        );
    }
    let new = random();
    let mut weights = AdaptedWeights::new(&mut base, adapter, new, new_score).for_model(sizes);
    let made = make(&mut weights)?;
    weights.finish()?;
    base.finish(sizes)?;
    Ok(made)
}

/// Logs which keys of `config.json` are ignored, and which linears an FP8 recipe leaves in high precision. Warns if these linears differ from the
/// linears of a run of the same settings whose names of casts are `saved`.
pub fn log_exceptions(model: &Decoder, saved: Option<&[String]>) {
    let description = model.description();
    let difference = saved.and_then(|casts| description.difference(casts));
    for text in description.ignored.iter().cloned().chain(description.exceptions(model.recipe())).chain(difference) {
        tracing::warn!("{text}");
    }
    let FolderCounts { kept, recast } = model.folder_codes();
    if kept + recast > 0 {
        tracing::info!(
            "{kept} frozen weights keep the FP8 codes of the model folder; {recast} are cast again, since the recipe has other scales than the \
             folder, or fuses weights of different scales"
        );
    }
}

pub(super) fn checkpoints(folder: &Path) -> PathBuf {
    folder.join("checkpoints")
}

/// The name of the file in a run's folder that the process of the run locks.
const LOCK: &str = ".lock";

/// The maximum number of attempts to lock again, 10 ms apart. [`RunLock::is_held`] of another process locks the file for an instant, or for longer on
/// a busy machine.
const LOOKS: usize = 50;

/// The lock on the folder of a run. No other process can train into this folder.
///
/// If it is dropped before the run has started, it removes the folders that it has made, unless they hold files.
pub struct RunLock {
    file: File,
    path: PathBuf,
    /// The folders that it has made, the lowest folder first.
    made: Vec<PathBuf>,
}

impl RunLock {
    /// Locks the run's `folder`, and makes the folder if it does not exist. Errors with [`Error::Config`] if another process holds the lock.
    pub fn take(folder: &Path) -> Result<RunLock> {
        let checkpoints = checkpoints(folder);
        let missing = checkpoints.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists());
        let made = missing.map(Path::to_path_buf).collect();
        expect_folder(&checkpoints).map_err(Error::io(&checkpoints))?;
        create_dirs(&RealFs, &checkpoints)?;
        let path = folder.join(LOCK);
        expect_regular(&path).map_err(Error::io(&path))?;
        let file = File::options().create(true).append(true).open(&path).map_err(Error::io(&path))?;
        let mut locked = file.try_lock();
        // A process that calls `is_held` holds the lock for an instant.
        for _ in 0..LOOKS {
            if !matches!(locked, Err(std::fs::TryLockError::WouldBlock)) {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
            locked = file.try_lock();
        }
        match locked {
            Ok(()) => {
                let lock = RunLock { file, path, made };
                lock.check()?;
                remove_leftovers(&RealFs, &checkpoints)?;
                Ok(lock)
            }
            Err(std::fs::TryLockError::WouldBlock) => Err(Error::Config(format!(
                "{}: another process is training into this folder; choose another `output_dir`",
                folder.display()
            ))),
            Err(std::fs::TryLockError::Error(error)) => Err(Error::io(&path)(error)),
        }
    }

    /// Returns whether a process trains into the run's `folder` now. Errors if the lock file cannot be read.
    pub fn is_held(folder: &Path) -> Result<bool> {
        let path = folder.join(LOCK);
        expect_regular(&path).map_err(Error::io(&path))?;
        let file = match File::open(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
            file => file.map_err(Error::io(&path))?,
        };
        match file.try_lock_shared() {
            Ok(()) => Ok(false),
            Err(std::fs::TryLockError::WouldBlock) => Ok(true),
            Err(std::fs::TryLockError::Error(error)) => Err(Error::io(&path)(error)),
        }
    }

    /// Keeps the folders that it has made, since the run has started.
    pub(super) fn keep(&mut self) {
        self.made.clear();
    }

    /// Errors if the locked file is no longer at its path. Then the folder was moved or removed, and another process may hold the lock of a new
    /// folder at this path.
    pub(super) fn check(&self) -> Result<()> {
        let held = self.file.metadata().map_err(Error::io(&self.path))?;
        match std::fs::symlink_metadata(&self.path) {
            Ok(found) if (found.dev(), found.ino()) == (held.dev(), held.ino()) => Ok(()),
            _ => Err(Error::Checkpoint(format!(
                "{} was moved or removed while the run trained into it, so the run stops; resume with `output_dir` set to its new place",
                self.path.parent().unwrap_or(&self.path).display()
            ))),
        }
    }
}

impl Drop for RunLock {
    fn drop(&mut self) {
        for folder in &self.made {
            // A run that has not started has no file except the lock.
            let is_alone =
                |entry: std::io::Result<std::fs::DirEntry>| entry.is_ok_and(|entry| entry.file_name() == LOCK);
            if std::fs::read_dir(folder).is_ok_and(|mut entries| entries.all(is_alone)) {
                let _ = std::fs::remove_file(folder.join(LOCK));
            }
            let _ = std::fs::remove_dir(folder);
        }
    }
}

/// Replaces `parallel.auto` by the fastest division of the model, which rank 0 searches.
pub(super) fn choose_division(config: &mut RunConfig, device: &Device, world: &Group) -> Result<()> {
    if !config.parallel.auto {
        return Ok(());
    }
    let search = || -> Result<(ParallelConfig, Option<Recompute>)> {
        let mut config = config.clone();
        config.resolve_data()?;
        let sizes = config.decoder_config()?;
        config.expect_positions(&sizes)?;
        let search = ParallelSearch::new(&config, &sizes, device, world.size())?;
        let best = search.fastest()?;
        let chosen = best.division.settings().join(", ");
        tracing::info!("`parallel.auto` chooses {}", if chosen.is_empty() { "one rank" } else { &chosen });
        let chosen = best.division.applied(&config);
        Ok((chosen.parallel, chosen.memory.recompute))
    };
    (config.parallel, config.memory.recompute) = Ranks::of_first(world, "the division of the run", search)?;
    Ok(())
}

/// Errors on all ranks unless each rank sees a file that the leading rank writes into the run's `folder`.
pub(super) fn expect_shared_folder(folder: &Path, ranks: &Ranks) -> Result<()> {
    if ranks.size() == 1 {
        return Ok(());
    }
    let mark = folder.join(format!(".shared-{}", std::process::id()));
    let write = || std::fs::write(&mark, "").map_err(Error::io(&mark)).map(|()| mark.display().to_string());
    let written = if ranks.leads() { write() } else { Ok(String::new()) };
    let seen = ranks.all("the run's folder", written).and_then(|all| {
        // Network file systems can take seconds to show new files.
        let deadline = Instant::now() + Duration::from_secs(10);
        let mark = Path::new(&all[0]);
        while !mark.exists() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(100));
        }
        let missing = || {
            Error::Config(format!(
                "`output_dir` = {} is not shared: this rank does not see the files that rank 0 writes there; set it to a folder of a shared file system",
                folder.display()
            ))
        };
        ranks.together("a look into the run's folder", if mark.exists() { Ok(()) } else { Err(missing()) })
    });
    if ranks.leads() {
        let _ = std::fs::remove_file(&mark);
    }
    seen
}

/// The checkpoint that a run resumes from.
pub(super) struct Resumed {
    pub(super) path: PathBuf,
    pub(super) progress: Progress,
}

/// Finds the checkpoint to resume from, and returns `None` for a new run. Changes no files: [`Resumed::abandon_others`] does.
pub(super) fn find_checkpoint(config: &RunConfig, start: &Start) -> Result<Option<Resumed>> {
    let folder = checkpoints(&config.output_dir);
    let (path, manifest) = match start {
        Start::New => {
            // A run that ended before its first checkpoint cannot be resumed.
            return if holds_checkpoints(&folder)? { Err(holds_a_run(config)) } else { Ok(None) };
        }
        Start::Auto if !holds_checkpoints(&folder)? => return Ok(None),
        Start::Resume | Start::Auto => {
            let latest = latest_complete(&folder, Verify::Hashes)?;
            let count = latest.damaged.len();
            for (path, error) in latest.damaged {
                tracing::warn!("{} is damaged and skipped: {error}", path.display());
            }
            latest.complete.ok_or_else(|| nothing_to_resume(&folder, count))?
        }
        Start::ResumeFrom(path) => {
            if !path.is_dir() {
                return Err(Error::Checkpoint(format!(
                    "{}: there is no such checkpoint to resume from; without a folder, --resume takes the newest one",
                    path.display()
                )));
            }
            if !is_within(path, &folder) && holds_checkpoints(&folder)? {
                return Err(holds_a_run(config));
            }
            (path.clone(), verify(path, Verify::Hashes)?)
        }
        // The keeper has compared the hashes.
        Start::Memory(path) => (path.clone(), verify(path, Verify::Sizes)?),
    };
    let progress = training::progress(&path, &manifest)?;
    if progress.step != manifest.step {
        let text =
            format!("{}: its manifest is of step {} and of step {}", path.display(), manifest.step, progress.step);
        return Err(Error::Checkpoint(text));
    }
    if progress.is_model_only {
        let path = path.display();
        return Err(Error::Checkpoint(format!(
            "{path}: this checkpoint holds the model alone (`checkpoint.save_only_model`), so no run can resume from it; start a new run with \
             `--set model.path={path} --set init=pretrained --set output_dir=FOLDER`"
        )));
    }
    Ok(Some(Resumed { path, progress }))
}

/// Returns the error for a `folder` without a complete checkpoint, with this number of `damaged` checkpoints.
fn nothing_to_resume(folder: &Path, damaged: usize) -> Error {
    let remedy = match damaged {
        0 => "without --resume the run starts anew".into(),
        1 => "the only one is damaged; to start anew, set another `output_dir`, or move this folder away".into(),
        _ => format!("all {damaged} are damaged; to start anew, set another `output_dir`, or move this folder away"),
    };
    Error::Checkpoint(format!("{}: there is no complete checkpoint to resume from; {remedy}", folder.display()))
}

/// Finds the checkpoint to resume from on the leading rank, and shares the result with all ranks.
pub(super) fn find_shared_checkpoint(config: &RunConfig, start: &Start, ranks: &Ranks) -> Result<Option<Resumed>> {
    if let Start::Memory(_) = start {
        let found = ranks.together("the snapshot in the memory of a host", find_checkpoint(config, start))?;
        let step = found.as_ref().map_or(0, |found| found.progress.step);
        ranks.expect_equal("the step of the snapshot", &step.to_string())?;
        if ranks.leads() {
            tracing::info!("the run goes on after the snapshot of step {step} in memory");
        }
        return Ok(found);
    }
    share_checkpoint(if ranks.leads() { find_checkpoint(config, start) } else { Ok(None) }, ranks)
}

/// Finds the newest complete checkpoint up to `step` that was not saved on an interruption, and shares it with all ranks.
pub(super) fn find_shared_checkpoint_until(config: &RunConfig, step: u64, ranks: &Ranks) -> Result<Option<Resumed>> {
    let find = || {
        let mut until = Some(step);
        while let Some(last) = until {
            let latest = latest_complete_until(&checkpoints(&config.output_dir), last, Verify::Hashes)?;
            let Some((path, manifest)) = latest.complete else { break };
            if !manifest.is_interruption() {
                return Ok(Some(Resumed { progress: training::progress(&path, &manifest)?, path }));
            }
            until = manifest.step.checked_sub(1);
        }
        Ok(None)
    };
    share_checkpoint(if ranks.leads() { find() } else { Ok(None) }, ranks)
}

/// Shares the checkpoint that the leading rank has `found` with all ranks.
fn share_checkpoint(found: Result<Option<Resumed>>, ranks: &Ranks) -> Result<Option<Resumed>> {
    let found = ranks.together("the search for a checkpoint", found)?;
    let path = Ok(found.as_ref().map(|resumed| resumed.path.clone()));
    let path = ranks.all("the checkpoint to resume from", path)?.swap_remove(0);
    if ranks.leads() {
        return Ok(found);
    }
    let read = |path: PathBuf| {
        let manifest = verify(&path, Verify::Sizes)?;
        Ok(Resumed { progress: training::progress(&path, &manifest)?, path })
    };
    path.map(read).transpose()
}

fn holds_a_run(config: &RunConfig) -> Error {
    Error::Config(format!(
        "{} already holds a run; resume it with --resume: {}; or start another with --set output_dir=FOLDER",
        config.output_dir.display(),
        config.ways_to_resume()
    ))
}

/// Returns whether `path` lies in `folder`, after links are resolved.
fn is_within(path: &Path, folder: &Path) -> bool {
    let (path, folder) = (path.canonicalize(), folder.canonicalize());
    matches!((path, folder), (Ok(path), Ok(folder)) if path.parent() == Some(&folder))
}

/// The maximum number of changed keys of a `config.json` that an error lists.
const MOST_CHANGES: usize = 8;

/// Returns a sentence for each key of `config.json` whose value differs between `before` and `now`, if the earlier value would change the model.
fn changes(config: &RunConfig, before: &ConfigFile, now: &ConfigFile) -> Vec<String> {
    let [old, new] = [before, now].map(ConfigFile::values);
    let sizes = config.trained_sizes(now).ok();
    let changes_the_model = |key: &str| {
        let mut values = new.clone();
        match old.get(key) {
            Some(value) => drop(values.insert(key.to_string(), value.clone())),
            None => drop(values.remove(key)),
        }
        config.trained_sizes(&now.with_values(values)).ok() != sizes
    };
    let told = |value: Option<&Value>| match value {
        None | Some(Value::Null) => "not set".to_string(),
        Some(value) => value.to_string(),
    };
    let keys: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    let changed = keys.into_iter().filter(|key| old.get(*key) != new.get(*key) && changes_the_model(key));
    changed.map(|key| format!("`{key}` was {} and is {} now", told(old.get(key)), told(new.get(key)))).collect()
}

impl Resumed {
    /// Errors if the model's sizes or constants differ from the sizes and constants that the checkpoint was trained with.
    pub(super) fn expect_model(&self, config: &RunConfig, file: &ConfigFile, sizes: &DecoderConfig) -> Result<()> {
        let saved = ConfigFile::read(&self.path)?;
        if config.trained_sizes(&saved)? == *sizes {
            return Ok(());
        }
        let mut changed = changes(config, &saved, file);
        changed.truncate(MOST_CHANGES);
        Err(Error::Config(format!(
            "config.json of `model.path` has changed since {} was saved: {}. \
             Put it back, or start a new run with `model.path` set to the checkpoint",
            self.path.display(),
            changed.join(", ")
        )))
    }

    /// Renames the run's later checkpoints, including damaged checkpoints, so that this checkpoint is the newest one. If this checkpoint was renamed
    /// before, it gets its name back.
    pub(super) fn abandon_others(&mut self, config: &RunConfig) -> Result<()> {
        let folder = checkpoints(&config.output_dir);
        let step = self.progress.step;
        for path in abandon_after(&RealFs, &folder, step)? {
            tracing::warn!("a checkpoint of a later step was moved to {}", path.display());
        }
        let named = folder.join(atomic::name(step));
        if is_within(&self.path, &folder) && self.path.file_name() != named.file_name() {
            if named.symlink_metadata().is_ok() {
                let path = set_aside(&RealFs, &named)?;
                tracing::warn!("a checkpoint of the same step was moved to {}", path.display());
            }
            std::fs::rename(&self.path, &named).map_err(Error::io(&self.path))?;
            sync_parent(&RealFs, &named)?;
            self.path = named;
        }
        Ok(())
    }
}
