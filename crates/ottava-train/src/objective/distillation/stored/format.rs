//! The folder of stored distributions. `index.json` describes the distributions, and has the number of shards. A shard is a safetensors file with the
//! distributions at the learned tokens of documents, document by document:
//!
//! | tensor | type and shape | contents |
//! |---|---|---|
//! | `keys` | U8 `[documents, 32]` | SHA-256 of each document |
//! | `lengths` | I32 `[documents]` | learned tokens of each document |
//! | `ids` | I32 `[tokens, k]` | the likeliest tokens, the likeliest first |
//! | `log_probs` | F32 `[tokens, k]` | log-probabilities of the likeliest tokens, normalized over the whole vocabulary |
//! | `rest` | F32 `[tokens]` | the log-probability of all other tokens together |
//!
//! A document is found by the hash of its inputs and targets, so neither the order of documents nor their packing matters. BF16 would halve the bytes
//! of log-probabilities, but its relative error of up to 0.4 % changes a probability of e⁻⁸ by up to 3 %. `rest` is stored, since 1 minus the sum of
//! the probabilities loses all digits to cancellation if the sum is near 1.

use ottava_common::error::{Error, Result};
use ottava_common::fs::{RealFs, replace_file};
use ottava_common::hash::{seal, sha256_of, unseal};
use ottava_common::input;
use ottava_data::{Batch, TrainingData};
use ottava_settings::RunConfig;
use ottava_tensor::ops::IGNORE_INDEX;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The version of the format.
const FORMAT: u32 = 1;

const INDEX: &str = "index.json";

const MAX_INDEX_BYTES: u64 = 1 << 20;

/// SHA-256 of a document.
pub(super) type Key = [u8; 32];

/// The description of stored distributions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Distributions {
    format: u32,
    /// A hash of the teacher's weights.
    teacher: String,
    pub(super) vocabulary: usize,
    pub(super) top_k: usize,
    temperature: f64,
    /// Tokens of a row; longer documents are truncated.
    max_length: usize,
    /// The key of the data, which depends on the tokenizer.
    data: String,
    /// The number of documents that are not held out.
    documents: u64,
}

/// The index of a folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    pub(super) distributions: Distributions,
    pub(super) shards: usize,
    /// Whether all documents have their distributions.
    pub(super) complete: bool,
}

impl Distributions {
    /// Describes the distributions that the run of `config` needs for its `data`, by a teacher with the hash `teacher`.
    pub(super) fn of(config: &RunConfig, data: &TrainingData, teacher: String) -> Result<Distributions> {
        Ok(Distributions {
            format: FORMAT,
            teacher,
            vocabulary: config.decoder_config()?.vocabulary,
            top_k: config.known_tokens()?,
            temperature: config.distillation.temperature,
            max_length: config.data.max_length,
            data: data.key(),
            documents: data.sets.iter().map(|set| set.split.train_len()).sum(),
        })
    }

    /// Returns why a run that needs `wanted` cannot read these distributions; `None` if it can. A run may read fewer tokens of each distribution, and
    /// the distributions of any teacher.
    pub(super) fn misfit(&self, wanted: &Distributions) -> Option<String> {
        let numbers = [
            ("tokens in the vocabulary", self.vocabulary as f64, wanted.vocabulary as f64),
            ("`distillation.temperature`", self.temperature, wanted.temperature),
            ("`data.max_length`", self.max_length as f64, wanted.max_length as f64),
            ("documents to train on", self.documents as f64, wanted.documents as f64),
        ];
        if self.top_k < wanted.top_k {
            let text = "tokens are known of each distribution, and `distillation.top_k` is";
            return Some(format!("{} {text} {}", self.top_k, wanted.top_k));
        }
        let other = numbers.into_iter().find(|(_, own, wanted)| own != wanted);
        let other = other.map(|(what, own, wanted)| format!("{what}: {own} in the folder, {wanted} in the run"));
        let of_data = || "the distributions are of other data, or of tokens of another tokenizer".to_string();
        other.or_else(|| (self.data != wanted.data).then(of_data))
    }

