//! Numbers that depend on all documents of a data set. They are counted once for each layout of rows, and stored beside the tokens.

use serde::{Deserialize, Serialize};

use crate::loader::{LoaderState, window};
use crate::order::Split;
use crate::packing::{ExcessLength, Packing, RowLayout};
use crate::shards::TokenDataset;
use crate::stamps;
use ottava_common::hash::sha256;
use ottava_common::{Error, Result, interrupt};

/// The maximum number of documents that a message names.
const NAMED: usize = 10;

/// The numbers of documents that are truncated or left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fit {
    /// The number of all documents.
    pub documents: u64,
    /// The number of documents that are truncated to a row.
    pub truncated: u64,
    /// The number of the first document that is truncated, counted from 0.
    pub first_truncated: Option<usize>,
    /// The number of documents that are left out because none of their tokens in a row is a target.
    pub left_out: u64,
    /// The numbers of the first documents that are left out, counted from 0.
    pub first_left_out: Vec<usize>,
}

impl Fit {
    /// Counts all documents that are truncated or left out in rows of `layout`. Errors with [`Error::Data`] if the tables of the data can no longer
    /// be read.
    pub fn of_all(dataset: &TokenDataset, layout: &RowLayout) -> Result<Fit> {
        let mut fit = Fit::default();
        (0..dataset.len()).try_for_each(|i| fit.add(dataset, layout, i).map(drop))?;
        Ok(fit)
    }

    /// Counts document `i`. Returns the number of its tokens in rows.
    fn add(&mut self, dataset: &TokenDataset, layout: &RowLayout, i: usize) -> Result<usize> {
        let (len, is_whole) = (dataset.document_len(i)?, layout.packing != Packing::Wrapped);
        let inputs = if is_whole { layout.inputs(len) } else { len };
        self.documents += 1;
        if dataset.meta().kind.has_columns() {
            // The tokens of prompts and examples are not targets, so no document is left out.
            if dataset.longest_text(i)?.is_some_and(|longest| longest > layout.seq_len) {
                self.truncated += 1;
                self.first_truncated.get_or_insert(i);
            }
            return Ok(len.min(layout.seq_len));
        }
        if !dataset.has_target(i, if is_whole { inputs } else { len - 1 })? {
            self.left_out += 1;
            if self.first_left_out.len() < NAMED {
                self.first_left_out.push(i);
            }
            return Ok(if is_whole { 0 } else { len });
        }
        if is_whole && len > layout.seq_len + 1 {
            self.truncated += 1;
            self.first_truncated.get_or_insert(i);
        }
        Ok(inputs)
    }

    /// Returns a sentence for the log if documents are truncated or left out in rows of `seq_len` tokens.
    pub fn describe(&self, seq_len: usize) -> Option<String> {
        let Fit { documents, truncated, left_out, first_left_out, .. } = self;
        let mut sentences = Vec::new();
        if *truncated > 0 {
            sentences.push(format!(
                "{truncated} of {documents} documents are longer than `data.max_length` and cut to {seq_len} tokens"
            ));
        }
        if *left_out > 0 {
            let named: Vec<_> = first_left_out.iter().map(|i| (i + 1).to_string()).collect();
            let more = if *left_out > NAMED as u64 { ", …" } else { "" };
            sentences.push(format!(
                "{left_out} of {documents} documents are left out, since none of their first {seq_len} tokens predicts a token that contributes to the loss: {}{more}",
                named.join(", ")
            ));
        }
        (!sentences.is_empty()).then(|| sentences.join("; "))
    }
}

/// The statistics of the documents of a split, in rows of a layout.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Statistics {
    /// The training documents that are truncated or left out.
    pub fit: Fit,
    /// The number of tokens in the rows of the first epoch, without padding.
    pub tokens: u64,
    /// The number of rows of the first epoch. An incomplete row counts as a fraction.
    pub rows: f64,
    /// The maximum number of documents in a row, where the padding at its end counts as a document; `None` if attention crosses the edges of
    /// documents.
    pub max_documents: Option<usize>,
}

impl Statistics {
    /// Returns the statistics of a run with this `seed`. If they were counted before, they are read from the folder of the tokens; otherwise, they
    /// are counted and written to this folder.
    ///
    /// Errors with [`Error::Data`] if the tables of the data can no longer be read.
    pub fn of(dataset: &TokenDataset, split: &Split, layout: &RowLayout, seed: u64) -> Result<Statistics> {
        let parts = serde_json::json!([split.key(), layout, seed]);
        let path = dataset.folder().join(format!("rows-{}.json", &sha256(parts.to_string().as_bytes())[..16]));
        if let Some(known) = stamps::read(&path) {
            return Ok(known);
        }
        let counted = Statistics::count(dataset, split, layout, seed)?;
        stamps::write(&path, &counted);
        Ok(counted)
    }

