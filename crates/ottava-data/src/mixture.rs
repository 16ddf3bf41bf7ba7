//! Batches of one data set, or of several data sets in fixed shares of the tokens.
//!
//! Each row has documents of one data set: the set that is furthest below its share of all tokens so far. Shares are compared as integers, so
//! rounding errors do not accumulate. A set is never a whole row above its share. If the shares of a run are whole numbers of rows, they are exact at
//! the end of the run. Tokens are counted without padding. The choice depends only on earlier choices, so it is the same on any number of ranks.

use std::cmp::Reverse;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::loader::{Batch, LoaderState, RowShare, SetRows};
use crate::order::Split;
use crate::packing::RowLayout;
use crate::shards::TokenDataset;
use crate::statistics::Statistics;
use crate::stream::{ShardStream, StreamRows};
use ottava_common::hash::sha256;
use ottava_common::{Error, Result};

/// A data set of a run.
#[derive(Clone)]
pub struct DataSet {
    /// The name of the data set; empty if the run has only one.
    pub name: String,
    /// The tokens of the data set.
    pub dataset: Arc<TokenDataset>,
    /// The split of its documents into training and validation.
    pub split: Split,
    /// The statistics of its training documents.
    pub statistics: Statistics,
    /// The weight of its share: the share of the tokens is this number divided by the sum over all data sets.
    pub share: u64,
    /// The stream of its training documents. `dataset` then has the validation documents and a sample of the training documents.
    pub stream: Option<Arc<ShardStream>>,
}

impl DataSet {
    /// Creates the only data set of a run with this `layout` and `seed`. Errors with [`Error::Data`] if the tables of the data can no longer be read.
    pub fn only(dataset: Arc<TokenDataset>, split: Split, layout: &RowLayout, seed: u64) -> Result<DataSet> {
        let statistics = Statistics::of(&dataset, &split, layout, seed)?;
        Ok(DataSet { name: String::new(), dataset, split, statistics, share: 1, stream: None })
    }

    /// Returns a hash of files, tokenizer and options, which differs between different data.
    fn key(&self) -> String {
        let key = &self.dataset.meta().key;
        self.stream
            .as_ref()
            .map_or_else(|| key.clone(), |stream| sha256(format!("{key}{}", stream.shards().key()).as_bytes()))
    }

    /// Returns the rows of training documents from `state` on. Has the errors of [`BatchLoader::new`].
    fn rows(&self, layout: RowLayout, state: LoaderState) -> Result<TrainingRows> {
        Ok(match &self.stream {
            None => TrainingRows::Set(SetRows::new(self.dataset.clone(), self.split, layout, state)?),
            Some(stream) => TrainingRows::Stream(StreamRows::new(stream.clone(), layout, state)?),
        })
    }

    /// Returns the beginning of a message about this data set; empty if it has no name.
    pub fn label(&self) -> String {
        if self.name.is_empty() { String::new() } else { format!("data set `{}`: ", self.name) }
    }
}

/// The data of a run.
pub struct TrainingData {
    /// The data sets; at least one.
    pub sets: Vec<DataSet>,
    /// The packing and the length of rows.
    pub layout: RowLayout,
    /// The number of tokens of one epoch of all data sets.
    pub epoch_tokens: f64,
}

impl TrainingData {
    /// Returns a hash of files, tokenizer and options of all data sets, in order. It differs between different data.
    pub fn key(&self) -> String {
        let keys: Vec<String> = self.sets.iter().map(DataSet::key).collect();
        match keys.as_slice() {
            [one] => one.clone(),
            all => sha256(all.concat().as_bytes()),
        }
    }

    /// Returns each data set's share of the tokens of a run, from 0 to 1.
    pub fn shares(&self) -> Vec<f64> {
        let all: u64 = self.sets.iter().map(|set| set.share).sum();
        self.sets.iter().map(|set| set.share as f64 / all as f64).collect()
    }

    /// Returns the number of rows of the first epoch. An incomplete row counts as a fraction.
    pub fn rows(&self) -> f64 {
        match self.sets.as_slice() {
            [one] => one.statistics.rows * (self.epoch_tokens / one.statistics.tokens.max(1) as f64),
            sets => {
                let rows = |(set, share): (&DataSet, f64)| {
                    let Statistics { rows, tokens, .. } = &set.statistics;
                    self.epoch_tokens * share * rows / (*tokens).max(1) as f64
                };
                sets.iter().zip(self.shares()).map(rows).sum()
            }
        }
    }

    /// Returns the maximum number of documents in a row; `None` if attention crosses the edges of documents.
    pub fn max_documents(&self) -> Option<usize> {
        self.sets.iter().filter_map(|set| set.statistics.max_documents).max()
    }

    /// Returns the number of validation documents of all data sets.
    pub fn validation_len(&self) -> u64 {
        self.sets.iter().map(|set| set.split.validation_len()).sum()
    }
}

/// The position of a [`BatchLoader`] in its data. Checkpoints save it, and it is the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum DataState {
    /// The state of a run with one data set.
    One(LoaderState),
    /// The state of each data set of a mixture.
    Mixture(Vec<SetState>),
}

/// The position in one data set of a mixture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetState {
    /// The position in the rows of the data set.
    pub rows: LoaderState,
    /// The number of tokens of the data set in the rows so far, from which the data set of the next row is chosen. For prompts, the number of prompts
    /// so far.
    pub tokens: u64,
}

