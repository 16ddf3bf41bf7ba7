//! Numbers of a data set that depend on all of its documents: counted once for each layout of rows, and kept beside the tokens.

use serde::{Deserialize, Serialize};

use crate::loader::{LoaderState, window};
use crate::order::Split;
use crate::packing::{ExcessLength, Packing, RowLayout};
use crate::shards::TokenDataset;
use crate::stamps;
use ottava_common::hash::sha256;
use ottava_common::{Error, Result, interrupt};

/// Documents that a message names.
const NAMED: usize = 10;

/// Numbers of documents that are cut or left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fit {
    /// All of them.
    pub documents: u64,
    /// Documents that are cut to a row.
    pub truncated: u64,
    /// The first document that is cut; numbers from 0.
    pub first_truncated: Option<usize>,
    /// Documents that are left out, since none of their tokens in a row is a target.
    pub left_out: u64,
    /// The first of them; numbers from 0.
    pub first_left_out: Vec<usize>,
}

impl Fit {
    /// Counts all documents that are cut or left out in rows of `layout`. Errors with [`Error::Data`] when the tables of the data can
    /// no longer be read.
    pub fn of_all(dataset: &TokenDataset, layout: &RowLayout) -> Result<Fit> {
        let mut fit = Fit::default();
        (0..dataset.len()).try_for_each(|i| fit.add(dataset, layout, i).map(drop))?;
        Ok(fit)
    }

    /// Counts document `i`. Returns the tokens that it has in rows.
    fn add(&mut self, dataset: &TokenDataset, layout: &RowLayout, i: usize) -> Result<usize> {
        let (len, is_whole) = (dataset.document_len(i)?, layout.packing != Packing::Wrapped);
        let inputs = if is_whole { layout.inputs(len) } else { len };
        self.documents += 1;
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

    /// A sentence for the log, where documents are cut or left out in rows of `seq_len` tokens.
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

/// Numbers of the documents of a split, in rows of a layout.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Statistics {
    /// Documents to train on that are cut or left out.
    pub fit: Fit,
    /// Tokens of the rows of the first epoch, without padding.
    pub tokens: u64,
    /// Rows of the first epoch; a part of a row counts as a part.
    pub rows: f64,
    /// The most documents that a row can have, padding at its end included; `None` where attention does not see their edges.
    pub max_documents: Option<usize>,
}

impl Statistics {
    /// The numbers of a run with this `seed`. They are read from the folder of the tokens if they were counted before, else counted and
    /// written there.
    ///
    /// Errors with [`Error::Data`] when the tables of the data can no longer be read.
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
        // In the order of the files, so that the tables are read from the beginning to the end.
        let mut held_out: Vec<usize> = (0..split.validation_len()).map(|i| split.validation(i)).collect();
        held_out.sort_unstable();
        let mut held_out = held_out.into_iter().peekable();
        let (mut fit, mut tokens) = (Fit::default(), 0);
        // The number of documents with each number of tokens in a row, up to a whole row.
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

    /// Errors with [`Error::Data`] when a document is too long and `excess` is an error, or when none has a token to predict.
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

    /// A sentence for the log, where documents are cut or left out.
    pub fn describe_fit(&self, layout: &RowLayout) -> Option<String> {
        match layout.packing {
            // Documents without a target are context of others.
            Packing::Wrapped => None,
            _ => self.fit.describe(layout.seq_len),
        }
    }
}

/// Rows of whole documents in the first epoch.
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

/// The most documents that a row can have. `lengths` counts the documents of each number of tokens.
fn max_documents(layout: &RowLayout, lengths: &[u64], tokens: u64) -> usize {
    // The shortest documents, and a part of one at each end of a row or padding.
    let copies = match layout.packing {
        // A row of the stream may go on into later epochs.
        Packing::Wrapped => layout.seq_len as u64 / tokens.max(1) + 2,
        Packing::Bfd | Packing::Auto => 1,
        Packing::None => return 2,
    };
    let (mut count, mut space) = (0, layout.seq_len);
    for (len, &documents) in lengths.iter().enumerate().skip(1) {
        let more = (documents * copies).min((space / len) as u64) as usize;
        (count, space) = (count + more, space - more * len);
    }
    (count + 2).min(layout.seq_len)
}
