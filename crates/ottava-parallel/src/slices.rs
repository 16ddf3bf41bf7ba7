//! The division of a unit's matrices into slices, one per rank. It is pure arithmetic, with the same result on every rank.
//!
//! A unit (a block, the embedding, the head) is a flat buffer in which each matrix starts at a multiple of [`GRANULE`] elements. The buffer
//! is divided into equal slices, one per rank, so that one gather and one reduction serve the unit, and slices are balanced for all shapes. Slices
//! start at multiples of [`GRANULE`]. So if rows are multiples of 128, no group of 128 elements with one scale is divided. Each slice of a
//! matrix can be reshaped to at least 16 rows, as tensor ops require.
//!
//! Whole rows would be simpler to cast than flat slices, but rows do not divide evenly: 22016 rows over 4096 ranks waste 12 %. Groups of moments
//! need only multiples of 128. With 256, each slice is a matrix whose rows and columns are multiples of 16, as casts require. Norms and biases are
//! not divided: they are 0.004 % of Llama-2-7B.

use std::ops::Range;

/// The number of elements at whose multiples slices and matrices start.
pub const GRANULE: usize = 256;

/// The matrices of a unit in a flat buffer, divided into one slice per rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slices {
    /// The range of each matrix in the buffer.
    matrices: Vec<Range<usize>>,
    /// The number of elements of a slice.
    slice: usize,
    ranks: usize,
}

impl Slices {
    /// Divides matrices with these numbers of elements among `ranks` ranks. Panics if `ranks` is 0.
    pub fn new(lengths: impl IntoIterator<Item = usize>, ranks: usize) -> Slices {
        let mut end = 0;
        let place = |length| {
            let start = usize::next_multiple_of(end, GRANULE);
            end = start + length;
            start..end
        };
        let matrices = lengths.into_iter().map(place).collect();
        Slices { matrices, slice: end.div_ceil(GRANULE).div_ceil(ranks) * GRANULE, ranks }
    }

    /// Returns the number of elements of each slice, padding included.
    pub fn slice_len(&self) -> usize {
        self.slice
    }

    /// Returns the number of elements of the whole buffer, padding included.
    pub fn padded_len(&self) -> usize {
        self.slice * self.ranks
    }

    /// Returns the ranges of the matrices in the buffer.
    pub fn matrices(&self) -> &[Range<usize>] {
        &self.matrices
    }

    /// Returns the gaps between the matrices in the buffer, and the gap after the last matrix.
    pub fn padding(&self) -> impl Iterator<Item = Range<usize>> {
        let starts = self.matrices.iter().skip(1).map(|matrix| matrix.start).chain([self.padded_len()]);
        let gaps = self.matrices.iter().zip(starts).map(|(matrix, next)| matrix.end..next);
        gaps.filter(|gap| !gap.is_empty())
    }

    /// Returns the elements of each matrix in the slice of `rank`, counted from the start of the matrix. The range is empty if the slice has none.
    pub fn owned(&self, rank: usize) -> Vec<Range<usize>> {
        let slice = rank * self.slice..(rank + 1) * self.slice;
        let of = |matrix: &Range<usize>| {
            let start = matrix.start.max(slice.start).min(matrix.end);
            start - matrix.start..matrix.end.min(slice.end).max(start) - matrix.start
        };
        self.matrices.iter().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns numbers of elements as in models (norms, biases, matrices), and awkward numbers.
    fn lengths() -> impl Strategy<Value = Vec<usize>> {
        let matrix = (1..40usize, 1..40usize).prop_map(|(rows, columns)| rows * columns * GRANULE);
        let length = prop_oneof![0..300usize, Just(GRANULE), matrix, 1..5_000_000usize];
        proptest::collection::vec(length, 0..12)
    }

    proptest! {
        #[test]
        fn every_element_has_one_owner(lengths in lengths(), ranks in prop_oneof![1..9usize, 1..4097usize]) {
            let slices = Slices::new(lengths.clone(), ranks);
            let mut next = vec![0; lengths.len()];
            for rank in 0..ranks {
                for (matrix, owned) in slices.owned(rank).into_iter().enumerate() {
                    if owned.is_empty() {
                        continue;
                    }
                    prop_assert_eq!(owned.start, next[matrix], "no gap and no overlap");
                    prop_assert!(owned.start % GRANULE == 0, "cuts lie at granules");
                    next[matrix] = owned.end;
                    let start = slices.matrices()[matrix].start;
                    let slice = rank * slices.slice_len()..(rank + 1) * slices.slice_len();
                    let at = start + owned.start..start + owned.end;
                    prop_assert!(slice.start <= at.start && at.end <= slice.end, "a gather in place puts it there");
                }
            }
            prop_assert_eq!(next, lengths);
        }

        /// Slices are equal. Padding is less than one granule per rank and matrix.
        #[test]
        fn slices_balance(lengths in lengths(), ranks in 1..4097usize) {
            let slices = Slices::new(lengths.clone(), ranks);
            let elements: usize = lengths.iter().sum();
            prop_assert!(slices.padded_len() < elements + GRANULE * (ranks + lengths.len()));
            let padding: usize = slices.padding().map(|gap| gap.len()).sum();
            prop_assert!(lengths.is_empty() || padding + elements == slices.padded_len());
        }
    }

    #[test]
    fn a_block_of_llama_2_7b_wastes_nothing_on_any_power_of_two() {
        let lengths = [12288 * 4096, 4096 * 4096, 22016 * 4096, 4096 * 11008];
        for ranks in [1, 2, 4, 8, 64, 1024] {
            assert_eq!(Slices::new(lengths, ranks).padded_len(), lengths.iter().sum::<usize>(), "{ranks} ranks");
        }
    }
}
