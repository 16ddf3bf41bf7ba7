//! The order of documents. It is computed and not stored: document `i` of an epoch is found in constant time, so a resumed run seeks instead of
//! skipping. The order does not depend on the number of workers.

use ottava_common::hash::mix;
use ottava_common::{Error, Result};

/// The number of rounds of the Feistel network. Four rounds suffice for a cipher with wide blocks, but small blocks need more to look random.
const ROUNDS: u32 = 8;

/// A pseudo-random permutation of `0..len`.
///
/// A balanced Feistel network permutes the numbers that have an even count of bits. If a result is not below `len`, it is permuted again until it is
/// ("cycle walking": Black and Rogaway 2002, *Ciphers with Arbitrary Finite Domains*). This takes fewer than four rounds on average, because the
/// domain of the network is at most four times `len`.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    len: u64,
    half_bits: u32,
    key: u64,
}

impl Permutation {
    /// Creates the permutation of `0..len` for `seed` and `epoch`.
    pub fn new(len: u64, seed: u64, epoch: u64) -> Permutation {
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        // The seed is mixed before the epoch is added, so that (1, 2) and (2, 1) give different keys.
        Permutation { len, half_bits: bits.div_ceil(2).max(1), key: mix(mix(seed).wrapping_add(epoch)) }
    }

    /// Returns the number of items.
    #[expect(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns the image of `index`. Panics unless `index` is below the length, which the caller must ensure.
    pub fn get(&self, index: u64) -> u64 {
        assert!(index < self.len, "index {index} of a permutation of {}", self.len);
        let mut value = self.network(index);
        while value >= self.len {
            value = self.network(value);
        }
        value
    }

    fn network(&self, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..ROUNDS {
            let f = mix(self.key ^ (u64::from(round) << 56) ^ right);
            (left, right) = (right, left ^ (f & mask));
        }
        left << self.half_bits | right
    }
}

/// The seed of the split. It is fixed, so that runs with different seeds are evaluated on the same documents.
const SPLIT_SEED: u64 = 0x6f74_7461_7661;

/// The split of documents into training and validation. Each document is in exactly one of the two.
#[derive(Clone, Copy, Debug)]
pub struct Split {
    documents: u64,
    /// The order of the documents; `None` is the order of the files.
    order: Option<Permutation>,
    validation: u64,
    /// The number of consecutive documents that stay together.
    together: u64,
}

impl Split {
    /// Splits `documents` documents. If `val_set_size` is below 1, it is a fraction (at least one document), else a count. Errors with
    /// [`Error::Config`] if it is neither, or if no training documents are left.
    pub fn new(documents: usize, val_set_size: f64) -> Result<Split> {
        let documents = documents as u64;
        let validation = match val_set_size {
            0.0 => 0,
            size if 0.0 < size && size < 1.0 => ((documents as f64 * size).round() as u64).max(1),
            size if size >= 1.0 && size.fract() == 0.0 => size as u64,
            size => {
                return Err(Error::Config(format!(
                    "val_set_size is {size}; expected a fraction below 1 or a whole number of documents"
                )));
            }
        };
        if validation >= documents {
            return Err(Error::Config(format!(
                "val_set_size keeps {validation} of {documents} documents for validation, which leaves none to train on; set `val_set_size=0`, or add documents"
            )));
        }
        Ok(Split { documents, order: Some(Permutation::new(documents, SPLIT_SEED, 0)), validation, together: 1 })
    }

    /// Takes the first `validation` of `documents` documents for validation, and the others for training.
    ///
    /// Errors with [`Error::Config`] if no training documents are left.
    pub fn leading(documents: usize, validation: u64) -> Result<Split> {
        let documents = documents as u64;
        match validation < documents {
            true => Ok(Split { documents, order: None, validation, together: 1 }),
            false => Err(Error::Config("`train_files` hold no document to train on".into())),
        }
    }

    /// Takes all `documents` documents for validation, in the order of the files. Used to evaluate a finished model.
    pub fn all_validation(documents: usize) -> Split {
        Split { documents: documents as u64, order: None, validation: documents as u64, together: 1 }
    }

    /// Returns the same split of groups: each group of `together` consecutive documents stays together.
    pub fn of_groups(self, together: usize) -> Split {
        Split { together: together as u64, ..self }
    }

    /// Returns a key that differs between different splits of the same documents.
    pub(super) fn key(&self) -> (u64, bool) {
        (self.validation_len(), self.order.is_some())
    }

    /// Returns the number of training documents.
    pub fn train_len(&self) -> u64 {
        (self.documents - self.validation) * self.together
    }

    /// Returns the number of validation documents.
    pub fn validation_len(&self) -> u64 {
        self.validation * self.together
    }

    /// Returns the `i`th training document.
    pub fn train(&self, i: u64) -> usize {
        self.document(self.validation_len() + i)
    }

