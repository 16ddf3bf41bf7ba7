//! Segments: runs of a batch's rows that share no recurrent state, and the states with which they begin and end.

use super::real_type;
use crate::{DType, Error, Result, Tensor};
use std::ops::Range;

/// The segments of the rows of a matrix, one after the other. Each document of a training batch is a segment, and so are the new tokens of each
/// sequence of an inference batch.
#[derive(Clone, Copy, Debug)]
pub enum Segments<'a> {
    /// This many segments of equal length.
    Even(usize),
    /// The offsets of the segments, ascending, I32 `[N + 1]` on the device of the rows: segment `n` has the rows `at[n]..at[n + 1]`. A segment may
    /// be empty, and the first segment begins at row 0. Rows after the last segment are padding.
    At(&'a Tensor),
}

/// The states of recurrent sequences, in a pool of slots. An op reads the state of each segment from the slot of the segment's sequence, and replaces
/// it by the state after the segment.
pub struct SegmentStates<'a> {
    /// The states by slot, `[slots, …]`.
    pub values: &'a mut Tensor,
    /// The slot of each segment, I32 `[N]`. Segments that are not empty have different slots.
    pub slots: &'a Tensor,
    /// The number of earlier tokens of each segment's sequence, I32 `[N]`. With 0, the state before the segment is zero, regardless of the slot.
    pub past: &'a Tensor,
}

/// The states of segments that backward reads, each `[N, …]` in F32 (F64 for F64).
#[derive(Clone, Copy, Debug, Default)]
pub struct BoundaryStates<'a> {
    /// The states before the segments. `None` if they are zero and have no gradient.
    pub before: Option<&'a Tensor>,
    /// The gradients by the states after the segments. `None` if they are zero.
    pub gradient: Option<&'a Tensor>,
}

impl BoundaryStates<'_> {
    /// Errors unless the states of `segments` of the rows `x` have this `shape`.
    pub(super) fn check(&self, what: &str, x: &Tensor, segments: &Segments, shape: &[usize]) -> Result<()> {
        let what = &format!("{what}: states");
        for state in [self.before, self.gradient].into_iter().flatten() {
            state.expect(what, &[&[segments.count()], shape].concat())?;
            state.expect_dtype(what, &[real_type(x.dtype())])?;
            state.expect_device(what, x.device())?;
        }
        Ok(())
    }
}

/// Returns the number of each segment with rows, with each number below `heads`: the tasks that a recurrence runs in parallel.
pub(super) fn tasks(ranges: &[Range<usize>], heads: usize) -> Vec<[usize; 2]> {
    let segments = ranges.iter().enumerate().filter(|(_, range)| !range.is_empty());
    segments.flat_map(|(segment, _)| (0..heads).map(move |head| [segment, head])).collect()
}

/// Writes `rows` `[n, count]` to the columns `column..column + count` of the rows of `to`, which have `width` columns, beginning with row `first`.
pub(super) fn scatter<T: Copy>(rows: &[T], first: usize, [width, column, count]: [usize; 3], to: &mut [T]) {
    for (row, t) in rows.chunks_exact(count).zip(first..) {
        to[t * width + column..][..count].copy_from_slice(row);
    }
}

impl<'a> Segments<'a> {
    /// Returns the longest segment that a batch of `rows` rows can have.
    pub(super) fn longest(&self, rows: usize) -> usize {
        match self {
            Segments::Even(count) => rows.checked_div(*count).unwrap_or(0),
            Segments::At(_) => rows,
        }
    }

    /// Returns the number of segments.
    pub(super) fn count(&self) -> usize {
        match self {
            Segments::Even(count) => *count,
            Segments::At(at) => at.len().saturating_sub(1),
        }
    }

