//! The pool of device memory: a caching allocator that splits large segments from the driver into blocks.
//!
//! A freed block can be reused at once. Because the work goes through one stream, the work of the next owner runs after the work of the previous
//! owner. Small and large requests have separate segments, so that a long-lived scalar does not fragment the space of activations.
//! Allocation is best fit with splitting, and free neighbours are merged. With fixed shapes, each step after the first gets the same
//! blocks.
//!
//! Requests up to 1 MiB share segments of 4 MiB. Larger requests share segments of at least 64 MiB. `MemoryStats::driver_allocations` counts
//! requests to the driver. When memory runs out, idle segments are first returned to the driver. If memory is still short, `Error::OutOfMemory`
//! reports the requested and the free bytes.
//!
//! A pool needs no plan, as an arena would, and after the first step it behaves like an arena. A dry run predicts its size.

mod heap;

use crate::error::{Error, Result};
use heap::{Heap, Sizes};

/// The source of segments: the driver, a dry run, or a fake in tests.
pub(super) trait Backing {
    /// Returns a new segment, and `None` if the source has too little memory.
    fn allocate(&self, bytes: usize) -> Result<Option<u64>>;
    /// Frees a segment that no enqueued work uses.
    fn free(&self, pointer: u64) -> Result<()>;
    /// Waits for the stream, so that segments may be freed.
    fn synchronize(&self) -> Result<()>;
    /// Returns the number of free and total bytes.
    fn memory_info(&self) -> Result<(usize, usize)>;
}

/// Statistics of a memory pool, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// The number of bytes of live blocks, including rounding.
    pub allocated: usize,
    /// The maximum of `allocated` since the last reset.
    pub peak: usize,
    /// The number of bytes taken from the driver, live or free.
    pub reserved: usize,
    /// The number of allocations from the driver. It is constant after the first step with fixed shapes.
    pub driver_allocations: usize,
}

/// The maximum size of requests that share small segments.
const SMALL_LIMIT: usize = 1 << 20;
const SMALL: Sizes = Sizes { granule: 512, segment: 4 << 20 };
const LARGE: Sizes = Sizes { granule: 2 << 20, segment: 64 << 20 };

/// The memory that a captured graph uses.
#[derive(Debug, Default)]
pub(super) struct Footprint {
    /// The blocks that were live at the end of the capture: address and owner.
    owned: Vec<(u64, u64)>,
    /// The memory that was allocated and freed during the capture: address and size.
    transient: Vec<(u64, usize)>,
    /// The pool's number of changes when the footprint was last found intact.
    checked: u64,
}

/// Returns the block size for a request of `bytes` bytes. A request of 0 bytes counts as 1 byte.
pub(super) fn rounded(bytes: usize) -> usize {
    let sizes = if bytes <= SMALL_LIMIT { SMALL } else { LARGE };
    bytes.max(1).next_multiple_of(sizes.granule)
}

fn expect_addressable(bytes: usize) -> Result<()> {
    match bytes <= isize::MAX as usize {
        true => Ok(()),
        false => Err(Error::Value(format!("{bytes} bytes exceed the address space"))),
    }
}

/// The caching allocator of one device.
pub(super) struct Pool<B: Backing> {
    backing: B,
    /// The number of bytes that the pool tries not to exceed. It returns idle segments before it exceeds this number.
    capacity: usize,
    small: Heap,
    large: Heap,
    stats: MemoryStats,
    /// The number of allocations and frees since the pool was created. The number of an allocation identifies its owner.
    changes: u64,
    /// The allocations since [`Pool::begin_capture`]: address and size.
    recording: Option<Vec<(u64, usize)>>,
}

impl<B: Backing> Pool<B> {
    /// Creates a pool with the `capacity` of a plan. A run returns idle segments when its dry run did, even if the driver has more memory. Its blocks
    /// thus have the same gaps.
    pub(super) fn new(backing: B, capacity: usize) -> Pool<B> {
        let (small, large) = (Heap::new(SMALL), Heap::new(LARGE));
        Pool { backing, capacity, small, large, stats: MemoryStats::default(), changes: 0, recording: None }
    }

