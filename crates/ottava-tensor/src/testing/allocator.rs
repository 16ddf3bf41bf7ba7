//! The system's allocator, with a count of what it has given out.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// For a test binary's `#[global_allocator]`: what the process has allocated, tensors and all else.
pub struct CountingAllocator;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

impl CountingAllocator {
    /// Live bytes.
    pub fn live() -> usize {
        LIVE.load(Ordering::Relaxed)
    }

    /// The most there were since [`CountingAllocator::reset_peak`].
    pub fn peak() -> usize {
        PEAK.load(Ordering::Relaxed)
    }

    /// Starts a new peak at what is live now.
    pub fn reset_peak() {
        PEAK.store(CountingAllocator::live(), Ordering::Relaxed);
    }

    fn add(bytes: usize) {
        let live = LIVE.fetch_add(bytes, Ordering::Relaxed) + bytes;
        PEAK.fetch_max(live, Ordering::Relaxed);
    }
}

// SAFETY: all requests go to the system's allocator as they came; counting allocates nothing.
unsafe impl GlobalAlloc for CountingAllocator {
    // SAFETY: the caller's promise, passed on.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CountingAllocator::add(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: the caller's promise, passed on.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        CountingAllocator::add(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    // SAFETY: the caller's promise, passed on.
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}
