//! `manifest.json` lists the files of a complete checkpoint. A folder without a valid manifest is not a checkpoint.

use std::collections::BTreeMap;
use std::path::Path;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use ottava_common::fs::{is_plain_name, is_relative_path};
use ottava_common::hash::{seal, sha256_file, unseal};
use ottava_common::{Error, Result, input};

/// The version of the checkpoint layout that this program writes.
pub const FORMAT: u32 = 2;

/// The oldest version that this program reads. In format 1, the files of `training/` are next to the weights.
const OLDEST_FORMAT: u32 = 1;

/// The maximum size of a manifest. It has a line for each file and cast.
const MAX_BYTES: u64 = 256 << 20;

/// The name of the manifest in its folder.
pub const FILE_NAME: &str = "manifest.json";

/// The content of a manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The version of the layout in which the checkpoint was written.
    pub format: u32,
    /// The version of the program that wrote the checkpoint.
    pub ottava: String,
    /// The last finished optimizer step.
    pub step: u64,
    /// Every file of the checkpoint except the manifest, by its path in the folder (`training/optimizer.safetensors`).
    pub files: BTreeMap<String, FileEntry>,
    /// The fields that the writer adds: the position and the configuration of the run.
    pub extra: Value,
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// The size in bytes.
    pub size: u64,
    /// The SHA-256 of the content. In snapshots in memory, the hash of its chunks ([`ottava_common::hash::sha256_of_chunks`]).
    pub sha256: String,
}

/// The depth of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verify {
    /// Check the manifest and the sizes of all files. This finds interrupted copies.
    Sizes,
    /// Also check the SHA-256 of every file. This finds any damage, and reads all files.
    Hashes,
}

impl Manifest {
    /// Returns whether the checkpoint was saved only on a signal. See [`Progress`](super::Progress).
    pub fn is_interruption(&self) -> bool {
        self.extra.get("is_interruption").and_then(Value::as_bool) == Some(true)
    }

    /// Returns the text of `manifest.json`.
    pub(super) fn render(&self) -> String {
        seal(self)
    }

    /// Reads the manifest of `folder` without checking the files. Returns `None` if there is no manifest. Errors with [`Error::Checkpoint`] if the
    /// manifest is damaged.
    pub fn read(folder: &Path) -> Result<Option<Manifest>> {
        let path = folder.join(FILE_NAME);
        let wrong = |reason: String| Error::Checkpoint(format!("{}: {reason}", path.display()));
        match input::read(&path, MAX_BYTES) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            text => Manifest::parse(&text.map_err(|e| wrong(e.to_string()))?).map(Some).map_err(wrong),
        }
    }

    /// Reads the text of a manifest. Errors with the reason.
    pub(crate) fn parse(text: &[u8]) -> Result<Manifest, String> {
        let value = unseal(text)?;
        // The version determines the meaning of the other fields, so it is checked first.
        if !value["format"].as_u64().is_some_and(|format| (OLDEST_FORMAT.into()..=FORMAT.into()).contains(&format)) {
            return Err(format!("it has format {}, this program reads {OLDEST_FORMAT} to {FORMAT}", value["format"]));
        }
        serde_json::from_value(value).map_err(|e| e.to_string())
    }
}

/// Reads the manifest of `folder` and compares the files with it. Errors with [`Error::Checkpoint`], which names the first file that is missing or
/// damaged.
pub fn verify(folder: &Path, depth: Verify) -> Result<Manifest> {
    let manifest = Manifest::read(folder)?.ok_or_else(|| wrong(folder, FILE_NAME, "there is no such file".into()))?;
    compare(folder, &manifest, depth, |_| true)?;
    Ok(manifest)
}

/// Compares the files of a model folder with its manifest, by their hashes. Files in subfolders are not compared. Does nothing if the folder does not
/// have a manifest. Errors with [`Error::Checkpoint`], which names the first file that is missing or damaged.
pub fn verify_model(folder: &Path) -> Result<()> {
    match Manifest::read(folder)? {
        Some(manifest) => compare(folder, &manifest, Verify::Hashes, is_plain_name),
        None => Ok(()),
    }
}

/// Files that users edit: texts that tell how a model is used. A change of them is a warning, because it damages neither weights nor states.
const EDITED: [&str; 3] = ["chat_template.jinja", "generation_config.json", "tokenizer_config.json"];

/// Errors with `reason` for a file that differs from the manifest. Of a file of [`EDITED`], only warns.
fn expect_edited(folder: &Path, name: &str, reason: String) -> Result<()> {
    if !EDITED.contains(&name) {
        return Err(wrong(folder, name, reason));
    }
    let path = folder.join(name);
    tracing::warn!("{} was changed after the checkpoint was saved; the changed file is used", path.display());
    Ok(())
}

fn compare(folder: &Path, manifest: &Manifest, depth: Verify, included: fn(&str) -> bool) -> Result<()> {
    let mut of_equal_size = Vec::new();
    for (name, entry) in manifest.files.iter().filter(|(name, _)| included(name)) {
        if !is_relative_path(name) {
            return Err(wrong(folder, FILE_NAME, format!("{name:?} is not the path of a file in this folder")));
        }
        let size = file_size(folder, name).map_err(|reason| wrong(folder, name, reason))?;
        if size == entry.size {
            of_equal_size.push((name, entry));
        } else {
            expect_edited(folder, name, format!("{size} bytes, the manifest says {}", entry.size))?;
        }
    }
    if depth == Verify::Sizes {
        return Ok(());
    }
    let differs = |(name, entry): &(&String, &FileEntry)| match sha256_file(&folder.join(name)) {
        Ok((_, found)) if found == entry.sha256 => None,
        Ok(_) => {
            let reason = "its SHA-256 is not that of manifest.json: it is damaged, or was changed; \
                          if the change is meant, delete manifest.json to use this as a plain model folder";
            expect_edited(folder, name, reason.into()).err()
        }
        Err(error) => Some(error),
    };
    // Files are hashed in parallel, since hashing is slower than reading.
    of_equal_size.par_iter().find_map_first(differs).map_or(Ok(()), Err)
}

fn wrong(folder: &Path, name: &str, reason: String) -> Error {
    Error::Checkpoint(format!("{}: {reason}", folder.join(name).display()))
}

/// Returns the size of the file at the relative path `name`. Errors if the path contains a link.
fn file_size(folder: &Path, name: &str) -> Result<u64, String> {
    let mut path = folder.to_path_buf();
    let mut parts = name.split('/').peekable();
    while let Some(part) = parts.next() {
        path.push(part);
        let found = std::fs::symlink_metadata(&path).map_err(|e| e.to_string())?;
        if parts.peek().is_none() && found.is_file() {
            return Ok(found.len());
        }
        if !found.is_dir() {
            let kind = if found.is_symlink() { "a link" } else { "not a file" };
            return Err(format!("{} is {kind}; a checkpoint holds files and folders only", path.display()));
        }
    }
    Err("this is a folder, the manifest lists a file".into())
}
