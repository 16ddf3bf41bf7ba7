//! Batches for evaluation.

use std::sync::Arc;

use ottava_tensor::ops::IGNORE_INDEX;

use super::loader::{Batch, Shard, validation_tokens};
use super::order::Split;
use super::shards::TokenDataset;
use crate::Result;

/// The validation documents in batches: every token of them is a target exactly once.
///
/// The stream starts with an end-of-sequence token as the context of the first document, as all others have it. What
/// is left of the last batch is filled with rows that the loss ignores, so that every rank gets the same number of
/// batches of the same shape.
pub struct EvalLoader {
    dataset: Arc<TokenDataset>,
    split: Split,
    seq_len: usize,
    rows: usize,
    shard: Shard,
    tokens: u64,
    /// The next batch, counted over all ranks together.
    batch: usize,
    /// The place of the next token to predict: a validation document and an offset in it.
    next: (u64, usize),
    /// The token before it.
    last: u32,
}

impl EvalLoader {
    /// Batches of `rows` rows for this rank. With an empty validation set there are none.
    pub fn new(dataset: Arc<TokenDataset>, split: Split, seq_len: usize, rows: usize, shard: Shard) -> EvalLoader {
        assert!(seq_len > 0 && rows > 0 && shard.rank < shard.world, "seq_len {seq_len}, {rows} rows, {shard:?}");
        let tokens = validation_tokens(&dataset, &split);
        let last = dataset.meta().eos_id;
        EvalLoader { dataset, split, seq_len, rows, shard, tokens, batch: 0, next: (0, 0), last }
    }

    /// Number of batches that each rank gets.
    pub fn batches(&self) -> usize {
        self.tokens.div_ceil((self.seq_len * self.rows * self.shard.world) as u64) as usize
    }

    /// Appends the next row of the stream to `batch`.
    fn row(&mut self, batch: &mut Batch) -> Result<()> {
        let end = batch.targets.len() + self.seq_len;
        while batch.targets.len() < end && self.next.0 < self.split.validation_len() {
            let document = self.split.validation(self.next.0);
            let len = self.dataset.document_len(document);
            let stop = len.min(self.next.1 + end - batch.targets.len());
            for id in self.dataset.ids(document, self.next.1..stop)? {
                batch.inputs.push(self.last as i32);
                batch.targets.push(id as i32);
                self.last = id;
            }
            self.next = if stop == len { (self.next.0 + 1, 0) } else { (self.next.0, stop) };
        }
        batch.inputs.resize(end, self.dataset.meta().eos_id as i32);
        batch.targets.resize(end, IGNORE_INDEX);
        Ok(())
    }

    fn next_batch(&mut self) -> Result<Batch> {
        let mut batch = Batch::with_capacity(self.rows, self.seq_len);
        for row in 0..self.rows * self.shard.world {
            if row % self.shard.world == self.shard.rank {
                self.row(&mut batch)?;
            } else {
                self.row(&mut Batch::with_capacity(1, self.seq_len))?;
            }
        }
        Ok(batch)
    }
}

impl Iterator for EvalLoader {
    type Item = Result<Batch>;

    /// The next batch, or [`crate::Error::Data`] when a file of tokens can no longer be read.
    fn next(&mut self) -> Option<Result<Batch>> {
        (self.batch < self.batches()).then(|| {
            self.batch += 1;
            self.next_batch()
        })
    }
}

#[cfg(test)]
#[path = "eval_loader_tests.rs"]
mod tests;
