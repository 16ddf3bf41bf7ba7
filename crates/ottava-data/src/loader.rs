//! Batches for training.
//!
//! Rows are either cut from one endless stream of documents, or have whole documents ([`RowLayout`]). Each epoch has another order. In a stream,
//! `seq_len + 1` tokens give a row of `seq_len` inputs, and the target of each input is the token after it. The next row begins with the last token
//! of this row, so every token is a target exactly once. In a row of whole documents, the last token of a document is not an input.

use std::borrow::Cow;
use std::sync::Arc;

use ottava_tensor::ops::IGNORE_INDEX;
use serde::{Deserialize, Serialize};

use crate::order::{Permutation, Split};
use crate::packing::{Packing, RowLayout, Window};
use crate::shards::TokenDataset;
use ottava_common::{Error, Result};

/// The inputs and targets of a batch, each `[rows, seq_len]` in row-major order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Token ids.
    pub inputs: Vec<i32>,
    /// The token that follows each input, or [`ottava_tensor::ops::IGNORE_INDEX`].
    pub targets: Vec<i32>,
    /// The number of rows.
    pub rows: usize,
    /// The number of tokens in a row.
    pub seq_len: usize,
    /// The lengths of the documents, in the order of the tokens. Each document is within one row, and the padding at the end of a row counts as a
    /// document. `None` if attention crosses the edges of documents.
    pub documents: Option<Vec<usize>>,
    /// The number of padding inputs at the end of each row.
    pub padding: Vec<usize>,
}

impl Batch {
    /// Creates an empty batch with capacity for `rows` rows.
    pub(super) fn with_capacity(rows: usize, seq_len: usize) -> Batch {
        let size = rows * seq_len;
        let (inputs, targets) = (Vec::with_capacity(size), Vec::with_capacity(size));
        Batch { inputs, targets, rows, seq_len, documents: None, padding: Vec::new() }
    }

    /// Creates `rows` rows without padding. Each row is one document.
    pub fn whole(inputs: Vec<i32>, targets: Vec<i32>, rows: usize) -> Batch {
        let seq_len = inputs.len() / rows;
        Batch { inputs, targets, rows, seq_len, documents: None, padding: vec![0; rows] }
    }

    /// Returns the number of padding inputs.
    pub fn padding_tokens(&self) -> usize {
        self.padding.iter().sum()
    }

    /// Returns the first `rows` rows.
    pub fn first_rows(&self, rows: usize) -> Batch {
        let tokens = rows * self.seq_len;
        let mut end = 0;
        let within = |length: &&usize| {
            end += **length;
            end <= tokens
        };
        Batch {
            inputs: self.inputs[..tokens].to_vec(),
            targets: self.targets[..tokens].to_vec(),
            rows,
            seq_len: self.seq_len,
            documents: self.documents.as_ref().map(|all| all.iter().take_while(within).copied().collect()),
            padding: self.padding[..rows].to_vec(),
        }
    }

    /// Returns the batch, padded with copies of its first row without targets until its number of tokens is a multiple of `multiple`.
    pub fn padded_to(&self, multiple: usize) -> Cow<'_, Batch> {
        if self.inputs.len().is_multiple_of(multiple) {
            return Cow::Borrowed(self);
        }
        let mut padded = self.clone();
        while !padded.inputs.len().is_multiple_of(multiple) {
            padded.inputs.extend_from_slice(&self.inputs[..self.seq_len]);
            padded.targets.resize(padded.inputs.len(), IGNORE_INDEX);
            padded.documents.iter_mut().for_each(|documents| documents.push(self.seq_len));
            padded.rows += 1;
            padded.padding.push(self.seq_len);
        }
        Cow::Owned(padded)
    }
}

/// The rows of one of the processes that share the data: every `world`th row, beginning with row `rank`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShare {
    /// The index of the process, from 0.
    pub rank: usize,
    /// The number of processes.
    pub world: usize,
}

impl RowShare {
    /// The share of a single process, which reads all rows.
    pub const ALL: RowShare = RowShare { rank: 0, world: 1 };
}

