//! Reads stored distributions.

use super::format::{Distributions, Index, Key, documents, learned, shard_path};
use ottava_checkpoint::ModelFiles;
use ottava_common::error::{Error, Result};
use ottava_data::Batch;
use ottava_tensor::DType;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

/// A folder of distributions.
pub(super) struct Store {
    folder: PathBuf,
    /// The size of the vocabulary.
    vocabulary: usize,
    /// The number of tokens of a stored distribution.
    top_k: usize,
    shards: Vec<ModelFiles>,
    places: HashMap<Key, Place>,
}

/// Where the distributions of a document are.
#[derive(Clone, Copy)]
struct Place {
    shard: usize,
    /// The index of the first distribution in the shard.
    first: usize,
    /// The number of distributions.
    tokens: usize,
}

/// The distributions at the tokens of a micro-batch, and zeros at tokens that are not learned.
pub(super) struct TopRows {
    /// The likeliest tokens, `[T, k]`.
    pub(super) ids: Vec<i32>,
    /// The log-probabilities of `ids`, `[T, k]`.
    pub(super) log_probs: Vec<f32>,
    /// The log-probability of all other tokens together, `[T]`.
    pub(super) rest: Vec<f32>,
}

impl Store {
    /// Opens the distributions in `folder` for a run that needs `wanted`.
    ///
    /// Errors with [`Error::Config`] if the folder has no distributions or does not fit `wanted`, and with [`Error::Data`] if the folder is
    /// incomplete or damaged.
    pub(super) fn open(folder: &Path, wanted: &Distributions) -> Result<Store> {
        let wrong = |reason: &str| Error::Config(format!("`distillation.logits` ({}): {reason}", folder.display()));
        let index = Index::read(folder)?.ok_or_else(|| {
            wrong(
                "there is no index.json; `ottava logits RUN.toml --teacher FOLDER` writes the teacher's distributions",
            )
        })?;
        if let Some(misfit) = index.distributions.misfit(wanted) {
            return Err(wrong(&format!("{misfit}; change the settings, or run `ottava logits` with another folder")));
        }
        if !index.complete {
            return Err(Error::Data(format!(
                "`distillation.logits` ({}): some documents have no distributions yet; run `ottava logits` again to write them",
                folder.display()
            )));
        }
        Store::of_index(folder, &index)
    }

    /// Opens the shards of `index`.
    pub(super) fn of_index(folder: &Path, index: &Index) -> Result<Store> {
        let Distributions { vocabulary, top_k, .. } = index.distributions;
        let (shards, places) = (Vec::new(), HashMap::new());
        let mut store = Store { folder: folder.into(), vocabulary, top_k, shards, places };
        (0..index.shards).try_for_each(|number| store.add(number))?;
        Ok(store)
    }

    fn add(&mut self, number: usize) -> Result<()> {
        let files = ModelFiles::open_file(&shard_path(&self.folder, number))?;
        let [documents, tokens] = ["lengths", "rest"].map(|name| files.info(name).map(|info| info.elements()));
        let (documents, tokens) = (documents?, tokens?);
        for (name, dtype, shape) in [
            ("keys", DType::U8, vec![documents, 32]),
            ("lengths", DType::I32, vec![documents]),
            ("ids", DType::I32, vec![tokens, self.top_k]),
            ("log_probs", DType::F32, vec![tokens, self.top_k]),
            ("rest", DType::F32, vec![tokens]),
        ] {
            let info = files.info(name)?;
            if (info.dtype, &info.shape) != (dtype, &shape) {
                let found = format!("{:?} {:?}", info.dtype, info.shape);
                return Err(self.wrong(number, format!("`{name}` is {found}, and not {dtype:?} {shape:?}")));
            }
        }
        let (keys, lengths) = (files.read("keys")?, files.read("lengths")?);
        let mut first = 0;
        for (key, length) in keys.as_chunks::<32>().0.iter().zip(lengths.as_chunks::<4>().0) {
            let length = usize::try_from(i32::from_le_bytes(*length)).ok().filter(|length| *length <= tokens - first);
            let damaged = || self.wrong(number, "the sum of `lengths` is not the number of distributions".into());
            let length = length.ok_or_else(damaged)?;
            self.places.insert(*key, Place { shard: number, first, tokens: length });
            first += length;
        }
        self.shards.push(files);
        Ok(())
    }

    /// Returns the keys of the documents that have distributions.
    pub(super) fn into_keys(self) -> HashSet<Key> {
        self.places.into_keys().collect()
    }

