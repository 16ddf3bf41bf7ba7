//! Symmetric memory: device memory of which each rank of a group has the same amount. The GPUs of other ranks may copy to it.

use super::buffer::{DeviceBuffer, Lender};
use super::device::CudaDevice;
use super::lock::lock;
use crate::error::Result;
use std::sync::{Arc, Mutex};

/// Blocks that are lent to one buffer at a time. They do not return to the pool while the heap lives, because other processes may have opened them.
///
/// A buffer takes the smallest free block that is large enough. If ranks take and drop buffers in the same order, they get blocks with the same
/// numbers.
#[derive(Default)]
pub(crate) struct SymmetricHeap(Mutex<Vec<Block>>);

struct Block {
    memory: DeviceBuffer,
    is_free: bool,
}

/// The position of memory in a heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The number of the block.
    pub(crate) block: usize,
    /// The offset in bytes from the start of the block.
    pub(crate) offset: u64,
}

impl SymmetricHeap {
    /// Returns a buffer of `bytes` bytes, and its block if the block is new.
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
                blocks.push(Block { memory: device.alloc_segment(bytes)?, is_free: true });
                blocks.len() - 1
            }
        };
        let block = &mut blocks[number];
        let buffer = block.memory.lend(bytes, self.clone(), number)?;
        block.is_free = false;
        Ok((buffer, found.is_none().then(|| block.memory.ptr())))
    }

    /// Returns the position of the memory at `address`, and `None` if this heap does not contain it.
    pub(crate) fn find(&self, address: u64) -> Option<Place> {
        let blocks = lock(&self.0);
        blocks.iter().enumerate().find_map(|(number, block)| {
            let offset = address.checked_sub(block.memory.ptr())?;
            (offset < block.memory.len() as u64).then_some(Place { block: number, offset })
        })
    }

    /// Takes the blocks out of the heap if no buffer has one.
    pub(crate) fn take_blocks(&self) -> Vec<DeviceBuffer> {
        let mut blocks = lock(&self.0);
        let all_free = blocks.iter().all(|block| block.is_free);
        if all_free { blocks.drain(..).map(|block| block.memory).collect() } else { Vec::new() }
    }
}

impl Lender for SymmetricHeap {
    fn take_back(&self, number: usize) {
        lock(&self.0)[number].is_free = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::GpuModel;
    use crate::device::Device;

    #[test]
    fn buffers_take_the_smallest_free_block_and_give_it_back() {
        let Device::Cuda(gpu) = Device::dry_gpu(GpuModel::h200()) else { unreachable!("it is one") };
        let heap = Arc::new(SymmetricHeap::default());
        let (small, new) = heap.take(&gpu, 3 << 20).unwrap();
        let (large, newer) = heap.take(&gpu, 8 << 20).unwrap();
        assert_eq!((new, newer), (Some(small.ptr()), Some(large.ptr())));
        let [at_small, at_large] = [small.ptr(), large.ptr()];
        assert_eq!(heap.find(at_large + 5), Some(Place { block: 1, offset: 5 }));
        assert_eq!(heap.find(at_large + (8 << 20)), None);
        let held = gpu.memory().allocated;
        drop((small, large));
        assert_eq!(gpu.memory().allocated, held, "the heap keeps its blocks");
        let (first, new) = heap.take(&gpu, 1 << 20).unwrap();
        let (second, newer) = heap.take(&gpu, 1 << 20).unwrap();
        assert_eq!((first.ptr(), first.len(), new, newer), (at_small, 1 << 20, None, None));
        assert_eq!(second.ptr(), at_large);
        drop(first);
        assert!(heap.take_blocks().is_empty(), "a buffer has one of the blocks");
        drop(second);
        assert_eq!(heap.take_blocks().len(), 2);
        assert_eq!((gpu.memory().allocated, heap.find(at_small)), (0, None));
    }
}