/// The position in the rows of a data set. Checkpoints save it, and it is the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoaderState {
    /// The seed of the order of documents.
    pub seed: u64,
    /// The number of completed passes over all documents; in a stream, over windows of files.
    pub epoch: u64,
    /// The position in this epoch's order of the current document. With whole documents, the first document of the current window.
    pub document: u64,
    /// The offset of the next input token in this document. With whole documents, the number of the next row of the current window.
    pub offset: u64,
}

impl LoaderState {
    /// Returns the start of the first epoch.
    pub fn start(seed: u64) -> LoaderState {
        LoaderState { seed, epoch: 0, document: 0, offset: 0 }
    }

    /// Returns the next of `items` items, in the order of this epoch, and advances by one. For records that are read as a whole.
    pub(super) fn next_item(&mut self, items: usize) -> usize {
        let order = Permutation::new(items as u64, self.seed, self.epoch);
        let item = order.get(self.document);
        self.document += 1;
        if self.document == order.len() {
            (self.document, self.epoch) = (0, self.epoch + 1);
        }
        item as usize
    }

    /// Errors with [`Error::Checkpoint`] unless this is a position among `items` items that are read as a whole. `what` names the items.
    pub(super) fn expect_item(&self, items: usize, what: &str) -> Result<()> {
        match self.document < items as u64 && self.offset == 0 {
            true => Ok(()),
            false => Err(Error::Checkpoint(format!(
                "the saved place in the data (record {}) does not exist among {items} {what}; the data, val_set_size or max_length has changed",
                self.document
            ))),
        }
    }
}

/// The endless rows of one data set.
pub(super) struct SetRows {
    dataset: Arc<TokenDataset>,
    split: Split,
    layout: RowLayout,
    cursor: Cursor,
}

/// A position among the rows.
enum Cursor {
    Stream(Stream),
    Whole(WholeDocuments),
}

impl SetRows {
    /// Starts at `state`, in constant time. Errors with [`Error::Checkpoint`] if the state does not fit the data. Panics if rows have no tokens or
    /// the packing is `auto`, which the caller must exclude.
    pub(super) fn new(
        dataset: Arc<TokenDataset>,
        split: Split,
        layout: RowLayout,
        state: LoaderState,
    ) -> Result<SetRows> {
        assert!(layout.seq_len > 0, "{layout:?}");
        let documents = split.train_len();
        let missing = || {
            Err(Error::Checkpoint(format!(
                "the saved place in the data ({} of document {}) does not exist among {documents} documents; \
                 the data or val_set_size has changed",
                state.offset, state.document
            )))
        };
        if state.document >= documents {
            return missing();
        }
        let order = Permutation::new(documents, state.seed, state.epoch);
        let cursor = match layout.packing {
            Packing::Auto => unreachable!("`auto` is resolved before data are loaded"),
            Packing::Wrapped => {
                let stream = Stream { state, order };
                if state.offset >= stream.document_len(&dataset, &split)? {
                    return missing();
                }
                Cursor::Stream(stream)
            }
            Packing::Bfd | Packing::None => {
                let mut documents = WholeDocuments { state, window: window(&layout, &dataset, &split, state)? };
                if state.offset > 0 && state.offset >= documents.window.len() {
                    return missing();
                }
                documents.skip_empty(&layout, &dataset, &split)?;
                Cursor::Whole(documents)
            }
        };
        Ok(SetRows { dataset, split, layout, cursor })
    }

    /// Returns the position of the next row.
    pub(super) fn state(&self) -> LoaderState {
        match &self.cursor {
            Cursor::Stream(stream) => stream.state,
            Cursor::Whole(documents) => documents.state,
        }
    }

