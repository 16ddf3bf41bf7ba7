//! Links at the root of a run to the files of its newest checkpoint, so that programs that read a model folder also read the folder of the run.
//!
//! `model` is a link to the checkpoint, and each file of the model is a link through `model`. So one rename of a link changes all files at once.

use ottava_checkpoint::adapter::CONFIG_FILE;
use ottava_common::{Error, Result};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

/// The name of the link to the checkpoint.
const MODEL: &str = "model";

/// The files of a checkpoint that only Ottava reads.
const OWN: [&str; 1] = ["manifest.json"];

/// Returns whether the model in the folder of a run is a link to its newest checkpoint, and no copy of a model.
pub fn has_links(run: &Path) -> bool {
    ["config.json", CONFIG_FILE].iter().any(|name| is_ours(&run.join(name), name.as_ref()))
}

/// Links the files of `checkpoint`, a folder in `checkpoints/` of the run in the folder `run`. Other files of the run stay as they are. A file system
/// without links gets none, and a warning.
pub fn link_model(run: &Path, checkpoint: &Path) {
    if let Err(error) = link(run, checkpoint) {
        tracing::warn!(
            "{error}: the folder of the run has no links to its newest checkpoint; name the checkpoint itself instead"
        );
    }
}

fn link(run: &Path, checkpoint: &Path) -> Result<()> {
    let model = run.join(MODEL);
    if model.exists() && !model.is_symlink() {
        return Err(Error::Config(format!("{}: this is no link", model.display())));
    }
    let name = checkpoint.file_name().unwrap_or_default();
    replace_link(&model, &Path::new("checkpoints").join(name))?;
    for entry in fs::read_dir(run).map_err(Error::io(run))?.flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        // A file that this checkpoint does not have, such as a part of a larger model.
        if is_ours(&path, &name) && !checkpoint.join(&name).exists() {
            fs::remove_file(&path).map_err(Error::io(&path))?;
        }
    }
    for entry in fs::read_dir(checkpoint).map_err(Error::io(checkpoint))?.flatten() {
        let (path, name) = (run.join(entry.file_name()), entry.file_name());
        let is_own = OWN.iter().any(|own| name == **own);
        if entry.path().is_file() && !is_own && !path.exists() && !path.is_symlink() {
            symlink(Path::new(MODEL).join(&name), &path).map_err(Error::io(&path))?;
        }
    }
    Ok(())
}

/// Whether `path` is a link of this module with the name `name`.
fn is_ours(path: &Path, name: &std::ffi::OsStr) -> bool {
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
        // The links go with the folder of the run.
        fs::rename(run, folder.path().join("moved")).unwrap();
        assert_eq!(fs::read_to_string(folder.path().join("moved/config.json")).unwrap(), "2");
    }

    #[test]
    fn a_folder_of_the_user_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        write(&folder.path().join("checkpoints/checkpoint-1/config.json"), "1");
        write(&folder.path().join("model/config.json"), "of the user");
        let error = link(folder.path(), &folder.path().join("checkpoints/checkpoint-1")).unwrap_err().to_string();
        assert!(error.ends_with("model: this is no link"), "{error}");
        assert_eq!(fs::read_to_string(folder.path().join("model/config.json")).unwrap(), "of the user");
    }
}
