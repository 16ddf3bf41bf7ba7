//! Names of the Hugging Face Hub and objects of stores in settings and on the command line: the one place that replaces them by local paths.

use super::remote_objects::{Listed, bucket, is_page, listed, partners};
use super::remote_shards::shards;
use crate::output::Transfer;
use ottava_common::fs::{RealFs, replace_file};
use ottava_common::{Error, Result, input};
use ottava_data::Shards;
use ottava_hub::{DataId, Hub, Kind, Pins, RepoId, Watch};
use ottava_settings::{DatasetConfig, Loaded, RunConfig, WeightInit, without_queries};
use ottava_store::{Bucket, is_store, page};
use ottava_tensor::comm::Group;
use std::cell::RefCell;
use std::path::{Path, PathBuf};

/// What a command reads of models and data. Each value includes the values before it.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
pub enum Reads {
    /// The commits of names: configurations of models, and no data.
    Names,
    /// Configurations and tokenizers of models, and data.
    Shapes,
    /// Also weights.
    Weights,
}

/// The splits that evaluations read, the first one that exists.
pub const VALIDATION: &[&str] = &["validation", "test"];

/// The file in the folder of a run with the commits that its names stand for.
const PINS: &str = "hub.json";

/// The maximum size of this file in bytes.
const MAX_PINS: u64 = 16 << 20;

/// The Hub, with the commits that names stand for.
#[derive(Default)]
pub struct Remote {
    pins: RefCell<Pins>,
}

/// Reads the file of a run as [`RunConfig::load`] does, and replaces names of the Hub by local paths.
pub fn load_run(path: &Path, settings: &[String], reads: Reads) -> Result<Loaded> {
    let remote = Remote::default();
    RunConfig::load_with(path, settings, &mut |config| remote.resolve(config, reads))
}

/// Returns the folder of a model or an adapter on the command line: `path`, or the folder in the cache if `path` is a name of the Hub.
pub fn model(path: &Path) -> Result<PathBuf> {
    Ok(Remote::default().find(path, Reads::Weights)?.unwrap_or_else(|| path.to_path_buf()))
}

/// Returns the folder in the cache with the configurations of the model that `path` names on the Hub, without its weights; `None` if `path` is a local
/// path.
pub fn shapes(path: &Path) -> Result<Option<PathBuf>> {
    Remote::default().find(path, Reads::Shapes)
}

/// Replaces patterns of objects in stores, such as `s3://BUCKET/PATTERN`, and addresses of files of web servers by local copies in the folder `copies`. With
/// [`Reads::Names`], they stay.
fn objects(paths: &[PathBuf], copies: &Path, reads: Reads) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        expect_no_page(path)?;
        let text = path.to_string_lossy();
        let is_page = is_page(&text);
        if reads == Reads::Names || !(is_page || is_store(&text)) {
            files.push(path.clone());
            continue;
        }
        if is_page {
            let (mut transfer, shown) = (Transfer::new("downloaded"), text.split('?').next().unwrap_or_default());
            files.push(page("data.train_files", &text, copies, &mut |done, total| transfer.at(shown, done, total))?);
            continue;
        }
        let (bucket, pattern) = bucket("data.train_files", &text)?;
        files.extend(copied(&bucket, &pattern, copies)?);
    }
    Ok(files)
}

/// Returns the local copies of what `pattern` names in `bucket`: files, or a folder, whose files the reader of the data chooses.
fn copied(bucket: &Bucket, pattern: &str, copies: &Path) -> Result<Vec<PathBuf>> {
    let Listed { objects: mut found, start, is_folder } = listed(bucket, pattern)?;
    let text = bucket.place(pattern);
    let names: Vec<String> = found.iter().map(|object| object.name.clone()).collect();
    if !is_folder {
        found.extend(partners(bucket, &names)?);
    }
    let mut transfer = Transfer::new("downloaded");
    let root = bucket.copies(&found, &start, copies, &mut |done, total| transfer.at(&text, done, total))?;
    if is_folder {
        return Ok(vec![root]);
    }
    // A pair of Megatron-LM counts once, as in a pattern of local files.
    let is_index = |name: &str| name.strip_suffix(".idx").is_some_and(|stem| names.contains(&format!("{stem}.bin")));
    Ok(names.iter().filter(|name| !is_index(name)).map(|name| root.join(&name[start.len()..])).collect())
}

