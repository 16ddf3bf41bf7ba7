//! Batches for evaluation.

use std::sync::Arc;

use ottava_tensor::ops::IGNORE_INDEX;

use crate::loader::{Batch, validation_tokens};
use crate::order::Split;
use crate::shards::TokenDataset;
use ottava_common::Result;

/// If the last row is shorter than the other rows, its length is a multiple of this number of tokens, which products in FP8 require.
const ALIGNMENT: usize = 16;

/// The length and the stride of the rows into which a text is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// The number of tokens of a row.
    pub seq_len: usize,
    /// The distance in tokens between the starts of consecutive rows. If it is less than `seq_len`, rows overlap: the first row predicts all its
    /// tokens, and every other row predicts only its last `stride` tokens. So these tokens have at least `seq_len - stride` tokens of context.
    pub stride: usize,
}

impl Windows {
    /// Returns the windows of rows that do not overlap.
    pub fn blocks(seq_len: usize) -> Windows {
        Windows { seq_len, stride: seq_len }
    }
}

/// The batches of the validation documents: every token is a target exactly once, except tokens that the loss mask excludes.
///
/// The stream begins with an end-of-sequence token, so that the first document has the same kind of context as the others. If the last row is shorter
/// than the other rows, it is a separate batch.
pub struct EvalLoader {
    dataset: Arc<TokenDataset>,
    split: Split,
    windows: Windows,
    rows: usize,
    /// The number of tokens of the validation documents.
    tokens: u64,
    /// The number of tokens that the rows so far predict.
    predicted: u64,
    /// The position of the next token to predict: a validation document, and an offset in the document.
    next: (u64, usize),
    /// The inputs of the last row and the token after them, in their stored form.
    row: Vec<u32>,
}

impl EvalLoader {
    /// Creates batches of up to `rows` rows; an empty validation set has no batches. Errors with [`ottava_common::Error::Data`] if the tables of the
    /// data can no longer be read. Panics unless `rows` and the stride are at least 1 and the stride is at most `seq_len`, which the caller must
    /// ensure.
    pub fn new(dataset: Arc<TokenDataset>, split: Split, windows: Windows, rows: usize) -> Result<EvalLoader> {
        assert!(rows > 0 && (1..=windows.seq_len).contains(&windows.stride), "{windows:?}, {rows} rows");
        let tokens = validation_tokens(&dataset, &split)?;
        let row = vec![dataset.meta().eos_id];
        Ok(EvalLoader { dataset, split, windows, rows, tokens, predicted: 0, next: (0, 0), row })
    }

    /// Returns the number of tokens of the validation documents.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Returns the number of tokens that the next row predicts.
    fn fresh(&self) -> usize {
        let first = self.predicted == 0;
        let most = if first { self.windows.seq_len } else { self.windows.stride };
        (self.tokens - self.predicted).min(most as u64) as usize
    }

    /// Returns the number of tokens of the next row.
    fn next_len(&self) -> usize {
        self.row.len().min(self.windows.seq_len - self.windows.stride + 1) - 1 + self.fresh()
    }

    /// Appends the next row of the stream to `batch`.
    fn append_row(&mut self, batch: &mut Batch) -> Result<()> {
        let (len, fresh) = (self.next_len(), self.fresh());
        self.row.drain(..self.row.len() + fresh - len - 1);
        while self.row.len() <= len {
            let document = self.split.validation(self.next.0);
            let end = self.dataset.document_len(document)?;
            let stop = end.min(self.next.1 + len + 1 - self.row.len());
            self.row.extend(self.dataset.tokens(document, self.next.1..stop)?);
            self.next = if stop == end { (self.next.0 + 1, 0) } else { (self.next.0, stop) };
        }
        let padding = batch.seq_len - len;
        batch.padding.push(padding);
        batch.inputs.extend(self.row[..len].iter().map(|&token| self.dataset.id(token) as i32));
        batch.inputs.resize(batch.inputs.len() + padding, self.dataset.meta().eos_id as i32);
        batch.targets.resize(batch.targets.len() + len - fresh, IGNORE_INDEX);
        batch.targets.extend(self.row[len + 1 - fresh..].iter().map(|&token| self.dataset.target(token)));
        batch.targets.resize(batch.targets.len() + padding, IGNORE_INDEX);
        self.predicted += fresh as u64;
        Ok(())
    }

    /// Returns the number of tokens of the next row with its padding.
    fn next_padded_len(&self) -> usize {
        self.next_len().next_multiple_of(ALIGNMENT).min(self.windows.seq_len)
    }

    fn next_batch(&mut self) -> Result<Batch> {
        let mut batch = Batch::with_capacity(self.rows, self.next_padded_len());
        batch.rows = 0;
        while batch.rows < self.rows && self.predicted < self.tokens && self.next_padded_len() == batch.seq_len {
            self.append_row(&mut batch)?;
            batch.rows += 1;
        }
        Ok(batch)
    }
}

impl Iterator for EvalLoader {
    type Item = Result<Batch>;

    /// Returns the next batch, or [`ottava_common::Error::Data`] if a file of tokens can no longer be read.
    fn next(&mut self) -> Option<Result<Batch>> {
        (self.predicted < self.tokens).then(|| self.next_batch())
    }
}

#[cfg(test)]
#[path = "eval_loader_tests.rs"]
mod tests;
