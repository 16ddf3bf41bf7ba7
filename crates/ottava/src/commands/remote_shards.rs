//! The files of streamed training data: local files, objects of stores, files of web servers and files of the Hub, each fetched when the run needs it.

use super::remote_objects::{Listed, bucket, is_page, listed, partners};
use ottava_common::{Error, Result};
use ottava_data::{ShardSource, Shards, SplitUse, expand};
use ottava_hub::{DataId, Hub, Pins, Watch};
use ottava_store::{Bucket, Object, is_store, page, remove_page};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The setting that names the files.
const SETTING: &str = "data.train_files";

/// The splits of data sets that are trained on.
const TRAINING: &[&str] = &["train"];

/// A file of the data.
enum Shard {
    Local(PathBuf),
    /// An object, and the object that belongs to it, such as the index of tokens of Megatron-LM.
    Objects(Arc<Bucket>, Vec<Object>),
    /// A file of a web server.
    Page(String),
    /// A file of a data set of the Hub.
    Hub(Box<DataId>),
}

/// The files of a run.
struct Files {
    shards: Vec<Shard>,
    /// The folder of copies.
    copies: PathBuf,
    pins: Pins,
}

/// Shows no progress.
struct Silent;

impl Watch for Silent {
    fn at(&mut self, _: &str, _: u64, _: u64) {}
}

/// Asks the Hub for the files of one of some splits of a data set.
type Ask<'a> = dyn Fn(&DataId, &[&str]) -> Result<Vec<DataId>> + 'a;

/// Lists the files that `paths` name, without fetching them. Copies will be in the folder `copies`. `ask` asks the Hub.
///
/// Errors if a path names nothing, and with [`Error::Config`] for a folder of a store.
pub(super) fn shards(paths: &[PathBuf], copies: &Path, ask: &Ask, pins: &dyn Fn() -> Pins) -> Result<Shards> {
    let mut shards = Vec::new();
    for path in paths {
        let text = path.to_string_lossy();
        if let Some(id) = DataId::of_path(path)? {
            shards.extend(ask(&id, TRAINING)?.into_iter().map(|file| Shard::Hub(Box::new(file))));
        } else if is_page(&text) {
            shards.push(Shard::Page(text.into_owned()));
        } else if is_store(&text) {
            shards.extend(objects(&text)?);
        } else {
            shards.extend(expand(std::slice::from_ref(path), SplitUse::Training)?.into_iter().map(Shard::Local));
        }
    }
    Ok(Shards::new(Files { shards, copies: copies.to_path_buf(), pins: pins() }))
}

/// Lists the objects that the address `text` of a store names.
fn objects(text: &str) -> Result<Vec<Shard>> {
    let (bucket, pattern) = bucket(SETTING, text)?;
    let bucket = Arc::new(bucket);
    let Listed { objects, start: _, is_folder } = listed(&bucket, &pattern)?;
    if is_folder {
        return Err(Error::Config(format!(
            "`{SETTING}` names {text}, which is a folder of a store; with `data.streaming`, name its files by a pattern, such as {text}/*.jsonl"
        )));
    }
    let names: Vec<String> = objects.iter().map(|object| object.name.clone()).collect();
    let of_others = partners(&bucket, &names)?;
    let all: Vec<Object> = objects.into_iter().chain(of_others).collect();
    let stem = |object: &Object| object.name.rsplit_once('.').map(|(stem, _)| stem.to_string());
    let is_index = |object: &Object| {
        object.name.ends_with(".idx")
            && all.iter().any(|other| other.name.ends_with(".bin") && stem(other) == stem(object))
    };
    let with_index = |object: &Object| {
        let index =
            all.iter().filter(|other| object.name.ends_with(".bin") && is_index(other) && stem(other) == stem(object));
        std::iter::once(object).chain(index).cloned().collect()
    };
    let files = all.iter().filter(|object| !is_index(object));
    Ok(files.map(|object| Shard::Objects(bucket.clone(), with_index(object))).collect())
}

impl ShardSource for Files {
    fn count(&self) -> usize {
        self.shards.len()
    }

    fn name(&self, shard: usize) -> String {
        match &self.shards[shard] {
            Shard::Local(path) => path.display().to_string(),
            Shard::Objects(bucket, objects) => bucket.place(&objects[0].name),
            // A query may hold a key.
            Shard::Page(address) => address.split('?').next().unwrap_or_default().to_string(),
            Shard::Hub(id) => format!("{}/{}", id.repo, id.pattern),
        }
    }

    fn version(&self, shard: usize) -> String {
        match &self.shards[shard] {
            Shard::Local(path) => {
                std::fs::metadata(path).map_or_else(|_| String::new(), |found| found.len().to_string())
            }
            Shard::Objects(_, objects) => {
                objects.iter().map(|object| format!("{}-{}", object.size, object.etag)).collect::<Vec<_>>().join("+")
            }
            Shard::Page(_) | Shard::Hub(_) => String::new(),
        }
    }

    fn fetch(&self, shard: usize) -> Result<PathBuf> {
        match &self.shards[shard] {
            Shard::Local(path) => Ok(path.clone()),
            Shard::Objects(bucket, objects) => {
                Ok(bucket.copies(objects, "", &self.copies, &mut |_, _| {})?.join(&objects[0].name))
            }
            Shard::Page(address) => page(SETTING, address, &self.copies, &mut |_, _| {}),
            Shard::Hub(id) => {
                let files = Hub::from_env()?.with_pins(self.pins.clone()).data_files(id, TRAINING, &mut Silent)?;
                files
                    .into_iter()
                    .next()
                    .ok_or_else(|| Error::Data(format!("{}: there is no such file", self.name(shard))))
            }
        }
    }

    fn remove(&self, shard: usize) {
        match &self.shards[shard] {
            // The cache of the Hub is shared with other programs.
            Shard::Local(_) | Shard::Hub(_) => {}
            Shard::Objects(bucket, objects) => bucket.remove_copies(objects, "", &self.copies),
            Shard::Page(address) => remove_page(address, &self.copies),
        }
    }
}