impl DataState {
    /// Returns the start of the first epoch of each of `sets`. A set is a [`DataSet`] or a [`PromptSet`](crate::PromptSet).
    pub fn start<S>(sets: &[S], seed: u64) -> DataState {
        let rows = LoaderState::start(seed);
        DataState::of(sets.iter().map(|_| SetState { rows, tokens: 0 }).collect())
    }

    /// Returns the state of data sets with these states.
    pub(super) fn of(sets: Vec<SetState>) -> DataState {
        match sets.as_slice() {
            [one] => DataState::One(one.rows),
            _ => DataState::Mixture(sets),
        }
    }

    /// Keeps the position in each data set, and counts tokens from 0 again, because the shares have changed.
    pub fn restart_shares(&mut self) {
        if let DataState::Mixture(sets) = self {
            sets.iter_mut().for_each(|set| set.tokens = 0);
        }
    }

    /// Returns the states of the `count` data sets of a run. Errors with [`Error::Checkpoint`] if the number of states differs.
    pub(super) fn sets(&self, count: usize) -> Result<Vec<SetState>> {
        let states = match self {
            DataState::One(rows) => vec![SetState { rows: *rows, tokens: 0 }],
            DataState::Mixture(sets) => sets.clone(),
        };
        match states.len() == count {
            true => Ok(states),
            false => Err(Error::Checkpoint(format!(
                "the checkpoint has a place in {} data sets, and the run has {count}",
                states.len()
            ))),
        }
    }
}

/// The endless rows of one data set.
enum TrainingRows {
    /// Of a data set that is prepared as a whole.
    Set(SetRows),
    /// Of files that are fetched while the run trains.
    Stream(StreamRows),
}

impl TrainingRows {
    fn row(&mut self, batch: &mut Batch) -> Result<u64> {
        match self {
            TrainingRows::Set(rows) => rows.row(batch),
            TrainingRows::Stream(rows) => rows.row(batch),
        }
    }

    fn skip(&mut self) -> Result<u64> {
        match self {
            TrainingRows::Set(rows) => rows.skip(),
            TrainingRows::Stream(rows) => rows.skip(),
        }
    }

    fn state(&self) -> LoaderState {
        match self {
            TrainingRows::Set(rows) => rows.state(),
            TrainingRows::Stream(rows) => rows.state(),
        }
    }
}

/// An endless stream of training batches.
pub struct BatchLoader {
    sets: Vec<TrainingRows>,
    shares: Vec<u64>,
    /// The number of tokens of each data set in the rows so far.
    tokens: Vec<u64>,
    layout: RowLayout,
    shard: RowShare,
}

impl BatchLoader {
    /// Starts at `state`, in constant time; at a position of a stream, when its files are there. Errors with [`Error::Checkpoint`] if the state does not
    /// fit the data, and with [`Error::External`] if a file of a stream cannot be fetched. Panics if rows have no tokens, if
    /// the packing is `auto`, or if the rank is not below the world, which the caller must exclude.
    pub fn new(sets: &[DataSet], layout: RowLayout, state: &DataState, shard: RowShare) -> Result<BatchLoader> {
        assert!(shard.rank < shard.world, "{shard:?}");
        let states = state.sets(sets.len())?;
        let rows = sets.iter().zip(&states).map(|(set, state)| {
            let rows = set.rows(layout, state.rows);
            rows.map_err(|error| match error {
                Error::Checkpoint(text) => Error::Checkpoint(format!("{}{text}", set.label())),
                other => other,
            })
        });
        Ok(BatchLoader {
            sets: rows.collect::<Result<_>>()?,
            shares: sets.iter().map(|set| set.share).collect(),
            tokens: states.iter().map(|state| state.tokens).collect(),
            layout,
            shard,
        })
    }

    /// Returns the next `rows` rows of this rank. All ranks must request the same numbers of rows. Errors with [`Error::Data`] if a file of tokens
    /// can no longer be read, and with [`Error::External`] if the next files of a stream cannot be fetched.
    pub fn next_batch(&mut self, rows: usize) -> Result<Batch> {
        let mut batch = Batch::with_capacity(rows, self.layout.seq_len);
        batch.documents = self.layout.document_mask.then(Vec::new);
        for row in 0..rows * self.shard.world {
            let set = next_set(&self.shares, &self.tokens);
            self.tokens[set] += match row % self.shard.world == self.shard.rank {
                true => self.sets[set].row(&mut batch)?,
                false => self.sets[set].skip()?,
            };
        }
        Ok(batch)
    }

    /// Returns the position of the next batch.
    pub fn state(&self) -> DataState {
        let sets = self.sets.iter().zip(&self.tokens).map(|(set, &tokens)| SetState { rows: set.state(), tokens });
        DataState::of(sets.collect())
    }

    /// Returns the number of tokens of each data set in the rows so far.
    pub fn tokens(&self) -> &[u64] {
        &self.tokens
    }
}

/// Returns the data set of the next row: the set that is furthest below its share of all `counts` so far.
pub(super) fn next_set(shares: &[u64], counts: &[u64]) -> usize {
    let all: i128 = counts.iter().map(|&count| i128::from(count)).sum();
    let whole: i128 = shares.iter().map(|&share| i128::from(share)).sum();
    let missing = |set: usize| i128::from(shares[set]) * all - whole * i128::from(counts[set]);
    (0..shares.len()).max_by_key(|&set| (missing(set), shares[set], Reverse(set))).expect("a run has data")
}

#[cfg(test)]
#[path = "mixture_tests.rs"]
mod tests;