    /// Returns the number of documents, and the number of their learned tokens.
    pub(super) fn sizes(&self) -> [u64; 2] {
        [self.places.len() as u64, self.places.values().map(|place| place.tokens as u64).sum()]
    }

    /// Returns the distributions at the learned tokens of `batch`, with their `top_k` likeliest tokens. All other tokens are part of the rest.
    ///
    /// Errors with [`Error::Data`] if a document has no distributions, or if its distributions are damaged.
    pub(super) fn read(&self, batch: &Batch, top_k: usize) -> Result<TopRows> {
        let tokens = batch.inputs.len();
        let mut rows =
            TopRows { ids: vec![0; tokens * top_k], log_probs: vec![0.0; tokens * top_k], rest: vec![0.0; tokens] };
        for (key, document) in documents(batch) {
            let learned: Vec<usize> = learned(batch, &document).collect();
            let place = self.places.get(&key).filter(|place| place.tokens == learned.len());
            let place = *place.ok_or_else(|| {
                Error::Data(format!(
                    "`distillation.logits` ({}) has no distributions of a document of {} tokens; the data have changed: remove the folder and run \
                     `ottava logits` again",
                    self.folder.display(),
                    document.len()
                ))
            })?;
            self.read_document(place, &learned, top_k, &mut rows)?;
        }
        Ok(rows)
    }

    /// Reads into `rows` the distributions at `place` of a document with learned tokens at the positions `learned`.
    fn read_document(&self, place: Place, learned: &[usize], top_k: usize, rows: &mut TopRows) -> Result<()> {
        let files = &self.shards[place.shard];
        let words = |name: &str, width: usize| -> Result<Vec<[u8; 4]>> {
            let range = 4 * width * place.first..4 * width * (place.first + place.tokens);
            Ok(files.read_bytes(name, range)?.as_chunks::<4>().0.to_vec())
        };
        let ids: Vec<i32> = words("ids", self.top_k)?.into_iter().map(i32::from_le_bytes).collect();
        let log_probs: Vec<f32> = words("log_probs", self.top_k)?.into_iter().map(f32::from_le_bytes).collect();
        let rest: Vec<f32> = words("rest", 1)?.into_iter().map(f32::from_le_bytes).collect();
        let stored = ids.chunks(self.top_k).zip(log_probs.chunks(self.top_k)).zip(rest);
        for (number, (((ids, log_probs), rest), &token)) in stored.zip(learned).enumerate() {
            if let Some(reason) = self.damage(ids, log_probs, rest) {
                return Err(self.wrong(place.shard, format!("distribution {} {reason}", place.first + number)));
            }
            rows.ids[token * top_k..][..top_k].copy_from_slice(&ids[..top_k]);
            rows.log_probs[token * top_k..][..top_k].copy_from_slice(&log_probs[..top_k]);
            rows.rest[token] = with_rest(rest, &log_probs[top_k..]);
        }
        Ok(())
    }

    /// Returns how a distribution is damaged; `None` if it is not.
    fn damage(&self, ids: &[i32], log_probs: &[f32], rest: f32) -> Option<&'static str> {
        let mut sorted = ids.to_vec();
        sorted.sort_unstable();
        let is_log_prob = |&value: &f32| value < 1e-3;
        if sorted[0] < 0 || sorted[sorted.len() - 1] as usize >= self.vocabulary {
            return Some("has an id that is not in the vocabulary");
        }
        if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
            return Some("has an id twice");
        }
        if !log_probs.iter().chain([&rest]).all(is_log_prob) || log_probs.windows(2).any(|pair| pair[0] < pair[1]) {
            return Some("has numbers that are no log-probabilities in descending order");
        }
        None
    }

    fn wrong(&self, shard: usize, reason: String) -> Error {
        let path = shard_path(&self.folder, shard);
        let folder = self.folder.display();
        Error::Data(format!(
            "{}: {reason}; it is damaged: remove the folder {folder} and run `ottava logits` again",
            path.display()
        ))
    }
}

/// Returns the log of the sum of the probabilities of `rest` and `others`.
fn with_rest(rest: f32, others: &[f32]) -> f32 {
    let largest = others.iter().copied().fold(rest, f32::max);
    if largest == f32::NEG_INFINITY {
        return largest;
    }
    let sum: f64 = others.iter().chain([&rest]).map(|&value| f64::from(value - largest).exp()).sum();
    (f64::from(largest) + sum.ln()) as f32
}