    /// Allocates at least `bytes` uninitialised bytes, aligned to 512 bytes, and returns the address. A request of 0 bytes counts as 1 byte.
    pub(super) fn allocate(&mut self, bytes: usize) -> Result<u64> {
        expect_addressable(bytes)?;
        let (rounded, usual) = (rounded(bytes), self.heap(bytes).segment);
        let address = match self.heap(bytes).take(rounded) {
            Some(address) => address,
            None => {
                self.add_segment(bytes, usual)?;
                self.heap(bytes).take(rounded).expect("the new segment is large enough")
            }
        };
        Ok(self.record(address, bytes))
    }

    /// Allocates like [`Pool::allocate`], but in a separate segment. Memory that is kept long would fragment a shared segment.
    pub(super) fn allocate_segment(&mut self, bytes: usize) -> Result<u64> {
        expect_addressable(bytes)?;
        let address = self.add_segment(bytes, 0)?;
        self.heap(bytes).claim(address);
        Ok(self.record(address, bytes))
    }

    /// Returns the owner of the live block of `bytes` bytes at `address`, for [`Pool::take_again`].
    pub(super) fn owner(&mut self, address: u64, bytes: usize) -> u64 {
        self.heap(bytes).blocks.get(&address).expect("a buffer is a block").owner
    }

    /// Allocates the `bytes` bytes at `address` for `owner`, who had them before, and returns true, if nobody else has them. A graph that was captured
    /// while `owner` had them may then be replayed.
    pub(super) fn take_again(&mut self, address: u64, bytes: usize, owner: u64) -> bool {
        let rounded = rounded(bytes);
        if !self.heap(bytes).take_at(address, rounded, owner) {
            return false;
        }
        self.changes += 1;
        self.stats.allocated += rounded;
        self.stats.peak = self.stats.peak.max(self.stats.allocated);
        true
    }

    /// Adds a free segment for `bytes` bytes. It has `usual` bytes if enough memory is free. Returns its address.
    fn add_segment(&mut self, bytes: usize, usual: usize) -> Result<u64> {
        let (address, size) = self.new_segment(rounded(bytes), usual)?;
        self.heap(bytes).add_segment(address, size);
        Ok(address)
    }

    /// Records the allocation of the block at `address` for `bytes` bytes.
    fn record(&mut self, address: u64, bytes: usize) -> u64 {
        self.changes += 1;
        let (owner, rounded) = (self.changes, rounded(bytes));
        self.heap(bytes).blocks.get_mut(&address).expect("the block just taken").owner = owner;
        if let Some(recorded) = &mut self.recording {
            recorded.push((address, rounded));
        }
        self.stats.allocated += rounded;
        self.stats.peak = self.stats.peak.max(self.stats.allocated);
        address
    }

    /// Starts recording allocations.
    pub(super) fn begin_capture(&mut self) {
        self.recording = Some(Vec::new());
    }

    /// Returns the memory that work enqueued since [`Pool::begin_capture`] may use: the live blocks, and the blocks freed since then.
    pub(super) fn end_capture(&mut self) -> Footprint {
        let mut recorded = self.recording.take().unwrap_or_default();
        recorded.sort_unstable();
        recorded.dedup();
        let transient =
            recorded.iter().flat_map(|&(at, bytes)| [&self.small, &self.large].map(|h| h.free_parts(at, bytes)));
        let transient = transient.flatten().collect();
        let live = |heap: &Heap| -> Vec<(u64, u64)> {
            heap.blocks.iter().filter(|(_, block)| !block.free).map(|(&at, block)| (at, block.owner)).collect()
        };
        Footprint { owned: [live(&self.small), live(&self.large)].concat(), transient, checked: self.changes }
    }