    /// Returns why the distributions `others` cannot be added to these; `None` if they can.
    pub(super) fn conflict(&self, others: &Distributions) -> Option<String> {
        match self.misfit(others) {
            Some(misfit) => Some(misfit),
            None if self.top_k != others.top_k => {
                Some(format!("`distillation.top_k`: {} in the folder, {} in the run", self.top_k, others.top_k))
            }
            None => (self.teacher != others.teacher).then(|| "the distributions are of another teacher".into()),
        }
    }
}

impl Index {
    /// Reads the index of `folder`. Returns `None` if the folder has no index.
    ///
    /// Errors with [`Error::Data`] if the index is damaged, or has another format.
    pub(super) fn read(folder: &Path) -> Result<Option<Index>> {
        let path = folder.join(INDEX);
        if !path.exists() {
            return Ok(None);
        }
        let wrong = |reason: String| {
            Error::Data(format!(
                "{}: {reason}; remove the folder {} and run `ottava logits` again",
                path.display(),
                folder.display()
            ))
        };
        let value = unseal(&input::read(&path, MAX_INDEX_BYTES).map_err(Error::io(&path))?).map_err(wrong)?;
        let format = &value["distributions"]["format"];
        if *format != FORMAT {
            return Err(wrong(format!("it has format {format}, this program reads {FORMAT}")));
        }
        serde_json::from_value(value).map(Some).map_err(|error| wrong(error.to_string()))
    }

    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        replace_file(&RealFs, &folder.join(INDEX), seal(self).as_bytes())
    }
}

/// The file of a shard.
pub(super) fn shard_path(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("shard-{number:05}.safetensors"))
}

/// Returns the keys of the documents of `batch` that have learned tokens, and the positions of their tokens in the batch.
pub(super) fn documents(batch: &Batch) -> impl Iterator<Item = (Key, Range<usize>)> {
    let row = |row: usize| row * batch.seq_len..(row + 1) * batch.seq_len - batch.padding[row];
    let places: Vec<Range<usize>> = match &batch.documents {
        None => (0..batch.rows).map(row).collect(),
        Some(lengths) => {
            let mut end = 0;
            let next = |length: &usize| {
                end += length;
                end - length..end
            };
            lengths.iter().map(next).collect()
        }
    };
    let learned = |place: &Range<usize>| learned(batch, place).next().is_some();
    places.into_iter().filter(learned).map(|place| {
        let bytes = |ids: &[i32]| -> Vec<u8> { ids[place.clone()].iter().flat_map(|id| id.to_le_bytes()).collect() };
        (sha256_of(&[&bytes(&batch.inputs), &bytes(&batch.targets)]), place)
    })
}

/// Returns the positions of the learned tokens in `place`.
pub(super) fn learned(batch: &Batch, place: &Range<usize>) -> impl Iterator<Item = usize> {
    place.clone().filter(|&token| batch.targets[token] != IGNORE_INDEX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A document has the same key in any row, with and without a document mask.
    #[test]
    fn keys_do_not_depend_on_rows() {
        let x = IGNORE_INDEX;
        let rows = Batch {
            padding: vec![1, 2],
            ..Batch::whole(vec![5, 6, 7, 0, 8, 9, 0, 0], vec![x, 7, 1, x, 9, 2, x, x], 2)
        };
        let packed =
            Batch { documents: Some(vec![2, 1, 3]), ..Batch::whole(vec![8, 9, 4, 5, 6, 7], vec![9, 2, x, x, 7, 1], 1) };
        let keys = |batch: &Batch| documents(batch).collect::<Vec<_>>();
        let (rows, packed) = (keys(&rows), keys(&packed));
        assert_eq!((rows[0].1.clone(), rows[1].1.clone()), (0..3, 4..6));
        assert_eq!((packed[0].1.clone(), packed[1].1.clone()), (0..2, 3..6), "a document without learned tokens");
        assert_eq!((rows[0].0, rows[1].0), (packed[1].0, packed[0].0));
        let other = Batch::whole(vec![5, 6, 7], vec![6, 7, 1], 1);
        assert_ne!(keys(&other)[0].0, rows[0].0, "another token is learned");
    }
}