impl Remote {
    /// Reads the commits that the run in `output_dir` uses, so that the run resumes with the same files.
    ///
    /// Errors with [`Error::Config`] if their file cannot be read.
    pub fn of_run(output_dir: &Path) -> Result<Remote> {
        let path = output_dir.join(PINS);
        if !path.exists() {
            return Ok(Remote::default());
        }
        let text =
            input::read_text(&path, MAX_PINS).map_err(|why| Error::Config(format!("{}: {why}", path.display())))?;
        let pins = Pins::from_json(&text).ok_or_else(|| {
            let remedy = "restore it, or delete it to resume with the newest commits";
            Error::Config(format!("{}: this is no list of commits of the Hub; {remedy}", path.display()))
        })?;
        Ok(Remote { pins: RefCell::new(pins) })
    }

    /// Stores the commits in the folder of the run, if there are any.
    pub fn save(&self, output_dir: &Path) -> Result<()> {
        let pins = self.pins.borrow();
        match pins.is_empty() {
            true => Ok(()),
            false => replace_file(&RealFs, &output_dir.join(PINS), pins.to_json().as_bytes()),
        }
    }

    /// Gives the commits of rank 0 to all ranks. Otherwise ranks that ask for the same branch at different times may get different commits.
    pub fn share(&self, comm: &Group) -> Result<()> {
        let all = comm.agree("the commits of names of the Hub", self.pins.borrow().to_json().as_bytes())?;
        let of_first = all.first().and_then(|bytes| Pins::from_json(&String::from_utf8_lossy(bytes)));
        self.pins.replace(of_first.unwrap_or_default());
        Ok(())
    }

    /// Finds the commits of all names in `config`, and downloads no data and no weights.
    pub fn look_up(&self, config: &RunConfig) -> Result<()> {
        config.clone().resolved(&mut |config| self.resolve(config, Reads::Names)).map(drop)
    }

    /// Replaces names of the Hub in `config` by local paths.
    pub fn resolve(&self, config: &mut RunConfig, reads: Reads) -> Result<()> {
        let without_weights = if reads == Reads::Weights { Reads::Shapes } else { reads };
        let of_model = if config.model.init == WeightInit::Random { without_weights } else { reads };
        let folders = [
            (&mut config.model.path, of_model),
            (&mut config.model.tokenizer, without_weights),
            (&mut config.lora.init_from, reads),
            (&mut config.distillation.teacher, reads),
        ];
        for (path, reads) in folders {
            if let Some(local) = self.find(path, reads)? {
                *path = local;
            }
        }
        let (copies, data) = (config.cache_dir().join("objects"), &mut config.data);
        let (is_listed, mut shards) = (!data.shards.is_empty(), Vec::new());
        let of_sets =
            data.datasets.iter_mut().map(|DatasetConfig { train_files, val_files, .. }| (train_files, val_files));
        for (train, validation) in of_sets.chain([(&mut data.train_files, &mut data.val_files)]) {
            if !data.streaming || reads == Reads::Names {
                *train = self.data_files(&objects(train, &copies, reads)?, &["train"], reads)?;
            } else if !is_listed && !train.is_empty() {
                shards.push(self.shards(train, &copies)?);
                // Addresses may hold keys, and later uses of the settings need names alone.
                train.iter_mut().for_each(|path| *path = without_queries_of(path));
            }
            *validation = self.data_files(&objects(validation, &copies, reads)?, VALIDATION, reads)?;
        }
        data.shards.extend(shards);
        Ok(())
    }

    /// Lists the files of streamed data, which are fetched later.
    fn shards(&self, paths: &[PathBuf], copies: &Path) -> Result<Shards> {
        let ask = |id: &DataId, splits: &[&str]| {
            self.ask(|hub| hub.data_shards(id, splits, &mut Transfer::new("downloaded")))
        };
        shards(paths, copies, &ask, &|| self.pins.borrow().clone())
    }