    /// Returns whether the memory of a footprint has the same owners as at the end of the capture.
    pub(super) fn is_intact(&self, footprint: &mut Footprint) -> bool {
        if footprint.checked == self.changes {
            return true;
        }
        let same = |&(at, owner): &(u64, u64)| {
            let block = self.large.blocks.get(&at).or_else(|| self.small.blocks.get(&at));
            block.is_some_and(|block| !block.free && block.owner == owner)
        };
        let free = |&(at, bytes): &(u64, usize)| self.small.is_free(at, bytes) || self.large.is_free(at, bytes);
        let holds = footprint.owned.iter().all(same) && footprint.transient.iter().all(free);
        if holds {
            footprint.checked = self.changes;
        }
        holds
    }

    /// Frees an allocation of `bytes` bytes.
    pub(super) fn give_back(&mut self, address: u64, bytes: usize) {
        self.changes += 1;
        let freed = self.heap(bytes).give_back(address);
        self.stats.allocated -= freed;
    }

    /// Returns the number of bytes from the start of the live block that contains `address`. Returns `None` if no block contains it.
    pub(super) fn offset(&self, address: u64) -> Option<u64> {
        [&self.small, &self.large].iter().find_map(|heap| {
            let (&at, block) = heap.blocks.range(..=address).next_back()?;
            (!block.free && address < at + block.bytes as u64).then(|| address - at)
        })
    }

    pub(super) fn stats(&self) -> MemoryStats {
        self.stats
    }

    /// Returns the source of segments.
    pub(super) fn backing(&self) -> &B {
        &self.backing
    }

    /// Resets the peak to the number of live bytes.
    pub(super) fn reset_peak(&mut self) {
        self.stats.peak = self.stats.allocated;
    }

    /// Returns segments without live blocks to the driver.
    pub(super) fn release_idle(&mut self) -> Result<()> {
        self.backing.synchronize()?;
        self.changes += 1;
        for (address, bytes) in [self.small.remove_idle(), self.large.remove_idle()].concat() {
            self.stats.reserved -= bytes;
            self.backing.free(address)?;
        }
        Ok(())
    }

    fn heap(&mut self, bytes: usize) -> &mut Heap {
        if bytes <= SMALL_LIMIT { &mut self.small } else { &mut self.large }
    }

    /// Returns a segment of the larger of `needed` and `usual` bytes, or of `needed` bytes if memory is short. It exceeds the capacity only if
    /// `needed` bytes do not fit after the idle segments are released.
    fn new_segment(&mut self, needed: usize, usual: usize) -> Result<(u64, usize)> {
        let (wanted, unlimited) = (needed.max(usual), usize::MAX);
        let attempts = [(wanted, self.capacity), (wanted, self.capacity), (needed, self.capacity), (needed, unlimited)];
        for (attempt, (bytes, limit)) in attempts.into_iter().enumerate() {
            if attempt == 1 {
                self.release_idle()?;
            }
            if self.stats.reserved.saturating_add(bytes) > limit {
                continue;
            }
            if let Some(address) = self.backing.allocate(bytes)? {
                self.stats.reserved += bytes;
                self.stats.driver_allocations += 1;
                return Ok((address, bytes));
            }
        }
        let (free, total) = self.backing.memory_info()?;
        Err(Error::OutOfMemory { requested: needed, free, total })
    }
}

