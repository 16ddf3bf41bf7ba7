//! Packing of documents into rows.
//!
//! Whole documents are packed by best-fit decreasing: the longest first, each into the row with the least space that it fits (Johnson 1974;
//! of text: Ding et al. 2024, *Fewer Truncations Improve Language Modeling*). An epoch's documents are packed in windows of 65,536, so a
//! plan takes some megabytes for data of any size, and depends only on seed, epoch and window.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::order::{Permutation, Split};
use super::shards::TokenDataset;
use crate::{Error, Result};

/// Documents that are packed together.
const WINDOW: u64 = 1 << 16;

/// The way in which documents become rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Packing {
    /// `Bfd` if the data have prompts, else `Wrapped`.
    #[default]
    Auto,
    /// One stream of all documents, cut into rows.
    Wrapped,
    /// Whole documents, packed by best-fit decreasing.
    Bfd,
    /// A document in each row.
    None,
}

/// The treatment of documents longer than a row, with whole documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExcessLength {
    /// Its beginning is taken.
    #[default]
    Truncate,
    /// It is an error.
    Raise,
}

/// Packing and length of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLayout {
    /// Tokens of a row.
    pub seq_len: usize,
    /// The packing; not `Auto`.
    pub packing: Packing,
    /// Whether attention ends at the edges of documents.
    pub document_mask: bool,
}

impl RowLayout {
    /// Full rows of a stream of documents, whose edges attention does not see.
    pub fn wrapped(seq_len: usize) -> RowLayout {
        RowLayout { seq_len, packing: Packing::Wrapped, document_mask: false }
    }

    /// Inputs that a document of `len` tokens has in a row: each but the last, whose target would be in another document.
    pub(super) fn inputs(&self, len: usize) -> usize {
        (len - 1).min(self.seq_len)
    }

    /// Counts the training documents of `split` that are cut or left out, with whole documents.
    ///
    /// Errors with [`Error::Data`] when one is too long and `excess` is an error, or when none has a token to predict.
    pub fn check(&self, dataset: &TokenDataset, split: &Split, excess: ExcessLength) -> Result<Fit> {
        let documents = (0..split.train_len()).map(|place| split.train(place));
        if excess == ExcessLength::Raise
            && let Some(long) = documents.clone().find(|&i| self.is_long(dataset, i))
        {
            return Err(Error::Data(format!(
                "document {} of the data has {} tokens, and `data.max_length` is {}; raise that, or set \
                 `data.excess_length_strategy = \"truncate\"`",
                long + 1,
                dataset.document_len(long),
                self.seq_len
            )));
        }
        let mut fit = self.fit(dataset, documents);
        if fit.without_target.len() as u64 == fit.documents {
            return Err(Error::Data(match dataset.meta().loss_mask {
                true => format!(
                    "no document has a token of an answer within `data.max_length` = {}; raise that, or set `data.train_on_inputs = true`",
                    self.seq_len
                ),
                false => "no document has a second token to predict".into(),
            }));
        }
        if self.packing == Packing::Wrapped {
            // They are context of others.
            fit.without_target.clear();
        }
        fit.without_target.sort_unstable();
        Ok(fit)
    }

    /// Counts those of `documents` that are cut or left out.
    pub fn fit(&self, dataset: &TokenDataset, documents: impl Iterator<Item = usize>) -> Fit {
        let mut fit = Fit::default();
        for i in documents {
            fit.documents += 1;
            let (len, is_whole) = (dataset.document_len(i), self.packing != Packing::Wrapped);
            if !dataset.has_target(i, if is_whole { self.inputs(len) } else { len - 1 }) {
                fit.without_target.push(i);
            } else if self.is_long(dataset, i) {
                fit.truncated += 1;
            }
        }
        fit
    }

    /// Whether document `i` is cut.
    fn is_long(&self, dataset: &TokenDataset, i: usize) -> bool {
        self.packing != Packing::Wrapped && dataset.document_len(i) > self.seq_len + 1
    }

    /// The most documents that a row can have, padding at its end included; `None` where attention does not see their edges.
    pub fn max_documents(&self, dataset: &TokenDataset, split: &Split) -> Option<usize> {
        if !self.document_mask {
            return None;
        }
        let mut lengths: Vec<usize> = (0..split.train_len()).map(|i| dataset.document_len(split.train(i))).collect();
        // The shortest documents, and a part of one at each end of a row or padding.
        let copies = match self.packing {
            // A row of the stream may go on into later epochs.
            Packing::Wrapped => self.seq_len / lengths.iter().sum::<usize>() + 2,
            Packing::Bfd | Packing::Auto => 1,
            Packing::None => return Some(2),
        };
        if self.packing == Packing::Bfd {
            // Those without a target are left out, and only make rows shorter.
            lengths.iter_mut().for_each(|len| *len = self.inputs(*len));
            lengths.retain(|&len| len > 0);
        }
        lengths.sort_unstable();
        let (mut count, mut used) = (0, 0);
        for len in lengths.into_iter().flat_map(|len| std::iter::repeat_n(len, copies)) {
            used += len;
            if used > self.seq_len {
                break;
            }
            count += 1;
        }
        Some((count + 2).min(self.seq_len))
    }
}