    /// Skips the next row without reading its tokens. Returns the number of its tokens.
    pub(super) fn skip(&mut self) -> Result<u64> {
        match &mut self.cursor {
            Cursor::Stream(stream) => {
                let tokens = self.layout.seq_len as u64;
                stream.advance(&self.dataset, &self.split, tokens, |_, _| Ok(())).map(|()| tokens)
            }
            Cursor::Whole(documents) => {
                let row = documents.next_row(&self.layout, &self.dataset, &self.split)?;
                let inputs = |&document: &u64| {
                    self.dataset.document_len(document as usize).map(|len| self.layout.inputs(len) as u64)
                };
                row.iter().map(inputs).sum()
            }
        }
    }

    /// Appends the next row to `batch`. Returns the number of its tokens without padding. Errors with [`Error::Data`] if a file of tokens can no
    /// longer be read.
    pub(super) fn row(&mut self, batch: &mut Batch) -> Result<u64> {
        match &mut self.cursor {
            Cursor::Stream(stream) => stream.row(&self.dataset, &self.split, self.layout.seq_len, batch)?,
            Cursor::Whole(documents) => {
                let row = documents.next_row(&self.layout, &self.dataset, &self.split)?;
                whole_documents(&self.dataset, &self.layout, &row, batch)?;
            }
        }
        Ok((self.layout.seq_len - batch.padding.last().expect("a row was appended")) as u64)
    }
}

/// Appends a row of whole documents to `batch`. The row is padded with inputs that are not targets.
pub(super) fn whole_documents(
    dataset: &TokenDataset,
    layout: &RowLayout,
    documents: &[u64],
    batch: &mut Batch,
) -> Result<()> {
    let end = batch.inputs.len() + layout.seq_len;
    for &document in documents {
        let document = document as usize;
        let inputs = layout.inputs(dataset.document_len(document)?);
        append_document(dataset, &dataset.tokens(document, 0..inputs + 1)?, batch);
    }
    pad_row(dataset, end, batch);
    Ok(())
}

/// Appends a document with these stored `tokens` to `batch`. The last token is only a target.
pub(super) fn append_document(dataset: &TokenDataset, tokens: &[u32], batch: &mut Batch) {
    let inputs = tokens.len() - 1;
    batch.inputs.extend(tokens[..inputs].iter().map(|&token| dataset.id(token) as i32));
    batch.targets.extend(tokens[1..].iter().map(|&token| dataset.target(token)));
    batch.documents.iter_mut().for_each(|lengths| lengths.push(inputs));
}

/// Pads `batch` to `end` inputs without targets.
pub(super) fn pad_row(dataset: &TokenDataset, end: usize, batch: &mut Batch) {
    let padding = end - batch.inputs.len();
    batch.padding.push(padding);
    if padding > 0 {
        batch.inputs.resize(end, dataset.meta().eos_id as i32);
        batch.targets.resize(end, IGNORE_INDEX);
        batch.documents.iter_mut().for_each(|lengths| lengths.push(padding));
    }
}

/// A position among rows of whole documents. The row always exists.
struct WholeDocuments {
    state: LoaderState,
    /// The window that begins at the document of `state`.
    window: Window,
}

/// Packs the window that begins at the document of `state`.
pub(super) fn window(layout: &RowLayout, dataset: &TokenDataset, split: &Split, state: LoaderState) -> Result<Window> {
    let LoaderState { seed, epoch, document, .. } = state;
    let order = Permutation::new(split.train_len(), seed, epoch);
    Window::new(layout, dataset, |place| split.train(order.get(place)), split.train_len(), (seed, epoch, document))
}

impl WholeDocuments {
    /// Returns the documents of the next row, and advances.
    fn next_row(&mut self, layout: &RowLayout, dataset: &TokenDataset, split: &Split) -> Result<Vec<u64>> {
        let row = self.window.row(self.state.offset).to_vec();
        self.state.offset += 1;
        self.skip_empty(layout, dataset, split)?;
        Ok(row)
    }

    /// At the end of a window, advances to the next window that has rows. An epoch always has rows.
    fn skip_empty(&mut self, layout: &RowLayout, dataset: &TokenDataset, split: &Split) -> Result<()> {
        while self.state.offset == self.window.len() {
            self.state.offset = 0;
            self.state.document = self.window.end;
            if self.state.document == split.train_len() {
                (self.state.document, self.state.epoch) = (0, self.state.epoch + 1);
            }
            self.window = window(layout, dataset, split, self.state)?;
        }
        Ok(())
    }
}

