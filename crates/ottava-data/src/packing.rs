//! Packing of documents into rows.
//!
//! Whole documents are packed by best-fit decreasing: the longest document first, each into the row with the least sufficient space (Johnson 1974;
//! for text: Ding et al. 2024, *Fewer Truncations Improve Language Modeling*). The documents of an epoch are packed in windows of 65,536 documents.
//! So packing takes a few megabytes for data of any size, and depends only on seed, epoch and window.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::order::Permutation;
use crate::shards::TokenDataset;
use ottava_common::Result;

/// The number of documents that are packed together.
const WINDOW: u64 = 1 << 16;

/// The way in which documents become rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ExcessLength {
    /// Truncates the document: its beginning is kept.
    #[default]
    Truncate,
    /// Ends the run with an error.
    Raise,
}

/// The packing and the length of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RowLayout {
    /// The number of tokens of a row.
    pub seq_len: usize,
    /// The packing. It must not be `Auto`.
    pub packing: Packing,
    /// Whether attention ends at the edges of documents.
    pub document_mask: bool,
    /// The maximum number of documents that `Bfd` puts into a row; `None` without a bound. Streams have a bound, because the documents of a run are not
    /// known before its first step.
    pub max_documents: Option<usize>,
}

/// Returns the maximum number of documents of a row of `seq_len` tokens if their lengths are not known in advance: one per 64 tokens, but at least
/// four. The number is limited because attention launches work for each possible document.
pub fn max_unknown_documents(seq_len: usize) -> usize {
    (seq_len / 64).max(4)
}

impl RowLayout {
    /// Returns the layout of full rows of one stream of documents. Attention crosses the edges of documents.
    pub fn wrapped(seq_len: usize) -> RowLayout {
        RowLayout { seq_len, packing: Packing::Wrapped, document_mask: false, max_documents: None }
    }

    /// Returns the number of inputs in a row for a document of `len` tokens. Its last token is not an input, because the next target would be in
    /// another document.
    pub(super) fn inputs(&self, len: usize) -> usize {
        (len - 1).min(self.seq_len)
    }
}

/// The rows of one window of an epoch.
pub(super) struct Window {
    /// The documents of each row, by their numbers in the data set.
    rows: Vec<Vec<u64>>,
    order: Permutation,
    /// The position in the epoch of the first document of the next window.
    pub(super) end: u64,
}

impl Window {
    /// Packs the window that begins at document `start` of `epoch`. `documents` returns the number of the document at a position in the epoch. Errors
    /// with [`Error::Data`](ottava_common::Error::Data) if the tables of the data can no longer be read.
    pub(super) fn new(
        layout: &RowLayout,
        dataset: &TokenDataset,
        documents: impl Fn(u64) -> usize,
        count: u64,
        (seed, epoch, start): (u64, u64, u64),
    ) -> Result<Window> {
        let end = (start + WINDOW).min(count);
        let mut sized: Vec<(usize, u64)> = Vec::new();
        for place in start..end {
            let document = documents(place);
            let inputs = layout.inputs(dataset.document_len(document)?);
            if dataset.has_target(document, inputs)? {
                sized.push((inputs, document as u64));
            }
        }
        let rows = match layout.packing {
            Packing::None => sized.into_iter().map(|(_, document)| vec![document]).collect(),
            _ => {
                // The sort is stable, so documents of equal length stay in the order of the epoch.
                sized.sort_by_key(|&(inputs, _)| std::cmp::Reverse(inputs));
                best_fit(&sized, layout.seq_len, layout.max_documents.unwrap_or(usize::MAX))
            }
        };
        let order = Permutation::new(rows.len() as u64, seed, (epoch << 32).wrapping_add(start / WINDOW + 1));
        Ok(Window { rows, order, end })
    }

    /// Returns the number of rows.
    pub(super) fn len(&self) -> u64 {
        self.rows.len() as u64
    }

    /// Returns the documents of a row.
    pub(super) fn row(&self, index: u64) -> &[u64] {
        &self.rows[self.order.get(index) as usize]
    }
}

/// Puts each of `sized` (a size, at most `capacity`, and a document) into the row with the least sufficient space and fewer than `most` documents, or into
/// a new row. Rows are fullest if `sized` begins with the longest document.
pub fn best_fit(sized: &[(usize, u64)], capacity: usize, most: usize) -> Vec<Vec<u64>> {
    let mut rows: Vec<Vec<u64>> = Vec::new();
    // The free space and the index of each row with room. Among rows with equal space, the oldest is used first.
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
        if space > size && rows[row].len() < most {
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
        assert_eq!(best_fit(&sized, 10, usize::MAX), [vec![0, 7], vec![1, 4], vec![2, 3], vec![5, 6]]);
        assert_eq!(best_fit(&sized[4..], 10, usize::MAX), [vec![4, 5, 6, 7]]);
        assert_eq!(best_fit(&sized[4..], 10, 2), [vec![4, 5], vec![6, 7]]);
        assert_eq!(best_fit(&[], 10, usize::MAX), Vec::<Vec<u64>>::new());
        // Sizes are random. Every document must be packed once, rows must not exceed the capacity, and few rows may be incomplete.
        let mut sized: Vec<(usize, u64)> =
            (0..5000).map(|i| (1 + (ottava_common::hash::mix(i) % 300) as usize, i)).collect();
        sized.sort_by_key(|&(size, _)| std::cmp::Reverse(size));
        let rows = best_fit(&sized, 1024, usize::MAX);
        let size_of = |document: &u64| sized.iter().find(|(_, other)| other == document).unwrap().0;
        assert!(rows.iter().all(|row| row.iter().map(size_of).sum::<usize>() <= 1024));
        let mut all = rows.concat();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..5000));
        let total: usize = sized.iter().map(|(size, _)| size).sum();
        assert_eq!(rows.len(), total.div_ceil(1024));
    }
}
