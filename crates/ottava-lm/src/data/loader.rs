//! Batches for training.
//!
//! Documents are concatenated into one endless stream, in another order each epoch, and the stream is cut into rows.
//! A row of `seq_len + 1` tokens gives `seq_len` inputs and the `seq_len` tokens that follow them; the next row
//! starts with the last token of this one, so every token is a target exactly once.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::order::{Permutation, Split};
use super::shards::TokenDataset;
use crate::{Error, Result};

/// Inputs and targets, `[rows, seq_len]` each, row after row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Token ids.
    pub inputs: Vec<i32>,
    /// The token that follows each input, or [`ottava_tensor::ops::IGNORE_INDEX`].
    pub targets: Vec<i32>,
    /// Number of rows.
    pub rows: usize,
    /// Tokens in a row.
    pub seq_len: usize,
}

impl Batch {
    /// An empty batch with room for `rows` rows.
    pub(super) fn with_capacity(rows: usize, seq_len: usize) -> Batch {
        let size = rows * seq_len;
        Batch { inputs: Vec::with_capacity(size), targets: Vec::with_capacity(size), rows, seq_len }
    }
}

/// This process among those that share the data: it takes every `world`th row, from row `rank` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Its index, from 0.
    pub rank: usize,
    /// The number of processes.
    pub world: usize,
}

impl Shard {
    /// All rows for one process.
    pub const WHOLE: Shard = Shard { rank: 0, world: 1 };
}

/// The position of a [`BatchLoader`] in its data, as checkpoints save it; the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoaderState {
    /// Decides the order of documents.
    pub seed: u64,
    /// How many times all documents were seen.
    pub epoch: u64,
    /// The current document's place in the order of this epoch.
    pub document: u64,
    /// The next input token within that document.
    pub offset: u64,
}

impl LoaderState {
    /// The start of the first epoch.
    pub fn start(seed: u64) -> LoaderState {
        LoaderState { seed, epoch: 0, document: 0, offset: 0 }
    }
}

/// An endless stream of training batches.
pub struct BatchLoader {
    dataset: Arc<TokenDataset>,
    split: Split,
    seq_len: usize,
    shard: Shard,
    cursor: Cursor,
}

impl BatchLoader {
    /// Starts at `state`, in constant time. Errors with [`Error::Checkpoint`] when the state does not fit the data. Panics when `seq_len`
    /// is 0 or the rank is not below the world: bugs of the caller.
    pub fn new(
        dataset: Arc<TokenDataset>,
        split: Split,
        seq_len: usize,
        state: LoaderState,
        shard: Shard,
    ) -> Result<BatchLoader> {
        assert!(seq_len > 0 && shard.rank < shard.world, "seq_len {seq_len}, {shard:?}");
        let documents = split.train_len();
        let cursor = Cursor { state, order: Permutation::new(documents, state.seed, state.epoch) };
        if state.document >= documents || state.offset >= cursor.document_len(&dataset, &split) {
            return Err(Error::Checkpoint(format!(
                "the saved place in the data (token {} of document {}) does not exist among {documents} documents; \
                 the data or val_set_size has changed",
                state.offset, state.document
            )));
        }
        Ok(BatchLoader { dataset, split, seq_len, shard, cursor })
    }

    /// The next `rows` rows of this rank. All ranks have to ask for the same numbers of rows. Errors with
    /// [`Error::Data`] when a file of tokens can no longer be read.
    pub fn next_batch(&mut self, rows: usize) -> Result<Batch> {
        let mut batch = Batch::with_capacity(rows, self.seq_len);
        for _ in 0..rows {
            self.skip(self.shard.rank)?;
            self.row(&mut batch)?;
            self.skip(self.shard.world - 1 - self.shard.rank)?;
        }
        Ok(batch)
    }

    /// The start of the next batch.
    pub fn state(&self) -> LoaderState {
        self.cursor.state
    }

    /// Skips rows of other ranks without reading their tokens.
    fn skip(&mut self, rows: usize) -> Result<()> {
        self.cursor.advance(&self.dataset, &self.split, (rows * self.seq_len) as u64, |_, _| Ok(()))
    }

    fn row(&mut self, batch: &mut Batch) -> Result<()> {
        let (dataset, split, seq_len) = (&self.dataset, &self.split, self.seq_len);
        let mut tokens = Vec::with_capacity(seq_len + 1);
        let mut take = |document, range| {
            tokens.extend(dataset.ids(document, range)?.into_iter().map(|id| id as i32));
            Ok(())
        };
        self.cursor.advance(dataset, split, seq_len as u64, &mut take)?;
        // One token more, which the next row reads again as its first input.
        let mut ahead = self.cursor;
        ahead.advance(dataset, split, 1, &mut take)?;
        batch.inputs.extend_from_slice(&tokens[..seq_len]);
        batch.targets.extend_from_slice(&tokens[1..]);
        Ok(())
    }
}

/// A position in the endless stream; always on an existing token.
#[derive(Clone, Copy)]
struct Cursor {
    state: LoaderState,
    order: Permutation,
}

impl Cursor {
    fn document(&self, split: &Split) -> usize {
        split.train(self.order.get(self.state.document))
    }

    fn document_len(&self, dataset: &TokenDataset, split: &Split) -> u64 {
        dataset.document_len(self.document(split)) as u64
    }

    /// Advances by `count` tokens and calls `take` with each range of a document on the way.
    fn advance(
        &mut self,
        dataset: &TokenDataset,
        split: &Split,
        mut count: u64,
        mut take: impl FnMut(usize, std::ops::Range<usize>) -> Result<()>,
    ) -> Result<()> {
        while count > 0 {
            let document = self.document(split);
            let (start, len) = (self.state.offset, dataset.document_len(document) as u64);
            let step = count.min(len - start);
            take(document, start as usize..(start + step) as usize)?;
            count -= step;
            self.state.offset += step;
            if self.state.offset == len {
                self.next_document();
            }
        }
        Ok(())
    }

    fn next_document(&mut self) {
        self.state.offset = 0;
        self.state.document += 1;
        if self.state.document == self.order.len() {
            self.state.document = 0;
            self.state.epoch += 1;
            self.order = Permutation::new(self.order.len(), self.state.seed, self.state.epoch);
        }
    }
}

/// Tokens of the validation documents.
pub fn validation_tokens(dataset: &TokenDataset, split: &Split) -> u64 {
    (0..split.validation_len()).map(|i| dataset.document_len(split.validation(i)) as u64).sum()
}

/// Bytes of text of the validation documents, what bits per byte is counted over.
pub fn validation_bytes(dataset: &TokenDataset, split: &Split) -> u64 {
    (0..split.validation_len()).map(|i| u64::from(dataset.document_bytes(split.validation(i)))).sum()
}

/// Tokens of one epoch of training.
pub fn train_tokens(dataset: &TokenDataset, split: &Split) -> u64 {
    dataset.total_tokens() - validation_tokens(dataset, split)
}

#[cfg(test)]
#[path = "loader_tests.rs"]
pub(super) mod tests;
