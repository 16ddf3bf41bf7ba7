//! Symmetric memory: device memory of which every rank of a group has as much, and to which the GPUs of other ranks may copy.

use super::buffer::DeviceBuffer;
use super::device::CudaDevice;
use super::lock::lock;
use crate::error::Result;
use std::sync::{Arc, Mutex};

/// Blocks that buffers take in turn. They do not return to the pool while the heap lives, since other processes may have opened them.
///
/// A buffer takes the smallest free block that is large enough. So ranks that take and drop buffers in the same order get blocks with the same
/// numbers.
#[derive(Default)]
pub(crate) struct SymmetricHeap(Mutex<Vec<Block>>);

struct Block {
    memory: DeviceBuffer,
    is_free: bool,
}

/// Where memory lies in a heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The number of its block.
    pub(crate) block: usize,
    /// Bytes from the start of the block.
    pub(crate) offset: u64,
}

impl SymmetricHeap {
    /// A buffer of `bytes`, and its block if that is new.
    pub(crate) fn take(
        self: &Arc<Self>,
        device: &Arc<CudaDevice>,
        bytes: usize,
    ) -> Result<(DeviceBuffer, Option<u64>)> {
        let mut blocks = lock(&self.0);
        let free = blocks.iter().enumerate().filter(|(_, block)| block.is_free && block.memory.len() >= bytes);
        let found = free.min_by_key(|(number, block)| (block.memory.len(), *number)).map(|(number, _)| number);
        let number = match found {
            Some(number) => number,
            None => {
                blocks.push(Block { memory: device.alloc(bytes)?, is_free: true });
                blocks.len() - 1
            }
        };
        let block = &mut blocks[number];
        let buffer = DeviceBuffer::of_heap(self, number, &block.memory, bytes)?;
        block.is_free = false;
        Ok((buffer, found.is_none().then(|| block.memory.ptr())))
    }

    /// Where the memory at `address` lies; `None` if it is not of this heap.
    pub(crate) fn find(&self, address: u64) -> Option<Place> {
        let blocks = lock(&self.0);
        blocks.iter().enumerate().find_map(|(number, block)| {
            let offset = address.checked_sub(block.memory.ptr())?;
            (offset < block.memory.len() as u64).then_some(Place { block: number, offset })
        })
    }

    /// Takes all blocks, if no buffer has one.
    pub(crate) fn take_blocks(&self) -> Vec<DeviceBuffer> {
        let mut blocks = lock(&self.0);
        let all_free = blocks.iter().all(|block| block.is_free);
        if all_free { blocks.drain(..).map(|block| block.memory).collect() } else { Vec::new() }
    }

    pub(super) fn give_back(&self, number: usize) {
        lock(&self.0)[number].is_free = true;
    }
}
