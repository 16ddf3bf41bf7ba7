//! The model at the root of a run, so that programs that read a model folder also read the folder of the run.
//!
//! `model` is a link to the newest checkpoint, and each file of weights is a link through `model`. So one rename of a link changes all weights at once.
//! Small files, such as the configuration and the tokenizer, are copies: programs that write into the folder of the run do not change the checkpoint
//! through them. [`COPIES`] lists the copies, so that a file of the user is not replaced.

use ottava_checkpoint::adapter::CONFIG_FILE;
use ottava_checkpoint::{Verify, latest_complete};
use ottava_common::fs::{RealFs, replace_file};
use ottava_common::hash::sha256;
use ottava_common::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// The name of the link to the checkpoint.
const MODEL: &str = "model";

/// The list of the copies: a JSON object with the SHA-256 of each.
const COPIES: &str = ".model-files.json";

/// The files of a checkpoint that only Ottava reads.
const OWN: [&str; 1] = ["manifest.json"];

/// Returns whether the model in the folder of a run is made of links and copies of its newest checkpoint, and no other model.
pub fn has_links(run: &Path) -> bool {
    let copies = copies(run);
    let files = fs::read_dir(run).into_iter().flatten().flatten().filter(|file| is_weights(&file.file_name()));
    let weights: Vec<bool> = files.map(|file| is_link_of_ours(&file.path(), &file.file_name())).collect();
    ["config.json", CONFIG_FILE].iter().any(|name| copies.contains_key(*name))
        && !weights.is_empty()
        && weights.iter().all(|is_ours| *is_ours)
}

/// Links and copies at the root of a run.
pub struct ModelLinks {
    run: PathBuf,
    /// The warnings that were logged.
    warned: BTreeSet<String>,
}

impl ModelLinks {
    /// The links of the run in the folder `run`. They lead to its newest complete checkpoint, if there is one.
    pub fn new(run: &Path) -> ModelLinks {
        let mut links = ModelLinks { run: run.to_path_buf(), warned: BTreeSet::new() };
        links.lead_to_newest();
        links
    }

    /// Makes the links lead to `checkpoint`, a folder in `checkpoints/` of the run, and changes no other file. If the file system has no links, warns and makes
    /// none.
    pub fn lead_to(&mut self, checkpoint: &Path) {
        match link(&self.run, checkpoint) {
            Ok(changed) => changed.iter().for_each(|file| {
                let why = "this file was changed and stays; delete it to get the file of the newest checkpoint";
                self.warn(format!("{}: {why}", file.display()));
            }),
            Err(error) => self.warn(format!("{error}: until then, name a checkpoint itself as the folder of a model")),
        }
    }

    /// Lets the links lead to the newest complete checkpoint if theirs is gone, as after a return to an earlier step.
    pub fn mend(&mut self) {
        if self.is_gone() {
            self.lead_to_newest();
        }
    }

    /// Returns whether there is a link to a checkpoint that does not exist.
    fn is_gone(&self) -> bool {
        let model = self.run.join(MODEL);
        model.is_symlink() && !model.exists()
    }

    fn lead_to_newest(&mut self) {
        let checkpoints = self.run.join("checkpoints");
        if !checkpoints.is_dir() {
            return;
        }
        match latest_complete(&checkpoints, Verify::Sizes).map(|latest| latest.complete) {
            Ok(Some((newest, _))) => self.lead_to(&newest),
            Ok(None) if self.is_gone() => {
                let _ = fs::remove_file(self.run.join(MODEL));
            }
            Ok(None) => {}
            Err(error) => self.warn(error.to_string()),
        }
    }

    /// Logs a warning once.
    fn warn(&mut self, text: String) {
        if !self.warned.contains(&text) {
            tracing::warn!("{text}");
            self.warned.insert(text);
        }
    }
}

/// Makes links and copies of the files of `checkpoint`. Returns the copies that were changed since, which stay.
fn link(run: &Path, checkpoint: &Path) -> Result<Vec<PathBuf>> {
    let model = run.join(MODEL);
    if model.exists() && !model.is_symlink() {
        return Err(Error::Config(format!(
            "{}: a link to the newest checkpoint has this name; rename what is there",
            model.display()
        )));
    }
    replace_link(&model, &Path::new("checkpoints").join(checkpoint.file_name().unwrap_or_default()))?;
    for entry in fs::read_dir(run).map_err(Error::io(run))?.flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        // A file that this checkpoint does not have, such as a part of a larger model, or a small file.
        if is_link_of_ours(&path, &name) && (!is_weights(&name) || !checkpoint.join(&name).exists()) {
            fs::remove_file(&path).map_err(Error::io(&path))?;
        }
    }
    let (before, mut after, mut changed) = (copies(run), BTreeMap::new(), Vec::new());
    for entry in fs::read_dir(checkpoint).map_err(Error::io(checkpoint))?.flatten() {
        let (path, name) = (run.join(entry.file_name()), entry.file_name());
        if !entry.path().is_file() || OWN.iter().any(|own| name == **own) {
            continue;
        }
        let is_free = !path.exists() && !path.is_symlink();
        if is_weights(&name) {
            if is_free {
                symlink(Path::new(MODEL).join(&name), &path).map_err(Error::io(&path))?;
            }
            continue;
        }
        let name = name.to_string_lossy().into_owned();
        let bytes = fs::read(entry.path()).map_err(Error::io(&entry.path()))?;
        let (hash, known) = (sha256(&bytes), before.get(&name));
        let found = if path.is_symlink() { None } else { fs::read(&path).ok().map(|bytes| sha256(&bytes)) };
        match known {
            _ if is_free => replace_file(&RealFs, &path, &bytes)?,
            // A file of the user or of the run.
            None => continue,
            Some(_) if found.as_ref() == Some(&hash) => {}
            Some(_) if found.as_ref() == known => replace_file(&RealFs, &path, &bytes)?,
            Some(_) => changed.push(path),
        }
        after.insert(name, hash);
    }
    for (name, hash) in before.iter().filter(|(name, _)| !after.contains_key(*name)) {
        let path = run.join(name);
        if !path.is_symlink() && fs::read(&path).is_ok_and(|bytes| sha256(&bytes) == *hash) {
            fs::remove_file(&path).map_err(Error::io(&path))?;
        }
    }
    if after != before {
        let text = serde_json::to_string(&after).expect("names and hashes are plain data");
        replace_file(&RealFs, &run.join(COPIES), text.as_bytes())?;
    }
    Ok(changed)
}