impl<B: Backing> Drop for Pool<B> {
    fn drop(&mut self) {
        // Errors at process exit are ignored.
        let _ = self.release_idle();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::rc::Rc;

    const MIB: usize = 1 << 20;

    /// A driver with `capacity` bytes that checks frees.
    #[derive(Clone)]
    struct Fake {
        capacity: usize,
        live: Rc<RefCell<BTreeMap<u64, usize>>>,
    }

    impl Backing for Fake {
        fn allocate(&self, bytes: usize) -> Result<Option<u64>> {
            let mut live = self.live.borrow_mut();
            if live.values().sum::<usize>() + bytes > self.capacity {
                return Ok(None);
            }
            let address = live.last_key_value().map_or(1 << 20, |(last, size)| last + *size as u64);
            live.insert(address, bytes);
            Ok(Some(address))
        }
        fn free(&self, pointer: u64) -> Result<()> {
            self.live.borrow_mut().remove(&pointer).expect("a segment is freed once");
            Ok(())
        }
        fn synchronize(&self) -> Result<()> {
            Ok(())
        }
        fn memory_info(&self) -> Result<(usize, usize)> {
            Ok((self.capacity - self.live.borrow().values().sum::<usize>(), self.capacity))
        }
    }

    fn pool(capacity: usize) -> (Pool<Fake>, Fake) {
        let fake = Fake { capacity, live: Rc::default() };
        (Pool::new(fake.clone(), capacity), fake)
    }

    /// Checks the invariants of a heap: blocks tile segments, no two neighbours are free, and the free list agrees with the flags.
    fn check(pool: &Pool<Fake>) {
        let mut live = 0;
        for heap in [&pool.small, &pool.large] {
            for (&segment, &bytes) in &heap.segments {
                let mut at = segment;
                let mut previous_free = false;
                for (&address, block) in heap.blocks.range(segment..segment + bytes as u64) {
                    assert_eq!(address, at, "blocks leave no gap");
                    assert_eq!(block.segment, segment);
                    assert!(!(previous_free && block.free), "free neighbours are one block");
                    assert_eq!(heap.free.contains(&(block.bytes, address)), block.free);
                    previous_free = block.free;
                    at += block.bytes as u64;
                    live += if block.free { 0 } else { block.bytes };
                }
                assert_eq!(at, segment + bytes as u64, "blocks fill the segment");
            }
            assert_eq!(heap.free.len(), heap.blocks.values().filter(|block| block.free).count());
        }
        assert_eq!(pool.stats.allocated, live);
    }

    #[test]
    fn a_segment_of_its_own_is_not_shared() {
        let (mut pool, _driver) = pool(1 << 30);
        let shared = pool.allocate(2 * MIB).unwrap();
        let alone = pool.allocate_segment(6 * MIB).unwrap();
        assert_eq!((pool.stats().allocated, pool.stats().reserved), (8 * MIB, 70 * MIB));
        // `alone` occupies its segment, and the next allocation takes the free part of the shared segment.
        let next = pool.allocate(6 * MIB).unwrap();
        assert_eq!((next, pool.stats().reserved), (shared + 2 * MIB as u64, 70 * MIB));
        pool.give_back(alone, 6 * MIB);
        pool.release_idle().unwrap();
        assert_eq!(pool.stats().reserved, 64 * MIB);
    }

    #[test]
    fn an_owner_gets_its_memory_again_unless_another_owner_has_it() {
        let (mut pool, _) = pool(1 << 30);
        let blocks: Vec<u64> = (0..4).map(|_| pool.allocate(8 * MIB).unwrap()).collect();
        let owner = pool.owner(blocks[1], 8 * MIB);
        pool.begin_capture();
        let mut footprint = pool.end_capture();
        pool.give_back(blocks[1], 8 * MIB);
        assert!(!pool.is_intact(&mut footprint), "a block of the graph is free");
        pool.give_back(blocks[2], 8 * MIB);
        let meanwhile = pool.allocate(10 * MIB).unwrap();
        assert_eq!(meanwhile, blocks[1]);
        assert!(!pool.take_again(blocks[1], 8 * MIB, owner), "another owner has it");
        pool.give_back(meanwhile, 10 * MIB);
        assert!(pool.take_again(blocks[1], 8 * MIB, owner) && pool.stats().allocated == 24 * MIB);
        check(&pool);
        assert!(!pool.is_intact(&mut footprint), "a second block of the graph is free");
        // In the middle of a free block.
        for block in [blocks[0], blocks[1]] {
            pool.give_back(block, 8 * MIB);
        }
        assert!(pool.take_again(blocks[1], 8 * MIB, owner));
        check(&pool);
        let mut footprint = {
            pool.begin_capture();
            pool.end_capture()
        };
        pool.give_back(blocks[1], 8 * MIB);
        assert!(pool.take_again(blocks[1], 8 * MIB, owner) && pool.is_intact(&mut footprint));
        pool.give_back(blocks[1], 8 * MIB);
        assert_eq!(pool.allocate(8 * MIB).unwrap(), blocks[0]);
        assert!(!pool.is_intact(&mut footprint), "the new owner is another");
    }

    #[test]
    fn freed_blocks_are_reused_and_counted() {
        let (mut pool, _) = pool(1 << 30);
        let a = pool.allocate(100).expect("memory");
        let b = pool.allocate(513).expect("memory");
        assert_eq!((a % 512, b - a), (0, 512));
        pool.give_back(a, 100);
        assert_eq!(pool.allocate(1).expect("memory"), a);
        assert_eq!(pool.allocate(0).expect("memory"), b + 1024);
        let stats = pool.stats();
        assert_eq!(stats, MemoryStats { allocated: 2048, peak: 2048, reserved: 4 * MIB, driver_allocations: 1 });
        check(&pool);
    }

    #[test]
    fn free_neighbours_merge_in_every_order() {
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let (mut pool, _) = pool(1 << 30);
            let blocks: Vec<u64> = (0..3).map(|_| pool.allocate(20 * MIB).expect("memory")).collect();
            for which in order {
                pool.give_back(blocks[which], 20 * MIB);
                check(&pool);
            }
            // This request needs the whole segment.
            pool.allocate(64 * MIB).expect("memory");
            assert_eq!(pool.stats().driver_allocations, 1, "{order:?}");
        }
    }

