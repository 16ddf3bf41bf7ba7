//! Batches of one data set, or of several in fixed shares of the tokens.
//!
//! Each row has documents of one set: of the one that is furthest below its share of all tokens so far. Shares are compared as integers, so no
//! rounding adds up: no set is ever a whole row above its share, and shares that are whole rows of a run are exact to the token at its end.
//! Tokens are counted in documents, without padding. The choice depends only on what was chosen before, so it is the same on any number of ranks.

use std::cmp::Reverse;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::loader::{Batch, LoaderState, RowShare, SetRows};
use crate::order::Split;
use crate::packing::RowLayout;
use crate::shards::TokenDataset;
use crate::statistics::Statistics;
use ottava_common::hash::sha256;
use ottava_common::{Error, Result};

/// A data set of a run.
#[derive(Clone)]
pub struct DataSet {
    /// Its name; empty if the run has only one.
    pub name: String,
    /// Its tokens.
    pub dataset: Arc<TokenDataset>,
    /// Which of its documents are for validation.
    pub split: Split,
    /// Numbers of its documents to train on.
    pub statistics: Statistics,
    /// Its share of the tokens, divided by the sum of the shares of all sets.
    pub share: u64,
}

impl DataSet {
    /// The only set of a run with this `layout` and `seed`. Errors with [`Error::Data`] when the tables of the data can no longer be read.
    pub fn only(dataset: Arc<TokenDataset>, split: Split, layout: &RowLayout, seed: u64) -> Result<DataSet> {
        let statistics = Statistics::of(&dataset, &split, layout, seed)?;
        Ok(DataSet { name: String::new(), dataset, split, statistics, share: 1 })
    }

    /// The start of a message about this set; empty if it has no name.
    pub fn label(&self) -> String {
        if self.name.is_empty() { String::new() } else { format!("data set `{}`: ", self.name) }
    }
}

/// The data of a run.
pub struct TrainingData {
    /// Its sets; at least one.
    pub sets: Vec<DataSet>,
    /// Packing and length of rows.
    pub layout: RowLayout,
    /// Tokens of one epoch of all sets.
    pub epoch_tokens: f64,
}

impl TrainingData {
    /// What tells the data from others: a hash of files, tokenizer and options of all sets, in their order.
    pub fn key(&self) -> String {
        let keys: Vec<&str> = self.sets.iter().map(|set| set.dataset.meta().key.as_str()).collect();
        match keys.as_slice() {
            [one] => (*one).to_string(),
            all => sha256(all.concat().as_bytes()),
        }
    }

    /// The share of each set of the tokens of a run, from 0 to 1.
    pub fn shares(&self) -> Vec<f64> {
        let all: u64 = self.sets.iter().map(|set| set.share).sum();
        self.sets.iter().map(|set| set.share as f64 / all as f64).collect()
    }

    /// Rows of the first epoch; a part of a row counts as a part.
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

    /// The most documents that a row can have; `None` where attention does not see their edges.
    pub fn max_documents(&self) -> Option<usize> {
        self.sets.iter().filter_map(|set| set.statistics.max_documents).max()
    }

    /// Validation documents of all sets.
    pub fn validation_len(&self) -> u64 {
        self.sets.iter().map(|set| set.split.validation_len()).sum()
    }
}

/// The position of a [`BatchLoader`] in its data, as checkpoints save it; the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum DataState {
    /// The state of a run with one set.
    One(LoaderState),
    /// The state of each set of a mixture.
    Mixture(Vec<SetState>),
}

/// The position in one set of a mixture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetState {
    /// The position in its rows.
    pub rows: LoaderState,
    /// Its tokens in the rows so far, which decide the set of the next row; of a set of prompts, the number of its prompts so far.
    pub tokens: u64,
}

impl DataState {
    /// The start of the first epoch of each of `sets`, each a [`DataSet`] or a [`PromptSet`](crate::PromptSet).
    pub fn start<S>(sets: &[S], seed: u64) -> DataState {
        let rows = LoaderState::start(seed);
        DataState::of(sets.iter().map(|_| SetState { rows, tokens: 0 }).collect())
    }

    /// The state of sets with these states.
    pub(super) fn of(sets: Vec<SetState>) -> DataState {
        match sets.as_slice() {
            [one] => DataState::One(one.rows),
            _ => DataState::Mixture(sets),
        }
    }

    /// Keeps the place in each set, and counts tokens from there on for other shares.
    pub fn restart_shares(&mut self) {
        if let DataState::Mixture(sets) = self {
            sets.iter_mut().for_each(|set| set.tokens = 0);
        }
    }

    /// The states of a run with `count` sets. Errors with [`Error::Checkpoint`] when there are others.
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

/// An endless stream of training batches.
pub struct BatchLoader {
    sets: Vec<SetRows>,
    shares: Vec<u64>,
    /// Tokens of each set in the rows so far.
    tokens: Vec<u64>,
    layout: RowLayout,
    shard: RowShare,
}

impl BatchLoader {
    /// Starts at `state`, in constant time. Errors with [`Error::Checkpoint`] when the state does not fit the data. Panics when rows have
    /// no token, the packing is `auto` or the rank is not below the world: bugs of the caller.
    pub fn new(sets: &[DataSet], layout: RowLayout, state: &DataState, shard: RowShare) -> Result<BatchLoader> {
        assert!(shard.rank < shard.world, "{shard:?}");
        let states = state.sets(sets.len())?;
        let rows = sets.iter().zip(&states).map(|(set, state)| {
            let rows = SetRows::new(set.dataset.clone(), set.split, layout, state.rows);
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

    /// The next `rows` rows of this rank. All ranks have to ask for the same numbers of rows. Errors with
    /// [`Error::Data`] when a file of tokens can no longer be read.
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

    /// The start of the next batch.
    pub fn state(&self) -> DataState {
        let sets = self.sets.iter().zip(&self.tokens).map(|(set, &tokens)| SetState { rows: set.state(), tokens });
        DataState::of(sets.collect())
    }

    /// Tokens of each set in the rows so far.
    pub fn tokens(&self) -> &[u64] {
        &self.tokens
    }
}

/// The set of the next row: the set that is furthest below its share of all `counts` so far.
pub(super) fn next_set(shares: &[u64], counts: &[u64]) -> usize {
    let all: i128 = counts.iter().map(|&count| i128::from(count)).sum();
    let whole: i128 = shares.iter().map(|&share| i128::from(share)).sum();
    let missing = |set: usize| i128::from(shares[set]) * all - whole * i128::from(counts[set]);
    (0..shares.len()).max_by_key(|&set| (missing(set), shares[set], Reverse(set))).expect("a run has data")
}

#[cfg(test)]
#[path = "mixture_tests.rs"]
mod tests;