    /// Returns the offsets, or `None` for segments of equal length.
    pub(super) fn offsets(&self) -> Option<&'a Tensor> {
        match self {
            Segments::Even(_) => None,
            Segments::At(at) => Some(at),
        }
    }

    /// Errors unless the segments fit a matrix `x` of `rows` rows.
    pub(super) fn check(&self, what: &str, x: &Tensor, rows: usize) -> Result<()> {
        match self {
            Segments::Even(0) if rows > 0 => Err(Error::Value(format!("{what}: {rows} rows have no segment"))),
            Segments::Even(count) if *count > 0 && !rows.is_multiple_of(*count) => {
                Err(Error::Value(format!("{what}: {rows} rows do not divide into {count} segments of equal length")))
            }
            Segments::Even(_) => Ok(()),
            Segments::At(at) => {
                let what = &format!("{what}: offsets of segments");
                if at.dims::<1>(what)? == [0] {
                    return Err(Error::Value(format!("{what}: there are none; N segments have N + 1 offsets")));
                }
                at.expect_dtype(what, &[DType::I32])?;
                at.expect_device(what, x.device())
            }
        }
    }

    /// Returns the rows of each segment, on the CPU.
    ///
    /// Errors with [`Error::Value`] if the offsets descend or exceed `rows`.
    pub(super) fn ranges(&self, what: &str, rows: usize) -> Result<Vec<Range<usize>>> {
        match self {
            Segments::Even(count) => {
                let len = rows.checked_div(*count).unwrap_or(0);
                Ok((0..*count).map(|n| n * len..(n + 1) * len).collect())
            }
            Segments::At(at) => {
                let at = at.host::<i32>();
                let fits = |pair: &[i32]| 0 <= pair[0] && pair[0] <= pair[1] && pair[1] as usize <= rows;
                match at.windows(2).find(|pair| !fits(pair)) {
                    Some(pair) => {
                        Err(Error::Value(format!("{what}: a segment has the rows {}..{} of {rows}", pair[0], pair[1])))
                    }
                    None => Ok(at.windows(2).map(|pair| pair[0] as usize..pair[1] as usize).collect()),
                }
            }
        }
    }
}

impl SegmentStates<'_> {
    /// Errors unless the slots of `segments` have states of this `shape` and type.
    pub(super) fn check(&self, what: &str, segments: &Segments, shape: &[usize], dtype: DType) -> Result<()> {
        let values = &*self.values;
        let slots = values.shape().first().copied().unwrap_or(0);
        values.expect(&format!("{what}: states"), &[&[slots], shape].concat())?;
        values.expect_dtype(&format!("{what}: states"), &[dtype])?;
        for (of, index) in [("slots", self.slots), ("past", self.past)] {
            let what = &format!("{what}: {of}");
            index.expect(what, &[segments.count()])?;
            index.expect_dtype(what, &[DType::I32])?;
            index.expect_device(what, values.device())?;
        }
        Ok(())
    }

    /// Returns the slot of each segment, and whether its state is read, on the CPU. A segment without rows has no slot.
    ///
    /// Errors with [`Error::Value`] if a slot does not exist or belongs to two segments.
    pub(super) fn of(&self, what: &str, ranges: &[Range<usize>]) -> Result<Vec<Option<(usize, bool)>>> {
        let mut is_taken = vec![false; self.values.shape()[0]];
        let (slots, past) = (self.slots.host::<i32>(), self.past.host::<i32>());
        let mut of = Vec::with_capacity(ranges.len());
        for ((range, &slot), &past) in ranges.iter().zip(slots).zip(past) {
            if range.is_empty() {
                of.push(None);
                continue;
            }
            let taken = usize::try_from(slot).ok().and_then(|slot| is_taken.get_mut(slot));
            match taken.map(|taken| std::mem::replace(taken, true)) {
                Some(false) => of.push(Some((slot as usize, past > 0))),
                Some(true) => return Err(Error::Value(format!("{what}: two segments have the state in slot {slot}"))),
                None => {
                    let count = self.values.shape()[0];
                    return Err(Error::Value(format!("{what}: slot {slot} of a pool of {count} states")));
                }
            }
        }
        Ok(of)
    }
}