    /// Returns the `i`th validation document.
    pub fn validation(&self, i: u64) -> usize {
        assert!(i < self.validation_len(), "validation document {i} of {}", self.validation_len());
        self.document(i)
    }

    fn document(&self, i: u64) -> usize {
        let (group, place) = (i / self.together, i % self.together);
        (self.order.as_ref().map_or(group, |order| order.get(group)) * self.together + place) as usize
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn all(len: u64, seed: u64, epoch: u64) -> Vec<u64> {
        let order = Permutation::new(len, seed, epoch);
        (0..len).map(|i| order.get(i)).collect()
    }

    #[test]
    fn every_length_is_permuted_one_to_one() {
        for len in 1..=2000 {
            let mut sorted = all(len, 7, len % 5);
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..len), "length {len}");
        }
        // So many items cannot be stored in a table.
        let order = Permutation::new(1 << 60, 1, 0);
        assert!((0..1000).map(|i| order.get(i)).collect::<HashSet<_>>().len() == 1000);
    }

    #[test]
    fn leading_documents_are_for_validation() {
        let split = Split::leading(5, 2).unwrap();
        assert_eq!((split.train_len(), split.validation_len()), (3, 2));
        assert_eq!((0..3).map(|i| split.train(i)).collect::<Vec<_>>(), [2, 3, 4]);
        assert_eq!((0..2).map(|i| split.validation(i)).collect::<Vec<_>>(), [0, 1]);
        assert!(Split::leading(2, 2).unwrap_err().to_string().contains("no document to train on"));
    }

    #[test]
    fn orders_are_repeatable_and_differ_by_seed_and_epoch() {
        let orders: HashSet<_> = [(1, 2), (2, 1), (1, 1), (0, 0), (0, 1), (1, 0)].map(|(s, e)| all(500, s, e)).into();
        assert_eq!(orders.len(), 6);
        assert_eq!(all(500, 3, 4), all(500, 3, 4));
        // The order is part of the checkpoint format: if it changed, runs could not resume.
        assert_eq!(all(10, 42, 0), [9, 6, 3, 5, 0, 2, 7, 4, 8, 1]);
    }

    #[test]
    fn every_item_is_as_likely_at_every_place() {
        // The cells are 20 by 20, with 2,000 seeds and an expected count of 100 in each. Chi-square with 399 degrees of freedom has mean 399 and
        // standard deviation 28.
        let (len, seeds) = (20, 2000);
        let mut counts = vec![0_u32; 400];
        for seed in 0..seeds {
            for (i, item) in all(len, seed, 0).into_iter().enumerate() {
                counts[i * 20 + item as usize] += 1;
            }
        }
        let chi_square: f64 = counts.iter().map(|&n| (f64::from(n) - 100.0).powi(2) / 100.0).sum();
        assert!((260.0..540.0).contains(&chi_square), "{chi_square}");
    }

    #[test]
    fn neighbours_are_spread_over_the_whole_range() {
        // The mean distance of two random positions is a third of the range.
        for len in [1000_u64, 1024, 5000] {
            let order = all(len, 1, 0);
            let distance: u64 = order.windows(2).map(|pair| pair[0].abs_diff(pair[1])).sum();
            let mean = distance as f64 / (len - 1) as f64 / len as f64;
            assert!((0.3..0.37).contains(&mean), "{len}: {mean}");
        }
    }

    #[test]
    fn a_split_holds_every_document_once() {
        for (documents, size, validation) in [(1, 0.0, 0), (2, 0.01, 1), (100, 0.05, 5), (100, 99.0, 99), (7, 1.0, 1)] {
            let split = Split::new(documents, size).unwrap();
            assert_eq!(split.validation_len(), validation);
            let train = (0..split.train_len()).map(|i| split.train(i));
            let mut documents_seen: Vec<_> = train.chain((0..validation).map(|i| split.validation(i))).collect();
            documents_seen.sort_unstable();
            assert!(documents_seen.into_iter().eq(0..documents));
        }
    }

    #[test]
    fn a_larger_validation_set_contains_the_smaller_one() {
        let documents = |size| {
            let split = Split::new(1000, size).unwrap();
            (0..split.validation_len()).map(|i| split.validation(i)).collect::<HashSet<_>>()
        };
        assert!(documents(10.0).is_subset(&documents(0.1)));
    }

    #[test]
    fn impossible_splits_are_errors() {
        for (documents, size) in [(10, 10.0), (10, 1e30), (1, 0.5), (10, -1.0), (10, 1.5), (10, f64::NAN), (0, 0.0)] {
            assert!(matches!(Split::new(documents, size), Err(Error::Config(_))), "{documents}, {size}");
        }
        let error = Split::new(1, 0.01).unwrap_err().to_string();
        assert!(error.contains("1 of 1 documents") && error.contains("`val_set_size=0`"), "{error}");
    }
}