/// Reads the names and hashes of the copies. A list that cannot be read counts as empty.
fn copies(run: &Path) -> BTreeMap<String, String> {
    let text = fs::read_to_string(run.join(COPIES)).unwrap_or_default();
    let copies: BTreeMap<String, String> = serde_json::from_str(&text).unwrap_or_default();
    copies.into_iter().filter(|(name, _)| !name.contains('/') && name != "..").collect()
}

/// Whether a file of a checkpoint has weights, which are too large for a copy.
fn is_weights(name: &OsStr) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "safetensors")
}

/// Whether `path` is a link of this module with the name `name`.
fn is_link_of_ours(path: &Path, name: &OsStr) -> bool {
    fs::read_link(path).is_ok_and(|target| target == Path::new(MODEL).join(name))
}

/// Makes a link at `path` to `target`, or replaces the link there, in one step.
fn replace_link(path: &Path, target: &Path) -> Result<()> {
    let partial = path.with_extension("partial");
    match fs::remove_file(&partial) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(Error::io(&partial)(error)),
        _ => {}
    }
    symlink(target, &partial).map_err(Error::io(&partial))?;
    fs::rename(&partial, path).map_err(Error::io(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn the_root_of_a_run_has_the_files_of_the_newest_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let run = &folder.path().join("run");
        let checkpoint = |step: u64| run.join(format!("checkpoints/checkpoint-{step}"));
        write(&checkpoint(1).join("config.json"), "1");
        write(&checkpoint(1).join("part.safetensors"), "1");
        write(&checkpoint(1).join("manifest.json"), "1");
        write(&checkpoint(1).join("training/index.json"), "1");
        write(&checkpoint(2).join("config.json"), "2");
        write(&checkpoint(2).join("run.json"), "of the model");
        write(&run.join("run.json"), "of the run");
        assert!(!has_links(run));
        link(run, &checkpoint(1)).unwrap();
        assert!(has_links(run) && run.join("part.safetensors").is_file());
        assert!(!run.join("manifest.json").exists() && !run.join("training").exists());
        link(run, &checkpoint(2)).unwrap();
        let read = |name: &str| fs::read_to_string(run.join(name)).unwrap();
        assert_eq!((read("config.json").as_str(), read("run.json").as_str()), ("2", "of the run"));
        assert!(!run.join("part.safetensors").is_symlink(), "a file that the model no longer has");
        // A program that writes a small file does not change the checkpoint, and its file stays.
        write(&run.join("config.json"), "of the user");
        assert_eq!(fs::read_to_string(checkpoint(2).join("config.json")).unwrap(), "2");
        assert_eq!(link(run, &checkpoint(1)).unwrap(), [run.join("config.json")]);
        assert_eq!((read("config.json").as_str(), read("part.safetensors").as_str()), ("of the user", "1"));
        fs::remove_file(run.join("config.json")).unwrap();
        assert!(link(run, &checkpoint(2)).unwrap().is_empty() && read("config.json") == "2");
        // The links go with the folder of the run.
        fs::rename(run, folder.path().join("moved")).unwrap();
        assert_eq!(fs::read_to_string(folder.path().join("moved/config.json")).unwrap(), "2");
    }

    #[test]
    fn links_to_a_checkpoint_that_is_gone_are_mended() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = folder.path().join("checkpoints/checkpoint-1");
        write(&checkpoint.join("part.safetensors"), "1");
        let mut links = ModelLinks::new(folder.path());
        links.lead_to(&checkpoint);
        assert!(folder.path().join("part.safetensors").exists());
        fs::rename(&checkpoint, folder.path().join("checkpoints/abandoned-checkpoint-1")).unwrap();
        links.mend();
        assert!(!folder.path().join(MODEL).is_symlink(), "there is no complete checkpoint to lead to");
    }

    #[test]
    fn a_folder_of_the_user_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        write(&folder.path().join("checkpoints/checkpoint-1/config.json"), "1");
        write(&folder.path().join("model/config.json"), "of the user");
        let error = link(folder.path(), &folder.path().join("checkpoints/checkpoint-1")).unwrap_err().to_string();
        assert!(error.contains("rename what is there"), "{error}");
        assert_eq!(fs::read_to_string(folder.path().join("model/config.json")).unwrap(), "of the user");
    }
}
