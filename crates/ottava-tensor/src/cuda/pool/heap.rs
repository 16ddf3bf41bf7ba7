//! A heap: the segments and blocks of one size class. Allocation is best fit with splitting, and free neighbours are merged.

use std::collections::{BTreeMap, BTreeSet};

/// The rounding of a heap in bytes. Blocks are multiples of `granule`, and segments have at least `segment` bytes.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) granule: usize,
    pub(super) segment: usize,
}

#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) bytes: usize,
    /// The address of the segment. Blocks merge only within one segment.
    pub(super) segment: u64,
    pub(super) free: bool,
    /// The number of the allocation that owns the block. It is undefined while the block is free.
    pub(super) owner: u64,
}

/// The segments and blocks of one size class.
pub(super) struct Heap {
    /// The minimum number of bytes of a segment.
    pub(super) segment: usize,
    pub(super) segments: BTreeMap<u64, usize>,
    /// The blocks by address.
    pub(super) blocks: BTreeMap<u64, Block>,
    /// The free blocks by size, then by address.
    pub(super) free: BTreeSet<(usize, u64)>,
}

impl Heap {
    pub(super) fn new(sizes: Sizes) -> Heap {
        Heap { segment: sizes.segment, segments: BTreeMap::new(), blocks: BTreeMap::new(), free: BTreeSet::new() }
    }

    /// Takes the smallest free block of at least `bytes` bytes, and splits off the rest.
    pub(super) fn take(&mut self, bytes: usize) -> Option<u64> {
        let &(size, address) = self.free.range((bytes, 0)..).next()?;
        self.free.remove(&(size, address));
        let block = self.blocks.get_mut(&address).expect("a free block is a block");
        block.free = false;
        if size > bytes {
            let (rest, segment) = (address + bytes as u64, block.segment);
            block.bytes = bytes;
            self.add_free(rest, Block { bytes: size - bytes, segment, free: true, owner: 0 });
        }
        Some(address)
    }

    /// Takes the whole free block at `address`.
    pub(super) fn claim(&mut self, address: u64) {
        let block = self.blocks.get_mut(&address).expect("it was just added");
        block.free = false;
        self.free.remove(&(block.bytes, address));
    }

    /// Takes the `bytes` bytes at `address` for `owner`, and returns true, if they are free.
    pub(super) fn take_at(&mut self, address: u64, bytes: usize, owner: u64) -> bool {
        if !self.is_free(address, bytes) {
            return false;
        }
        let (at, block) =
            self.blocks.range(..=address).next_back().map(|(&at, &block)| (at, block)).expect("it is free");
        self.remove_free(at, block.bytes);
        let (before, end) = ((address - at) as usize, address + bytes as u64);
        let after = block.bytes - before - bytes;
        for (start, bytes) in [(at, before), (end, after)].into_iter().filter(|(_, bytes)| *bytes > 0) {
            self.add_free(start, Block { bytes, ..block });
        }
        self.blocks.insert(address, Block { bytes, free: false, owner, ..block });
        true
    }

    /// Frees the block at `address`, merges it with free neighbours and returns its size.
    pub(super) fn give_back(&mut self, address: u64) -> usize {
        let mut block = self.blocks.remove(&address).expect("a buffer is a block");
        let (freed, mut start) = (block.bytes, address);
        block.free = true;

        let next = self.blocks.range(address..).next().map(|(&at, &next)| (at, next));
        if let Some((at, next)) = next.filter(|(_, next)| next.free && next.segment == block.segment) {
            self.remove_free(at, next.bytes);
            block.bytes += next.bytes;
        }
        let previous = self.blocks.range(..address).next_back().map(|(&at, &previous)| (at, previous));
        if let Some((at, previous)) =
            previous.filter(|(_, previous)| previous.free && previous.segment == block.segment)
        {
            self.remove_free(at, previous.bytes);
            block.bytes += previous.bytes;
            start = at;
        }
        self.add_free(start, block);
        freed
    }

    pub(super) fn add_segment(&mut self, address: u64, bytes: usize) {
        self.segments.insert(address, bytes);
        self.add_free(address, Block { bytes, segment: address, free: true, owner: 0 });
    }

    /// Removes segments without live blocks, and returns their addresses and sizes.
    pub(super) fn remove_idle(&mut self) -> Vec<(u64, usize)> {
        let whole = |&(&address, &bytes): &(&u64, &usize)| self.free.contains(&(bytes, address));
        let idle: Vec<_> = self.segments.iter().filter(whole).map(|(&address, &bytes)| (address, bytes)).collect();
        for &(address, bytes) in &idle {
            self.segments.remove(&address);
            self.remove_free(address, bytes);
        }
        idle
    }

    /// Returns whether `bytes` bytes from `address` are free.
    pub(super) fn is_free(&self, address: u64, bytes: usize) -> bool {
        let block = self.blocks.range(..=address).next_back();
        block.is_some_and(|(&at, block)| block.free && at + block.bytes as u64 >= address + bytes as u64)
    }

    /// Returns the free parts of `bytes` bytes from `address`.
    pub(super) fn free_parts(&self, address: u64, bytes: usize) -> Vec<(u64, usize)> {
        let end = address + bytes as u64;
        let first = self.blocks.range(..=address).next_back().map_or(address, |(&at, _)| at);
        let blocks = self.blocks.range(first..end).filter(|(_, block)| block.free);
        let parts = blocks.map(|(&at, block)| (at.max(address), end.min(at + block.bytes as u64)));
        parts.filter(|(from, to)| from < to).map(|(from, to)| (from, (to - from) as usize)).collect()
    }

    fn add_free(&mut self, address: u64, block: Block) {
        self.free.insert((block.bytes, address));
        self.blocks.insert(address, block);
    }

    fn remove_free(&mut self, address: u64, bytes: usize) {
        self.free.remove(&(bytes, address));
        self.blocks.remove(&address);
    }
}