/// Numbers of documents that are cut or left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fit {
    /// All of them.
    pub documents: u64,
    /// Documents that are cut to a row.
    pub truncated: u64,
    /// Documents that are left out, since none of their tokens in a row is a target; numbers from 0.
    pub without_target: Vec<usize>,
}

impl Fit {
    /// A sentence for the log, where documents are cut or left out in rows of `seq_len` tokens.
    pub fn describe(&self, seq_len: usize) -> Option<String> {
        let Fit { documents, truncated, without_target } = self;
        let mut sentences = Vec::new();
        if *truncated > 0 {
            sentences.push(format!(
                "{truncated} of {documents} documents are longer than `data.max_length` and cut to {seq_len} tokens"
            ));
        }
        if !without_target.is_empty() {
            let named: Vec<_> = without_target.iter().take(NAMED).map(|i| (i + 1).to_string()).collect();
            let more = if without_target.len() > NAMED { ", …" } else { "" };
            sentences.push(format!(
                "{} of {documents} documents are left out, since none of their first {seq_len} tokens predicts a token that contributes to the loss: {}{more}",
                without_target.len(),
                named.join(", ")
            ));
        }
        (!sentences.is_empty()).then(|| sentences.join("; "))
    }
}

/// Documents that a message names.
const NAMED: usize = 10;

/// The rows of one window of an epoch.
pub(super) struct Window {
    /// Documents of each row, by their place in the split.
    rows: Vec<Vec<u64>>,
    order: Permutation,
    /// The first document of the next window in the order of the epoch.
    pub(super) end: u64,
}

impl Window {
    /// The window that starts at document `start` of `epoch`. `documents` are all of the epoch, by their place in it.
    pub(super) fn new(
        layout: &RowLayout,
        dataset: &TokenDataset,
        documents: impl Fn(u64) -> usize,
        count: u64,
        (seed, epoch, start): (u64, u64, u64),
    ) -> Window {
        let end = (start + WINDOW).min(count);
        let mut sized: Vec<(usize, u64)> = (start..end)
            .map(|place| {
                let document = documents(place);
                (layout.inputs(dataset.document_len(document)), document as u64)
            })
            .filter(|&(inputs, document)| dataset.has_target(document as usize, inputs))
            .collect();
        let rows = match layout.packing {
            Packing::None => sized.into_iter().map(|(_, document)| vec![document]).collect(),
            _ => {
                // A stable sort: documents of one length stay in the order of the epoch.
                sized.sort_by_key(|&(inputs, _)| std::cmp::Reverse(inputs));
                best_fit(&sized, layout.seq_len)
            }
        };
        let order = Permutation::new(rows.len() as u64, seed, (epoch << 32).wrapping_add(start / WINDOW + 1));
        Window { rows, order, end }
    }

    /// Number of rows.
    pub(super) fn len(&self) -> u64 {
        self.rows.len() as u64
    }

    /// The documents of a row.
    pub(super) fn row(&self, index: u64) -> &[u64] {
        &self.rows[self.order.get(index) as usize]
    }
}

/// Puts each of `sized`, pairs of a size and a document, into the row with the least space that it fits, or into a new one.
fn best_fit(sized: &[(usize, u64)], capacity: usize) -> Vec<Vec<u64>> {
    let mut rows: Vec<Vec<u64>> = Vec::new();
    // Space and index of rows that are not full; of equal space the oldest first.
    let mut spaces: BTreeSet<(usize, usize)> = BTreeSet::new();
    for &(size, document) in sized {
        let found = spaces.range((size, 0)..).next().copied();
        let (space, row) = match found {
            Some(found) => {
                spaces.remove(&found);
                found
            }
            None => {
                rows.push(Vec::new());
                (capacity, rows.len() - 1)
            }
        };
        rows[row].push(document);
        if space > size {
            spaces.insert((space - size, row));
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_the_best_fit_and_never_too_long() {
        let sized: Vec<(usize, u64)> = [9, 7, 6, 4, 3, 3, 2, 1].into_iter().zip(0..).collect();
        assert_eq!(best_fit(&sized, 10), [vec![0, 7], vec![1, 4], vec![2, 3], vec![5, 6]]);
        assert_eq!(best_fit(&[], 10), Vec::<Vec<u64>>::new());
        // Random sizes: every document once, rows within the capacity, few of them not full.
        let mut sized: Vec<(usize, u64)> = (0..5000).map(|i| (1 + (crate::hash::mix(i) % 300) as usize, i)).collect();
        sized.sort_by_key(|&(size, _)| std::cmp::Reverse(size));
        let rows = best_fit(&sized, 1024);
        let size_of = |document: &u64| sized.iter().find(|(_, other)| other == document).unwrap().0;
        assert!(rows.iter().all(|row| row.iter().map(size_of).sum::<usize>() <= 1024));
        let mut all = rows.concat();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..5000));
        let total: usize = sized.iter().map(|(size, _)| size).sum();
        assert_eq!(rows.len(), total.div_ceil(1024));
    }
}