    /// Returns the local files of `paths`. A name of the Hub stands for the files of a split, by default the first of
    /// `splits` that the data set has. With [`Reads::Names`], names stay.
    pub fn data_files(&self, paths: &[PathBuf], splits: &[&str], reads: Reads) -> Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for path in paths {
            match DataId::of_path(path)? {
                Some(id) if reads == Reads::Names => {
                    self.ask(|hub| hub.look_up_data(&id, splits, &mut Transfer::new("downloaded")))?;
                    files.push(path.clone());
                }
                Some(id) => {
                    files.extend(self.ask(|hub| hub.data_files(&id, splits, &mut Transfer::new("downloaded")))?)
                }
                None => files.push(path.clone()),
            }
        }
        Ok(files)
    }

    /// Returns the folder in the cache of the model that `path` names on the Hub; `None` if `path` is a local path.
    fn find(&self, path: &Path, reads: Reads) -> Result<Option<PathBuf>> {
        expect_no_page(path)?;
        let Some(id) = RepoId::of_path(Kind::Model, path) else { return Ok(None) };
        self.ask(|hub| hub.model(&id, reads == Reads::Weights, &mut Transfer::new("downloaded"))).map(Some)
    }

    /// Asks the Hub with the known commits, and keeps the commits that it has asked for.
    fn ask<T>(&self, question: impl FnOnce(&Hub) -> Result<T>) -> Result<T> {
        let hub = Hub::from_env()?.with_pins(self.pins.borrow().clone());
        let answer = question(&hub)?;
        self.pins.replace(hub.pins());
        Ok(answer)
    }
}

/// Returns `path`, without the query if it is the address of a file of a web server.
fn without_queries_of(path: &Path) -> PathBuf {
    let text = path.to_string_lossy();
    if is_page(&text) { PathBuf::from(without_queries(&text)) } else { path.to_path_buf() }
}

/// Errors if `path` is the address of a page of the Hub.
fn expect_no_page(path: &Path) -> Result<()> {
    match RepoId::name_of_page(&path.to_string_lossy()) {
        Some(name) => Err(Error::Config(format!(
            "{}: this is the address of a page of the Hub; write its name, {name}",
            path.display()
        ))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ottava_store::testing::FakeStore;

    #[test]
    fn a_folder_is_one_path_and_a_pair_of_megatron_counts_once() {
        let (store, folder) = (FakeStore::start(), tempfile::tempdir().unwrap());
        let variable = |name: &str| match name {
            "AWS_ENDPOINT_URL" => Some(store.url()),
            "AWS_ACCESS_KEY_ID" | "AWS_SECRET_ACCESS_KEY" => Some("id".to_string()),
            _ => None,
        };
        let bucket = Bucket::with_variables("setting", "s3://corpus", &variable).unwrap();
        for name in ["a/ids.bin", "a/ids.idx", "a/b/c.txt", "a2/d.txt"] {
            store.set(&format!("corpus/{name}"), Some(name.as_bytes()));
        }
        let read = |pattern: &str| -> Vec<(String, bool)> {
            let of_path = |path: PathBuf| {
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                if path.is_dir() {
                    return ("folder".to_string(), path.join("b/c.txt").exists() && !path.join("d.txt").exists());
                }
                (name, path.with_extension("bin").exists() && path.with_extension("idx").exists())
            };
            copied(&bucket, pattern, folder.path()).unwrap().into_iter().map(of_path).collect()
        };
        for (pattern, expected) in [
            ("a/ids.bin", [("ids.bin", true)]),
            ("a/ids.idx", [("ids.idx", true)]),
            ("a/ids.*", [("ids.bin", true)]),
            ("a/b/*", [("c.txt", false)]),
            ("a", [("folder", true)]),
        ] {
            let expected = expected.map(|(name, is_whole)| (name.to_string(), is_whole));
            assert_eq!(read(pattern), expected, "{pattern}");
        }
        assert!(matches!(copied(&bucket, "a3", folder.path()), Err(Error::Data(_))));
    }
}