/// A position in the endless stream. The token always exists.
#[derive(Clone, Copy)]
struct Stream {
    state: LoaderState,
    order: Permutation,
}

impl Stream {
    /// Appends the next row to `batch`.
    fn row(&mut self, dataset: &TokenDataset, split: &Split, seq_len: usize, batch: &mut Batch) -> Result<()> {
        let mut tokens = Vec::with_capacity(seq_len + 1);
        let lengths = &mut batch.documents;
        self.advance(dataset, split, seq_len as u64, |document, range| {
            lengths.iter_mut().for_each(|lengths| lengths.push(range.len()));
            tokens.extend(dataset.tokens(document, range)?);
            Ok(())
        })?;
        // Reads one token more. It is also the first input of the next row.
        let mut ahead = *self;
        ahead.advance(dataset, split, 1, |document, range| {
            tokens.extend(dataset.tokens(document, range)?);
            Ok(())
        })?;
        batch.inputs.extend(tokens[..seq_len].iter().map(|&token| dataset.id(token) as i32));
        batch.targets.extend(tokens[1..].iter().map(|&token| dataset.target(token)));
        batch.padding.push(0);
        Ok(())
    }

    fn document(&self, split: &Split) -> usize {
        split.train(self.order.get(self.state.document))
    }

    fn document_len(&self, dataset: &TokenDataset, split: &Split) -> Result<u64> {
        dataset.document_len(self.document(split)).map(|len| len as u64)
    }

    /// Advances by `count` tokens, and calls `take` with the range of each document on the way.
    fn advance(
        &mut self,
        dataset: &TokenDataset,
        split: &Split,
        mut count: u64,
        mut take: impl FnMut(usize, std::ops::Range<usize>) -> Result<()>,
    ) -> Result<()> {
        while count > 0 {
            let document = self.document(split);
            let (start, len) = (self.state.offset, dataset.document_len(document)? as u64);
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

/// Returns the number of tokens of the validation documents. Errors with [`Error::Data`] if the tables of the data can no longer be read.
pub fn validation_tokens(dataset: &TokenDataset, split: &Split) -> Result<u64> {
    (0..split.validation_len()).map(|i| dataset.document_len(split.validation(i)).map(|len| len as u64)).sum()
}

/// Returns the number of text bytes in the validation documents, which bits per byte are relative to. Has the errors of [`validation_tokens`].
pub fn validation_bytes(dataset: &TokenDataset, split: &Split) -> Result<u64> {
    (0..split.validation_len()).map(|i| dataset.document_bytes(split.validation(i)).map(u64::from)).sum()
}

/// Returns the validation documents in batches of up to `rows` rows of whole documents.
pub fn whole_validation(
    dataset: Arc<TokenDataset>,
    split: Split,
    layout: RowLayout,
    rows: usize,
) -> Result<impl ExactSizeIterator<Item = Result<Batch>>> {
    let documents = |place| split.validation(place);
    let (mut start, mut packed) = (0, Vec::new());
    while start < split.validation_len() {
        let window = Window::new(&layout, &dataset, documents, split.validation_len(), (0, 0, start))?;
        packed.extend((0..window.len()).map(|row| window.row(row).to_vec()));
        start = window.end;
    }
    Ok((0..packed.len().div_ceil(rows)).map(move |batch| {
        let packed = &packed[batch * rows..packed.len().min((batch + 1) * rows)];
        let mut filled = Batch::with_capacity(packed.len(), layout.seq_len);
        filled.documents = layout.document_mask.then(Vec::new);
        for row in packed {
            whole_documents(&dataset, &layout, row, &mut filled)?;
        }
        Ok(filled)
    }))
}

#[cfg(test)]
#[path = "loader_tests.rs"]
pub(super) mod tests;
