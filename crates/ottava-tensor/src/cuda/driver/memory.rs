//! Memory of the device and of the host, and copies between them.

use super::{Context, OUT_OF_MEMORY, Stream};
use crate::error::Result;
use std::ptr::null_mut;

const HOST_PORTABLE: u32 = 1;
const HOST_MAPPED: u32 = 2;

impl Context {
    /// Bytes free on the device and bytes it has.
    pub(in crate::cuda) fn memory_info(&self) -> Result<(usize, usize)> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver writes two sizes.
        self.check(unsafe { (self.api.memory_info)(&mut free, &mut total) }, "cuMemGetInfo")?;
        Ok((free, total))
    }

    /// Device memory from the driver; `None` if there is not enough.
    pub(in crate::cuda) fn allocate(&self, bytes: usize) -> Result<Option<u64>> {
        self.bind()?;
        let mut pointer = 0;
        // SAFETY: the driver writes one pointer.
        match unsafe { (self.api.memory_allocate)(&mut pointer, bytes) } {
            OUT_OF_MEMORY => Ok(None),
            status => self.check(status, &format!("cuMemAlloc of {bytes} bytes")).map(|()| Some(pointer)),
        }
    }

    /// Gives device memory back to the driver.
    ///
    /// # Safety
    /// `pointer` came from [`Context::allocate`] and nothing enqueued uses it.
    pub(in crate::cuda) unsafe fn free(&self, pointer: u64) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's promise.
        self.check(unsafe { (self.api.memory_free)(pointer) }, "cuMemFree")
    }

    /// Enqueues a copy from the host in a stream.
    ///
    /// # Safety
    /// `to..to + bytes` is device memory that nothing in another stream uses; `from` holds `bytes` and is not written until the copy has
    /// finished.
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

    /// Enqueues a copy to the host in a stream.
    ///
    /// # Safety
    /// `from..from + bytes` is device memory that nothing in another stream writes; `to` has room for `bytes` and is not accessed until the
    /// copy has finished.
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

    /// Enqueues a copy within the device, or to memory of another that this process has [opened](Context::open_exported).
    ///
    /// # Safety
    /// Both ranges are such memory, do not overlap, and nothing in another stream writes them.
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

    /// Pinned host memory, mapped to the same address on the device; `None` if there is not enough.
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
    /// `pointer` came from [`Context::allocate_host`] and nothing enqueued uses it.
    pub(in crate::cuda) unsafe fn free_host(&self, pointer: *mut u8) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's promise.
        self.check(unsafe { (self.api.host_free)(pointer.cast()) }, "cuMemFreeHost")
    }

    /// Enqueues a fill with one byte.
    ///
    /// # Safety
    /// `to..to + bytes` is device memory.
    pub(in crate::cuda) unsafe fn fill(&self, to: u64, byte: u8, bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's promise.
        self.check(unsafe { (self.api.fill)(to, byte, bytes, self.stream()) }, "cuMemsetD8Async")
    }
}