    fn count(dataset: &TokenDataset, split: &Split, layout: &RowLayout, seed: u64) -> Result<Statistics> {
        // Counts in the order of the files, so that the tables are read sequentially.
        let mut held_out: Vec<usize> = (0..split.validation_len()).map(|i| split.validation(i)).collect();
        held_out.sort_unstable();
        let mut held_out = held_out.into_iter().peekable();
        let (mut fit, mut tokens) = (Fit::default(), 0);
        // The number of documents by their number of tokens in a row, up to a whole row.
        let mut lengths = vec![0_u64; layout.seq_len + 1];
        for i in 0..dataset.len() {
            interrupt::check("counting documents")?;
            if held_out.next_if_eq(&i).is_some() {
                continue;
            }
            let len = fit.add(dataset, layout, i)?;
            tokens += len as u64;
            if len > 0 {
                lengths.get_mut(len).into_iter().for_each(|count| *count += 1);
            }
        }
        let rows = match layout.packing {
            Packing::Wrapped => tokens as f64 / layout.seq_len as f64,
            _ => packed_rows(dataset, split, layout, seed)?,
        };
        let max_documents = layout.document_mask.then(|| max_documents(layout, &lengths, tokens));
        Ok(Statistics { fit, tokens, rows, max_documents })
    }

    /// Returns the statistics with the numbers of documents that hold for a stream of which the data set is a part.
    pub fn of_stream(self, layout: &RowLayout) -> Statistics {
        let most = layout.max_documents.map_or(layout.seq_len, |documents| (documents + 1).min(layout.seq_len));
        Statistics {
            max_documents: self.max_documents.map(|_| if layout.packing == Packing::None { 2 } else { most }),
            ..self
        }
    }

    /// Errors with [`Error::Data`] if a document is too long and `excess` is an error, or if no document has a token to predict.
    pub fn check(&self, dataset: &TokenDataset, layout: &RowLayout, excess: ExcessLength) -> Result<()> {
        let fit = &self.fit;
        if let (ExcessLength::Raise, Some(long)) = (excess, fit.first_truncated) {
            return Err(Error::Data(format!(
                "document {} of the data has {} tokens, and `data.max_length` is {}; raise that, or set \
                 `data.excess_length_strategy = \"truncate\"`",
                long + 1,
                dataset.document_len(long)?,
                layout.seq_len
            )));
        }
        if fit.left_out < fit.documents {
            return Ok(());
        }
        Err(Error::Data(match dataset.meta().loss_mask {
            true if dataset.meta().kind.preference().is_some() => format!(
                "no prompt leaves room for its completion within `data.max_length` = {}; raise that",
                layout.seq_len
            ),
            true => format!(
                "no document has a token of an answer within `data.max_length` = {}; raise that, or set `data.train_on_inputs = true`",
                layout.seq_len
            ),
            false => "no document has a second token to predict".into(),
        }))
    }

    /// Returns a sentence for the log if documents are truncated or left out.
    pub fn describe_fit(&self, layout: &RowLayout) -> Option<String> {
        match layout.packing {
            // In a stream, documents without a target are context of later documents.
            Packing::Wrapped => None,
            _ => self.fit.describe(layout.seq_len),
        }
    }
}

/// Returns the number of rows of whole documents in the first epoch.
fn packed_rows(dataset: &TokenDataset, split: &Split, layout: &RowLayout, seed: u64) -> Result<f64> {
    let (mut rows, mut state) = (0, LoaderState::start(seed));
    while state.document < split.train_len() {
        interrupt::check("packing documents")?;
        let window = window(layout, dataset, split, state)?;
        rows += window.len();
        state.document = window.end;
    }
    Ok(rows as f64)
}

/// Returns the maximum number of documents in a row. `lengths` has the number of documents for each number of tokens.
fn max_documents(layout: &RowLayout, lengths: &[u64], tokens: u64) -> usize {
    // The row may have all of the shortest documents, and at each end a part of a document or padding.
    let copies = match layout.packing {
        // A row of the stream may extend over several epochs.
        Packing::Wrapped => layout.seq_len as u64 / tokens.max(1) + 2,
        Packing::Bfd | Packing::Auto => 1,
        Packing::None => return 2,
    };
    let (mut count, mut space) = (0, layout.seq_len);
    for (len, &documents) in lengths.iter().enumerate().skip(1) {
        let more = (documents * copies).min((space / len) as u64) as usize;
        (count, space) = (count + more, space - more * len);
    }
    let most = layout.max_documents.map_or(layout.seq_len, |documents| documents + 1);
    (count + 2).min(layout.seq_len).min(most)
}
