//! Rows of tensors on the CPU as parallel iterators. Each task has enough rows to be worth waking a thread.

use rayon::iter::{IndexedParallelIterator, MinLen};
use rayon::slice::{Chunks, ChunksMut, ParallelSlice, ParallelSliceMut};

/// The minimum number of elements of a task: about what a thread computes in the time that it takes to wake another thread.
pub(crate) const TASK: usize = 1 << 12;

/// Returns the minimum number of rows of a task, for rows that cost as much as `width` elements.
pub(crate) fn rows_per_task(width: usize) -> usize {
    TASK.div_ceil(width.max(1))
}

/// A slice whose rows are computed in parallel. A `width` of 0 is read as 1. If iterators are zipped, the largest minimum counts, so the widest rows decide:
/// other slices are divided by `par_chunks`. Tasks never share a row, so results do not depend on the size of tasks.
pub(crate) trait ParallelRows<T> {
    /// Returns the rows `[width]`. The last row may be shorter.
    fn par_rows(&self, width: usize) -> MinLen<Chunks<'_, T>>;

    /// Returns the rows `[width]`. The last row may be shorter.
    fn par_rows_mut(&mut self, width: usize) -> MinLen<ChunksMut<'_, T>>;
}

impl<T: Send + Sync> ParallelRows<T> for [T] {
    fn par_rows(&self, width: usize) -> MinLen<Chunks<'_, T>> {
        self.par_chunks(width.max(1)).with_min_len(rows_per_task(width))
    }

    fn par_rows_mut(&mut self, width: usize) -> MinLen<ChunksMut<'_, T>> {
        self.par_chunks_mut(width.max(1)).with_min_len(rows_per_task(width))
    }
}
