//! Memory of the device and the host, and copies between them.

use super::{Context, OUT_OF_MEMORY, Stream};
use crate::error::Result;
use std::ptr::null_mut;

const HOST_PORTABLE: u32 = 1;
const HOST_MAPPED: u32 = 2;

impl Context {
    /// Returns the number of free bytes and the total number of bytes of the device.
    pub(in crate::cuda) fn memory_info(&self) -> Result<(usize, usize)> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver writes two sizes.
        self.check(unsafe { (self.api.memory_info)(&mut free, &mut total) }, "cuMemGetInfo")?;
        Ok((free, total))
    }

    /// Allocates device memory from the driver. Returns `None` if the device has too little memory.
    pub(in crate::cuda) fn allocate(&self, bytes: usize) -> Result<Option<u64>> {
        self.bind()?;
        let mut pointer = 0;
        // SAFETY: the driver writes one pointer.
        match unsafe { (self.api.memory_allocate)(&mut pointer, bytes) } {
            OUT_OF_MEMORY => Ok(None),
            status => self.check(status, &format!("cuMemAlloc of {bytes} bytes")).map(|()| Some(pointer)),
        }
    }

    /// Returns device memory to the driver.
    ///
    /// # Safety
    /// `pointer` came from [`Context::allocate`], and no enqueued work uses it.
    pub(in crate::cuda) unsafe fn free(&self, pointer: u64) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's promise.
        self.check(unsafe { (self.api.memory_free)(pointer) }, "cuMemFree")
    }

    /// Enqueues a copy from the host in `stream`.
    ///
    /// # Safety
    /// `to..to + bytes` is device memory that no other stream uses. `from` holds `bytes` bytes and is not written until the copy has finished.
    pub(in crate::cuda) unsafe fn copy_to_device(
        &self,
        stream: Stream,
        to: u64,
        from: *const u8,
        bytes: usize,
    ) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's promise.
        let status = self.waiting(|| unsafe { (self.api.copy_to_device)(to, from.cast(), bytes, self.handle(stream)) });
        self.check(status, "cuMemcpyHtoDAsync")
    }

    /// Enqueues a copy to the host in `stream`.
    ///
    /// # Safety
    /// `from..from + bytes` is device memory that no other stream writes. `to` has room for `bytes` bytes and is not accessed until the copy has
    /// finished.
    pub(in crate::cuda) unsafe fn copy_to_host(
        &self,
        stream: Stream,
        to: *mut u8,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's promise.
        let status = self.waiting(|| unsafe { (self.api.copy_to_host)(to.cast(), from, bytes, self.handle(stream)) });
        self.check(status, "cuMemcpyDtoHAsync")
    }

    /// Enqueues a copy from device memory to device memory. Either range may be memory of another GPU that this process has
    /// [opened](Context::open_exported).
    ///
    /// # Safety
    /// Both ranges are device memory or opened memory. They do not overlap, and no other stream writes them.
    pub(in crate::cuda) unsafe fn copy_on_device(
        &self,
        stream: Stream,
        to: u64,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's promise.
        self.check(unsafe { (self.api.copy_on_device)(to, from, bytes, self.handle(stream)) }, "cuMemcpyDtoDAsync")
    }

    /// Allocates pinned host memory, mapped to the same address on the device. Returns `None` if the host has too little memory.
    pub(in crate::cuda) fn allocate_host(&self, bytes: usize) -> Result<Option<*mut u8>> {
        self.bind()?;
        let mut pointer = null_mut();
        // SAFETY: the driver writes one pointer.
        match unsafe { (self.api.host_allocate)(&mut pointer, bytes, HOST_PORTABLE | HOST_MAPPED) } {
            OUT_OF_MEMORY => Ok(None),
            status => self.check(status, &format!("cuMemHostAlloc of {bytes} bytes")).map(|()| Some(pointer.cast())),
        }
    }

    /// Frees pinned host memory.
    ///
    /// # Safety
    /// `pointer` came from [`Context::allocate_host`], and no enqueued work uses it.
    pub(in crate::cuda) unsafe fn free_host(&self, pointer: *mut u8) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's promise.
        self.check(unsafe { (self.api.host_free)(pointer.cast()) }, "cuMemFreeHost")
    }

    /// Enqueues a fill of `bytes` bytes with the value `byte`.
    ///
    /// # Safety
    /// `to..to + bytes` is device memory.
    pub(in crate::cuda) unsafe fn fill(&self, to: u64, byte: u8, bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's promise.
        self.check(unsafe { (self.api.fill)(to, byte, bytes, self.stream()) }, "cuMemsetD8Async")
    }
}
