//! Memory that is divided into parts, which are written independently and joined again.
//!
//! A collective works on one flat buffer for many tensors, and ops work on each of these tensors. Both need to own the memory, at different times.
//!
//! For example, all gradients of a block are one buffer for the reduction over ranks. `Tensor::split` turns the buffer into one tensor per matrix
//! without a copy, and each tensor is the only owner of its bytes. `Tensor::join` turns the tensors back into the buffer. So ops write gradients
//! directly into the buffer that is reduced, and casts write codes directly into the buffer that is gathered.

use crate::error::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// Memory that knows its size.
pub(crate) trait Memory {
    /// Returns the number of bytes of the memory.
    fn bytes(&self) -> usize;
}

/// The only access to some bytes of a memory. Parts of one memory never overlap.
pub(crate) struct Part<M> {
    memory: Arc<M>,
    range: Range<usize>,
}

impl<M: Memory> Part<M> {
    /// Creates the part that covers a whole memory.
    pub fn whole(memory: M) -> Part<M> {
        let range = 0..memory.bytes();
        Part { memory: Arc::new(memory), range }
    }

    /// Returns the memory that the part belongs to.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Returns the offset of the part in the memory.
    pub fn start(&self) -> usize {
        self.range.start
    }

    /// Returns the number of bytes of the part.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Divides this part into `ranges` of its bytes, which ascend and do not overlap. Bytes between the ranges have no owner until the memory is
    /// joined.
    pub fn split(self, ranges: &[Range<usize>]) -> Result<Vec<Part<M>>> {
        let mut free = 0;
        let cut = |range: &Range<usize>| {
            if range.start < free || range.end < range.start || range.end > self.len() {
                return Err(Error::Value(format!(
                    "split: bytes {range:?} are not those of one part among {ranges:?} of {} bytes",
                    self.len()
                )));
            }
            free = range.end;
            let range = self.start() + range.start..self.start() + range.end;
            Ok(Part { memory: self.memory.clone(), range })
        };
        ranges.iter().map(cut).collect()
    }

    /// Returns the whole memory, if `parts` are all of its parts.
    pub fn join(parts: Vec<Part<M>>) -> Result<Part<M>> {
        let mut parts = parts.into_iter();
        let first = parts.next().ok_or_else(|| Error::Value("join: there are no parts".into()))?;
        for part in parts {
            if !Arc::ptr_eq(&part.memory, &first.memory) {
                return Err(Error::Value("join: the parts are not of one memory".into()));
            }
        }
        match Arc::strong_count(&first.memory) {
            1 => Ok(Part { range: 0..first.memory.bytes(), ..first }),
            others => Err(Error::Value(format!("join: {} parts of the memory are elsewhere", others - 1))),
        }
    }
}
