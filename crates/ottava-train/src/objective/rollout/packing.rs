//! Packs samples into micro-batches. A row holds several samples, so that short completions leave little padding. Each sample is a document.

use super::sample::{Sample, write_sample};
use ottava_data::{Batch, RowShare, best_fit, max_unknown_documents};
use ottava_tensor::ops::IGNORE_INDEX;
use std::cmp::Reverse;

/// How samples become rows of micro-batches.
#[derive(Clone, Copy, Debug)]
pub struct SampleRows {
    /// Rows of a micro-batch.
    pub rows: usize,
    /// Tokens of a row.
    pub max_length: usize,
    /// The token that pads a row.
    pub end: u32,
}

/// A micro-batch of samples.
#[derive(Clone, Debug)]
pub struct PackedBatch {
    /// The tokens.
    pub batch: Batch,
    /// The places of the samples of the micro-batch.
    pub places: Vec<Place>,
}

/// Where a sample is in a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The index of the sample among the packed samples.
    pub sample: usize,
    /// The position of the first token of the sample in the micro-batch.
    pub start: usize,
}

/// The maximum number of documents of a row: its samples and its padding.
pub fn documents_of_row(max_length: usize) -> usize {
    max_unknown_documents(max_length) + 1
}

impl SampleRows {
    /// Packs `samples` into micro-batches, and returns the micro-batches of this rank. All ranks get equally many micro-batches, and their numbers of
    /// filled rows differ by at most one. There are never more filled rows than samples.
    pub fn pack(&self, samples: &[&Sample], share: RowShare) -> Vec<PackedBatch> {
        let all = self.rows_of(samples);
        let count = all.len().div_ceil(share.world).div_ceil(self.rows);
        let mine: Vec<&[u64]> = all.iter().skip(share.rank).step_by(share.world).map(Vec::as_slice).collect();
        (0..count).map(|at| self.batch(samples, mine.get(at * self.rows..).unwrap_or_default())).collect()
    }

    /// Returns a micro-batch without samples.
    pub fn empty(&self) -> PackedBatch {
        self.batch(&[], &[])
    }

    /// Returns the indices of the samples of each row.
    fn rows_of(&self, samples: &[&Sample]) -> Vec<Vec<u64>> {
        let mut sized: Vec<(usize, u64)> = samples.iter().map(|sample| sample.length()).zip(0..).collect();
        sized.sort_by_key(|&(length, _)| Reverse(length));
        best_fit(&sized, self.max_length, max_unknown_documents(self.max_length))
    }

    /// Returns the micro-batch of the first `self.rows` of `rows`, which hold indices of `samples`.
    fn batch(&self, samples: &[&Sample], rows: &[&[u64]]) -> PackedBatch {
        let SampleRows { rows: count, max_length, end } = *self;
        let tokens = count * max_length;
        let mut batch = Batch::whole(vec![end as i32; tokens], vec![IGNORE_INDEX; tokens], count);
        let (mut places, mut documents) = (Vec::new(), Vec::new());
        for row in 0..count {
            let first = row * max_length;
            let mut start = first;
            for &sample in rows.get(row).copied().unwrap_or_default() {
                let sample = sample as usize;
                write_sample(&mut batch, start, samples[sample]);
                places.push(Place { sample, start });
                documents.push(samples[sample].length());
                start += samples[sample].length();
            }
            batch.padding[row] = first + max_length - start;
            documents.extend(Some(batch.padding[row]).filter(|&padding| padding > 0));
        }
        batch.documents = Some(documents);
        PackedBatch { batch, places }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objective::rollout::End;
    use ottava_common::hash::mix;

    const ROWS: SampleRows = SampleRows { rows: 2, max_length: 16, end: 1 };

    fn sample(length: usize, token: u32) -> Sample {
        let tokens = vec![token; length - 2];
        Sample::of_turn(vec![7, token], tokens.clone(), vec![-0.5; tokens.len()], End::Text)
    }

    #[test]
    fn samples_share_rows_and_are_documents() {
        let x = IGNORE_INDEX;
        let all = [sample(4, 20), sample(9, 21), sample(16, 22)];
        let packed = ROWS.pack(&all.each_ref(), RowShare::ALL);
        assert_eq!(packed.len(), 1);
        let PackedBatch { batch, places } = &packed[0];
        let places: Vec<_> = places.iter().map(|place| (place.sample, place.start)).collect();
        assert_eq!(places, [(2, 0), (1, 16), (0, 25)]);
        assert_eq!(batch.inputs[16..], [7, 21, 21, 21, 21, 21, 21, 21, 21, 7, 20, 20, 20, 1, 1, 1]);
        assert_eq!(batch.targets[16..], [x, 21, 21, 21, 21, 21, 21, 21, x, x, 20, 20, x, x, x, x]);
        assert_eq!((batch.documents.as_deref(), &batch.padding[..]), (Some(&[16, 9, 4, 3][..]), &[0, 3][..]));
    }

    /// Each sample is in one micro-batch of one rank, no row overflows, and no rank has more micro-batches than with one sample per row.
    #[test]
    fn every_sample_is_packed_once() {
        for (count, world) in [(1, 1), (8, 1), (8, 2), (24, 4), (24, 3)] {
            for seed in 0..20 {
                let length = |at: usize| 3 + (mix(seed * 100 + at as u64) % 14) as usize;
                let all: Vec<Sample> = (0..count).map(|at| sample(length(at), 10 + at as u32)).collect();
                let refs: Vec<&Sample> = all.iter().collect();
                let of_ranks: Vec<_> = (0..world).map(|rank| ROWS.pack(&refs, RowShare { rank, world })).collect();
                let mut found = Vec::new();
                for packed in of_ranks.iter().flatten() {
                    let documents = packed.batch.documents.as_ref().unwrap();
                    assert_eq!(documents.iter().sum::<usize>(), 32);
                    assert!(documents.len() <= 2 * documents_of_row(16));
                    for &Place { sample, start } in &packed.places {
                        let tokens: Vec<i32> =
                            all[sample].prompt.iter().chain(&all[sample].tokens).map(|&token| token as i32).collect();
                        assert_eq!(packed.batch.inputs[start..][..tokens.len()], tokens);
                        assert_eq!(start / 16, (start + tokens.len() - 1) / 16);
                        found.push(sample);
                    }
                }
                found.sort_unstable();
                assert_eq!(found, (0..count).collect::<Vec<_>>());
                assert!(of_ranks.iter().all(|own| own.len() == of_ranks[0].len()));
                assert!(of_ranks[0].len() <= count.div_ceil(world).div_ceil(2));
            }
        }
    }
}