    #[test]
    fn the_best_fitting_block_is_allocated() {
        let (mut pool, _) = pool(1 << 30);
        let sizes = [30, 2, 10, 2, 20];
        let blocks: Vec<u64> = sizes.iter().map(|mib| pool.allocate(mib * MIB).expect("memory")).collect();
        for hole in [0, 2, 4] {
            pool.give_back(blocks[hole], sizes[hole] * MIB);
        }
        assert_eq!(pool.allocate(9 * MIB).expect("memory"), blocks[2]);
        check(&pool);
    }

    #[test]
    fn idle_segments_are_released_before_out_of_memory() {
        let (mut pool, fake) = pool(256 * MIB);
        let a = pool.allocate(100 * MIB).expect("memory");
        let b = pool.allocate(100 * MIB).expect("memory");
        pool.give_back(a, 100 * MIB);
        // The pool has 100 free MiB and the driver has 56 free MiB. Only together they are enough.
        let c = pool.allocate(150 * MIB).expect("memory after a release");
        // The last 6 MiB are smaller than a default segment.
        pool.allocate(5 * MIB).expect("a segment of the exact size");
        match pool.allocate(2 * MIB) {
            Err(Error::OutOfMemory { requested, free, total }) => {
                assert_eq!((requested, free, total), (2 * MIB, 0, 256 * MIB));
            }
            other => panic!("{other:?}"),
        }
        check(&pool);
        pool.give_back(b, 100 * MIB);
        pool.give_back(c, 150 * MIB);
        drop(pool);
        assert_eq!(fake.live.borrow().len(), 1, "only the segment that is still in use stays");
    }

    /// A pool with the capacity of a smaller driver behaves as the pool of that driver, until it needs more memory.
    #[test]
    fn idle_segments_are_released_at_the_capacity_of_the_plan() {
        let run = |capacity: usize, driver: usize| {
            let mut pool = Pool::new(Fake { capacity: driver, live: Rc::default() }, capacity);
            let first = pool.allocate(100 * MIB).unwrap();
            pool.give_back(first, 100 * MIB);
            pool.allocate(150 * MIB).unwrap();
            check(&pool);
            pool.stats.reserved
        };
        assert_eq!(run(200 * MIB, 200 * MIB), 150 * MIB);
        assert_eq!(run(200 * MIB, 1000 * MIB), 150 * MIB, "the driver has room for both");
        assert_eq!(run(1000 * MIB, 1000 * MIB), 250 * MIB);
        assert_eq!(run(120 * MIB, 1000 * MIB), 150 * MIB, "beyond the capacity rather than out of memory");
    }

