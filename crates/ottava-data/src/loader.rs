//! Batches for training.
//!
//! Rows are cut from one endless stream of documents, or each holds whole documents ([`RowLayout`]); the order is another in each epoch. A
//! row of `seq_len + 1` tokens of the stream gives `seq_len` inputs and the `seq_len` tokens that follow them; the next row starts with the
//! last token of this one, so every token is a target exactly once. Of a whole document, every token but the last is an input.

use std::borrow::Cow;
use std::sync::Arc;

use ottava_tensor::ops::IGNORE_INDEX;
use serde::{Deserialize, Serialize};

use crate::order::{Permutation, Split};
use crate::packing::{Packing, RowLayout, Window};
use crate::shards::TokenDataset;
use ottava_common::{Error, Result};

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
    /// The lengths of the documents in the order of the tokens, each within one row, with the padding at the end of a row as a document of
    /// its own; `None` where attention does not see their edges.
    pub documents: Option<Vec<usize>>,
    /// By row, inputs at its end that belong to no document.
    pub padding: Vec<usize>,
}

impl Batch {
    /// An empty batch with room for `rows` rows.
    pub(super) fn with_capacity(rows: usize, seq_len: usize) -> Batch {
        let size = rows * seq_len;
        let (inputs, targets) = (Vec::with_capacity(size), Vec::with_capacity(size));
        Batch { inputs, targets, rows, seq_len, documents: None, padding: Vec::new() }
    }

    /// `rows` rows without padding, each one document.
    pub fn whole(inputs: Vec<i32>, targets: Vec<i32>, rows: usize) -> Batch {
        let seq_len = inputs.len() / rows;
        Batch { inputs, targets, rows, seq_len, documents: None, padding: vec![0; rows] }
    }

    /// Inputs that belong to no document.
    pub fn padding_tokens(&self) -> usize {
        self.padding.iter().sum()
    }

    /// Its first `rows` rows.
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

    /// The batch with copies of its first row, without targets, until its tokens are a multiple of `multiple`.
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

/// The rows of one of the processes that share the data: every `world`th one, from row `rank` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShare {
    /// Its index, from 0.
    pub rank: usize,
    /// The number of processes.
    pub world: usize,
}

impl RowShare {
    /// All rows for one process.
    pub const ALL: RowShare = RowShare { rank: 0, world: 1 };
}

/// The position in the rows of a data set, as checkpoints save it; the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoaderState {
    /// Decides the order of documents.
    pub seed: u64,
    /// Completed passes over all documents.
    pub epoch: u64,
    /// The place in the order of this epoch of the current document, or of the first document that is packed into the next row.
    pub document: u64,
    /// The next input token within that document, or the next row of rows packed together.
    pub offset: u64,
}

impl LoaderState {
    /// The start of the first epoch.
    pub fn start(seed: u64) -> LoaderState {
        LoaderState { seed, epoch: 0, document: 0, offset: 0 }
    }

    /// The item at this place in the order of the epochs of `items`, records that are read as a whole. Goes on to the next place.
    pub(super) fn next_item(&mut self, items: usize) -> usize {
        let order = Permutation::new(items as u64, self.seed, self.epoch);
        let item = order.get(self.document);
        self.document += 1;
        if self.document == order.len() {
            (self.document, self.epoch) = (0, self.epoch + 1);
        }
        item as usize
    }

    /// Errors with [`Error::Checkpoint`] unless this is a place among `items` that are read as a whole; `what` names them.
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

/// A position in the rows.
enum Cursor {
    Stream(Stream),
    Whole(WholeDocuments),
}

impl SetRows {
    /// Starts at `state`, in constant time. Errors with [`Error::Checkpoint`] when the state does not fit the data. Panics when rows have
    /// no token or the packing is `auto`: bugs of the caller.
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

    /// The start of the next row.
    pub(super) fn state(&self) -> LoaderState {
        match &self.cursor {
            Cursor::Stream(stream) => stream.state,
            Cursor::Whole(documents) => documents.state,
        }
    }

    /// Goes on to the next row without reading the tokens of this one. Returns their number.
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

    /// Appends the next row to `batch`. Returns the number of its tokens; padding is none. Errors with [`Error::Data`] when a file of tokens
    /// can no longer be read.
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

/// Appends a row of whole documents to `batch`, padded to its end with inputs that are no targets.
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

/// Appends a document of these stored `tokens` to `batch`, each but the last as an input.
pub(super) fn append_document(dataset: &TokenDataset, tokens: &[u32], batch: &mut Batch) {
    let inputs = tokens.len() - 1;
    batch.inputs.extend(tokens[..inputs].iter().map(|&token| dataset.id(token) as i32));
    batch.targets.extend(tokens[1..].iter().map(|&token| dataset.target(token)));
    batch.documents.iter_mut().for_each(|lengths| lengths.push(inputs));
}

/// Pads `batch` to `end` inputs, with inputs that are no targets.
pub(super) fn pad_row(dataset: &TokenDataset, end: usize, batch: &mut Batch) {
    let padding = end - batch.inputs.len();
    batch.padding.push(padding);
    if padding > 0 {
        batch.inputs.resize(end, dataset.meta().eos_id as i32);
        batch.targets.resize(end, IGNORE_INDEX);
        batch.documents.iter_mut().for_each(|lengths| lengths.push(padding));
    }
}

/// A place among rows of whole documents; always on an existing row.
struct WholeDocuments {
    state: LoaderState,
    /// The window that begins at the state's document.
    window: Window,
}

/// The window that begins at the document of `state`.
pub(super) fn window(layout: &RowLayout, dataset: &TokenDataset, split: &Split, state: LoaderState) -> Result<Window> {
    let LoaderState { seed, epoch, document, .. } = state;
    let order = Permutation::new(split.train_len(), seed, epoch);
    Window::new(layout, dataset, |place| split.train(order.get(place)), split.train_len(), (seed, epoch, document))
}

impl WholeDocuments {
    /// The documents of the next row.
    fn next_row(&mut self, layout: &RowLayout, dataset: &TokenDataset, split: &Split) -> Result<Vec<u64>> {
        let row = self.window.row(self.state.offset).to_vec();
        self.state.offset += 1;
        self.skip_empty(layout, dataset, split)?;
        Ok(row)
    }

    /// Goes on to the next window that has rows, from the end of one or from one that has none. An epoch always has rows.
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

/// A position in the endless stream; always on an existing token.
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
        // One token more, which the next row reads again as its first input.
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

/// Tokens of the validation documents. Errors with [`Error::Data`] when the tables of the data can no longer be read.
pub fn validation_tokens(dataset: &TokenDataset, split: &Split) -> Result<u64> {
    (0..split.validation_len()).map(|i| dataset.document_len(split.validation(i)).map(|len| len as u64)).sum()
}

/// Bytes of text of the validation documents, what bits per byte is counted over. Errors as [`validation_tokens`].
pub fn validation_bytes(dataset: &TokenDataset, split: &Split) -> Result<u64> {
    (0..split.validation_len()).map(|i| dataset.document_bytes(split.validation(i)).map(u64::from)).sum()
}

/// The validation documents in batches of up to `rows` rows of whole documents.
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
