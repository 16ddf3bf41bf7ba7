//! Writes the distributions of a teacher at the learned tokens of a run's documents.

use super::format::{Distributions, Index, Key, documents, learned, shard_path};
use super::store::Store;
use crate::objective::frozen::{FrozenModel, expect_tokens};
use crate::step::MicroBatch;
use ottava_checkpoint::{WeightFiles, write_file};
use ottava_common::error::{Error, Result};
use ottava_common::fs::{RealFs, create_dirs};
use ottava_data::{Batch, BatchLoader, DataSet, DataState, RowShare, TrainingData};
use ottava_recipe::layer_ranks::ShardPlace;
use ottava_settings::RunConfig;
use ottava_tensor::ops::cast;
use ottava_tensor::{DType, Device, Tensor};
use rayon::prelude::*;
use serde::Serialize;
use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The bytes of ids and log-probabilities after which a shard ends.
const SHARD_BYTES: usize = 128 << 20;

/// The tokens whose logits are in memory at once.
const CHUNK: usize = 2048;

/// The contents of a folder of distributions, as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StoredLogits {
    /// The number of documents with distributions.
    pub documents: u64,
    /// The number of learned tokens of these documents, each with a distribution.
    pub tokens: u64,
}

/// Writes the distributions of the model in the folder `teacher` into the folder `distillation.logits` of `run`, at the learned tokens of all
/// documents of `data` that are not held out. Continues a folder that an earlier call has begun. `progress` gets the number of tokens read so far,
/// and stops the work by returning an error.
///
/// Errors with [`Error::Config`] if the teacher does not fit the run, or if the folder has other distributions; with [`Error::NonFinite`] if a logit
/// is NaN or no logit of a token is finite; and with the errors of `progress`.
pub fn store_logits(
    run: &RunConfig,
    data: &TrainingData,
    teacher: &Path,
    device: &Device,
    progress: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<StoredLogits> {
    let with_teacher = run.with_teacher(teacher);
    let (sizes, recipe) = (with_teacher.teacher_sizes()?, with_teacher.teacher_recipe(device));
    expect_tokens("the teacher", teacher, run, "its distributions are of other tokens")?;
    let distributions = Distributions::of(run, data, fingerprint(teacher)?)?;
    let mut writer = Writer::open(&run.distillation.logits, distributions)?;
    if !writer.index.complete {
        let model = FrozenModel::of_folder("teacher", teacher, &sizes, &recipe, device, run.data.max_length)?;
        let mut scorer = Scorer { model, device: device.clone(), temperature: run.distillation.temperature };
        let scored = scorer.score(run, data, &mut writer, progress);
        // The distributions of scored documents are saved even if a later document fails.
        writer.end_shard()?;
        scored?;
        writer.complete()?;
    }
    let [documents, tokens] = Store::of_index(&writer.folder, &writer.index)?.sizes();
    Ok(StoredLogits { documents, tokens })
}

/// Returns a hash of the weights in `folder`.
fn fingerprint(folder: &Path) -> Result<String> {
    let weights = WeightFiles::open(folder)?;
    let names: Vec<String> =
        weights.names().filter_map(|name| Some(name.strip_suffix(".weight")?.to_string())).collect();
    weights.fingerprint(names.iter())
}

/// The teacher, and the settings of its distributions.
struct Scorer {
    model: FrozenModel,
    device: Device,
    temperature: f64,
}

impl Scorer {
    /// Scores the training documents of each data set once.
    fn score(
        &mut self,
        run: &RunConfig,
        data: &TrainingData,
        writer: &mut Writer,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let mut tokens = 0;
        for set in data.sets.iter().map(std::slice::from_ref::<DataSet>) {
            let start = DataState::start(set, run.seed);
            let mut loader = BatchLoader::new(set, data.layout, &start, RowShare::ALL)?;
            while matches!(loader.state(), DataState::One(state) if state.epoch == 0) {
                let batch = loader.next_batch(run.training.per_device_train_batch_size)?;
                self.score_batch(&batch, writer)?;
                tokens += (batch.inputs.len() - batch.padding_tokens()) as u64;
                progress(tokens)?;
            }
        }
        Ok(())
    }

    /// Adds the distributions of the documents of `batch` that have no distributions yet.
    fn score_batch(&mut self, batch: &Batch, writer: &mut Writer) -> Result<()> {
        let missing: Vec<(Key, Range<usize>)> = documents(batch).filter(|(key, _)| writer.adds(key)).collect();
        // Positions ascend, since documents follow each other.
        let wanted: Vec<usize> = missing.iter().flat_map(|(_, place)| learned(batch, place)).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let mut rows = self.distributions(batch, &wanted, &writer.index.distributions)?.into_iter();
        for (key, place) in missing {
            let count = learned(batch, &place).count();
            writer.add(key, rows.by_ref().take(count).collect())?;
        }
        Ok(())
    }

    /// Returns the distributions at the `wanted` tokens of `batch`.
    fn distributions(&self, batch: &Batch, wanted: &[usize], of: &Distributions) -> Result<Vec<TopRow>> {
        let MicroBatch { inputs, sequences, .. } = MicroBatch::new(batch, &self.device, ShardPlace::ALONE)?;
        let activations = self.model.activations(&inputs, &sequences)?;
        let mut rows = Vec::with_capacity(wanted.len());
        for chunk in wanted.chunk_by(|a, b| a / CHUNK == b / CHUNK) {
            let start = chunk[0] / CHUNK * CHUNK;
            let logits = self.model.logits(&activations.rows(start, (start + CHUNK).min(batch.inputs.len()))?)?;
            let columns = logits.shape()[1];
            let logits: Vec<f32> = cast(&logits, DType::F32)?.to_vec()?;
            let temperature = self.temperature;
            let row = |&token: &usize| {
                TopRow::of(&logits[(token - start) * columns..][..of.vocabulary], of.top_k, temperature)
            };
            rows.extend(chunk.par_iter().map(row).collect::<Result<Vec<_>>>()?);
        }
        Ok(rows)
    }
}

/// The distribution at a token: the likeliest tokens, and the rest.
struct TopRow {
    ids: Vec<i32>,
    log_probs: Vec<f32>,
    rest: f32,
}

impl TopRow {
    /// Returns the `k` likeliest tokens of the distribution with these `logits`, divided by `temperature`. Of equally likely tokens, smaller ids come
    /// first.
    fn of(logits: &[f32], k: usize, temperature: f64) -> Result<TopRow> {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if !largest.is_finite() || logits.iter().any(|logit| logit.is_nan()) {
            return Err(Error::NonFinite("the teacher's logits are not finite; its weights may be damaged".into()));
        }
        let mut order: Vec<usize> = (0..logits.len()).collect();
        let likelier = |a: &usize, b: &usize| logits[*b].partial_cmp(&logits[*a]).expect("no NaN").then(a.cmp(b));
        if k < order.len() {
            order.select_nth_unstable_by(k, likelier);
        }
        let (top, others) = order.split_at_mut(k);
        top.sort_unstable_by(likelier);
        let exponent = |&id: &usize| (f64::from(logits[id]) - f64::from(largest)) / temperature;
        let sum = |ids: &[usize]| -> f64 { ids.iter().map(|id| exponent(id).exp()).sum() };
        let rest = sum(others);
        let lse = (sum(top) + rest).ln();
        Ok(TopRow {
            ids: top.iter().map(|&id| id as i32).collect(),
            log_probs: top.iter().map(|id| (exponent(id) - lse) as f32).collect(),
            rest: (rest.ln() - lse) as f32,
        })
    }
}

/// Writes a folder of distributions, shard by shard.
struct Writer {
    folder: PathBuf,
    index: Index,
    /// The keys of the documents that have distributions.
    known: HashSet<Key>,
    shard: Shard,
}

/// The distributions that are not written to a file yet.
#[derive(Default)]
struct Shard {
    keys: Vec<u8>,
    lengths: Vec<i32>,
    ids: Vec<i32>,
    log_probs: Vec<f32>,
    rest: Vec<f32>,
}

impl Writer {
    /// Begins a new folder, or continues an existing one.
    fn open(folder: &Path, distributions: Distributions) -> Result<Writer> {
        let index = match Index::read(folder)? {
            Some(index) => index,
            None => Index { distributions: distributions.clone(), shards: 0, complete: false },
        };
        if let Some(conflict) = index.distributions.conflict(&distributions) {
            return Err(Error::Config(format!(
                "`distillation.logits` ({}): {conflict}; set `distillation.logits` to another folder, or remove this folder",
                folder.display()
            )));
        }
        create_dirs(&RealFs, folder)?;
        let known = Store::of_index(folder, &index)?.into_keys();
        Ok(Writer { folder: folder.into(), index, known, shard: Shard::default() })
    }

    /// Returns whether the document with this key is new, and marks it as known.
    fn adds(&mut self, key: &Key) -> bool {
        self.known.insert(*key)
    }

    /// Adds the distributions of a document.
    fn add(&mut self, key: Key, rows: Vec<TopRow>) -> Result<()> {
        let shard = &mut self.shard;
        shard.keys.extend(key);
        shard.lengths.push(rows.len() as i32);
        for TopRow { ids, log_probs, rest } in rows {
            shard.ids.extend(ids);
            shard.log_probs.extend(log_probs);
            shard.rest.push(rest);
        }
        match 8 * shard.ids.len() >= SHARD_BYTES {
            true => self.end_shard(),
            false => Ok(()),
        }
    }

    /// Writes the file of the shard, and then the index, which counts the shard.
    fn end_shard(&mut self) -> Result<()> {
        let Shard { keys, lengths, ids, log_probs, rest } = std::mem::take(&mut self.shard);
        if lengths.is_empty() {
            return Ok(());
        }
        let (documents, tokens, k) = (lengths.len(), rest.len(), self.index.distributions.top_k);
        let cpu = &Device::Cpu;
        let tensors = [
            ("keys".to_string(), Tensor::from_slice(cpu, &[documents, 32], &keys)?),
            ("lengths".to_string(), Tensor::from_slice(cpu, &[documents], &lengths)?),
            ("ids".to_string(), Tensor::from_slice(cpu, &[tokens, k], &ids)?),
            ("log_probs".to_string(), Tensor::from_slice(cpu, &[tokens, k], &log_probs)?),
            ("rest".to_string(), Tensor::from_slice(cpu, &[tokens], &rest)?),
        ];
        write_file(&shard_path(&self.folder, self.index.shards), &tensors)?;
        self.index.shards += 1;
        self.index.write(&self.folder)
    }

    /// Marks the folder as complete.
    fn complete(&mut self) -> Result<()> {
        self.index.complete = true;
        self.index.write(&self.folder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_the_likeliest_tokens_and_the_rest() {
        let logits = [0.1f32, 0.4, 0.1, 0.25, 0.15].map(|p: f32| 2.0 * p.ln() + 5.0);
        let TopRow { ids, log_probs, rest } = TopRow::of(&logits, 3, 2.0).unwrap();
        assert_eq!(ids, [1, 3, 4]);
        let near = |found: f32, expected: f32| assert!((found.exp() - expected).abs() < 1e-6, "{found}, {expected}");
        log_probs.iter().zip([0.4, 0.25, 0.15]).for_each(|(&found, expected)| near(found, expected));
        near(rest, 0.2);
        let all = TopRow::of(&logits, 5, 2.0).unwrap();
        assert_eq!((all.ids.as_slice(), all.rest), (&[1, 3, 4, 0, 2][..], f32::NEG_INFINITY), "equal tokens by id");
        assert!(TopRow::of(&[0.0, f32::NAN], 1, 1.0).is_err() && TopRow::of(&[f32::NEG_INFINITY], 1, 1.0).is_err());
    }
}