    #[test]
    fn steps_after_the_first_allocate_nothing_from_the_driver() {
        let (mut pool, _) = pool(64 << 30);
        let step = |pool: &mut Pool<Fake>, states: &mut Vec<u64>| {
            let mut get = |mib: usize| pool.allocate(mib * MIB / 4).expect("memory");
            let mut saved = Vec::new();
            for layer in 0..12 {
                let temporary = get(137);
                saved.push([(get(64), 64), (get(1), 1), (get(48), 48)]);
                saved.push([(get(172), 172), (get(2), 2), (get(86), 86)]);
                // Long-lived states are allocated between activations in the first step.
                if states.len() <= layer {
                    states.push(get(200));
                }
                saved.push([(temporary, 137), (get(3), 3), (get(5), 5)]);
            }
            let logits = get(1000);
            let dlogits = get(1000);
            let mut grads = vec![(logits, 1000), (dlogits, 1000)];
            for layer in saved.into_iter().rev() {
                let grad = pool.allocate(77 * MIB / 4).expect("memory");
                for (address, mib) in layer.into_iter().chain(grads.drain(..)) {
                    pool.give_back(address, mib * MIB / 4);
                }
                grads.push((grad, 77));
            }
            for (address, mib) in grads {
                pool.give_back(address, mib * MIB / 4);
            }
            check(pool);
            pool.stats()
        };
        let mut states = Vec::new();
        let first = step(&mut pool, &mut states);
        for _ in 0..5 {
            assert_eq!(step(&mut pool, &mut states).driver_allocations, first.driver_allocations);
        }
        assert!(first.reserved < first.peak * 5 / 4, "{first:?}");
    }

    #[test]
    fn footprints_break_when_an_owner_changes() {
        let (mut pool, _) = pool(1 << 30);
        let (before, other) = (pool.allocate(9 * MIB).expect("memory"), pool.allocate(100).expect("memory"));
        pool.begin_capture();
        let passing = pool.allocate(20 * MIB).expect("memory");
        let kept = pool.allocate(34 * MIB).expect("memory");
        pool.give_back(passing, 20 * MIB);
        // Part of the memory is allocated again during the capture and stays live. This part is not transient.
        let again = pool.allocate(4 * MIB).expect("memory");
        assert_eq!(again, passing);
        let mut footprint = pool.end_capture();
        assert_eq!(footprint.transient, [(passing + 4 * MIB as u64, 16 * MIB)]);
        assert!(pool.is_intact(&mut footprint));

        // Transient memory may be allocated and freed between the replays.
        let guest = pool.allocate(15 * MIB).expect("memory");
        assert!(!pool.is_intact(&mut footprint), "transient memory is in use");
        pool.give_back(guest, 15 * MIB);
        assert!(pool.is_intact(&mut footprint));

        for (address, bytes) in [(before, 9 * MIB), (other, 100), (kept, 34 * MIB), (again, 4 * MIB)] {
            pool.begin_capture();
            let mut footprint = pool.end_capture();
            pool.give_back(address, bytes);
            assert!(!pool.is_intact(&mut footprint), "a buffer was freed");
            pool.allocate(bytes).expect("memory");
            assert!(!pool.is_intact(&mut footprint), "the owner differs");
        }
        pool.release_idle().expect("a driver");
        check(&pool);
    }

    #[test]
    fn random_traffic_keeps_the_invariants() {
        let (mut pool, _) = pool(2 << 30);
        let mut live: Vec<(u64, usize)> = Vec::new();
        let mut state = 1u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        for turn in 0..4000 {
            if random(100) < 52 || live.is_empty() {
                let bytes = if random(2) == 0 { random(3000) } else { random(40 * MIB) };
                match pool.allocate(bytes) {
                    Ok(address) => live.push((address, bytes)),
                    Err(Error::OutOfMemory { .. }) => {}
                    Err(other) => panic!("{other}"),
                }
            } else {
                let (address, bytes) = live.swap_remove(random(live.len()));
                pool.give_back(address, bytes);
            }
            if turn % 50 == 0 {
                check(&pool);
            }
        }
        check(&pool);
    }
}
