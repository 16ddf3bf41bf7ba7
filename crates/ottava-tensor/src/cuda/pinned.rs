//! Pinned host memory.

use super::buffer::DeviceBuffer;
use super::device::CudaDevice;
use super::driver::{Event, Stream};
use crate::error::{Error, Result};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

/// Pinned host memory, mapped to the same address on the device. A dry run only counts it.
///
/// A mirror is a copy in device memory that kernels use instead. A write-back copies the mirror to host memory.
pub struct PinnedBuffer {
    device: Arc<CudaDevice>,
    /// The address, which is null in a dry run and for 0 bytes.
    pointer: *mut u8,
    bytes: usize,
    pub(super) mirror: Option<DeviceBuffer>,
}

// SAFETY: the memory has one owner, and the host synchronises before it reads or writes the memory.
unsafe impl Send for PinnedBuffer {}
// SAFETY: see `Send`. `&self` only reads.
unsafe impl Sync for PinnedBuffer {}

impl CudaDevice {
    /// Allocates `bytes` zeros in pinned host memory, which kernels read and write over the bus. Returns `Error::HostMemory` if the host has too
    /// little memory.
    pub fn alloc_host(self: &Arc<Self>, bytes: usize) -> Result<PinnedBuffer> {
        PinnedBuffer::new(self, bytes)
    }
}

impl PinnedBuffer {
    fn new(device: &Arc<CudaDevice>, bytes: usize) -> Result<PinnedBuffer> {
        let mut pointer = std::ptr::null_mut();
        if let Some(context) = device.context().filter(|_| bytes > 0) {
            pointer = context.allocate_host(bytes)?.ok_or(Error::HostMemory { requested: bytes })?;
            // SAFETY: the allocation has `bytes` bytes.
            unsafe { pointer.write_bytes(0, bytes) };
        }
        device.count_host_bytes(bytes as isize);
        Ok(PinnedBuffer { device: device.clone(), pointer, bytes, mirror: None })
    }

    /// Returns the address for kernels: the address of the mirror if the buffer has a mirror, otherwise the address in host memory.
    pub fn ptr(&self) -> u64 {
        self.mirror.as_ref().map_or(self.pointer as u64, DeviceBuffer::ptr)
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// Returns the address in host memory.
    pub(super) fn host(&self) -> *const u8 {
        self.pointer
    }

    /// Returns the address in host memory, for writing.
    pub(super) fn host_mut(&mut self) -> *mut u8 {
        self.pointer
    }

    /// Returns the mirror, if the buffer has one.
    pub(crate) fn mirror(&self) -> Option<&DeviceBuffer> {
        self.mirror.as_ref()
    }

    /// Returns the mirror for writing, if the buffer has one.
    pub(crate) fn mirror_mut(&mut self) -> Option<&mut DeviceBuffer> {
        self.mirror.as_mut()
    }

    /// Drops the mirror without writing it back.
    pub(crate) fn drop_mirror(&mut self) {
        self.mirror = None;
    }

    /// Returns the device that the memory is mapped to.
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    /// Synchronises and writes `bytes` from byte `offset`. Drops the mirror.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        let range = self.range(offset, bytes.len())?;
        self.mirror = None;
        if self.pointer.is_null() {
            return Ok(());
        }
        self.device.synchronize()?;
        // SAFETY: the range was checked, and no enqueued work uses the memory.
        unsafe { self.pointer.add(range.start).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Synchronises and reads `out.len()` bytes from byte `offset`. A dry run reads zeros.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        let range = self.range(offset, out.len())?;
        if self.pointer.is_null() {
            out.fill(0);
            return Ok(());
        }
        self.device.synchronize()?;
        // SAFETY: the range was checked, and no enqueued work uses the memory.
        unsafe { out.as_mut_ptr().copy_from_nonoverlapping(self.pointer.add(range.start), out.len()) };
        Ok(())
    }

    /// Enqueues a copy of `bytes` of `source` in the compute stream. Later work may free or write the memory of `source`. Returns an event at the end
    /// of the copy, and `None` in a dry run or for no bytes. The copied bytes must not be read before this event.
    pub(crate) fn copy_from(
        &mut self,
        offset: usize,
        source: &DeviceBuffer,
        bytes: Range<usize>,
    ) -> Result<Option<Event>> {
        let to = self.range(offset, bytes.len())?.start;
        let from = source.address(bytes.start, bytes.len())?;
        let Some(context) = self.device.context().filter(|_| !bytes.is_empty()) else {
            self.device.trace(|| format!("snapshot {}", bytes.len()));
            return Ok(None);
        };
        // SAFETY: both ranges were checked, and the caller reads host memory only after the event.
        unsafe { context.copy_to_host(Stream::Compute, self.pointer.add(to), from, bytes.len())? };
        Event::end_of(context, Stream::Compute).map(Some)
    }

    /// Enqueues a copy of the first `bytes` bytes to byte `offset` of `to` in the compute stream. Returns an event at the end of the copy, and `None`
    /// in a dry run or for no bytes. The copied bytes must not be written before this event.
    pub(crate) fn copy_to(&self, bytes: usize, to: &mut DeviceBuffer, offset: usize) -> Result<Option<Event>> {
        let (from, to) = (self.range(0, bytes)?.start, to.address(offset, bytes)?);
        let Some(context) = self.device.context().filter(|_| bytes > 0) else {
            self.device.trace(|| format!("stage {bytes} to +{offset}"));
            return Ok(None);
        };
        // SAFETY: both ranges were checked. The caller writes these bytes only after the event, and they are freed only after a
        // synchronisation.
        unsafe { context.copy_to_device(Stream::Compute, to, self.pointer.add(from), bytes)? };
        Event::end_of(context, Stream::Compute).map(Some)
    }

    /// Returns bytes in host memory, to which no enqueued work writes. A dry run returns zeros.
    pub(crate) fn host_bytes(&self, range: Range<usize>) -> Cow<'_, [u8]> {
        assert!(range.start <= range.end && range.end <= self.bytes, "bytes {range:?} of {}", self.bytes);
        match self.pointer.is_null() {
            true => vec![0; range.len()].into(),
            // SAFETY: the range was checked. The memory was zeroed when it was allocated, and only `&mut self` writes it.
            false => unsafe { std::slice::from_raw_parts(self.pointer.add(range.start), range.len()) }.into(),
        }
    }

    /// Returns the bytes of [`PinnedBuffer::host_bytes`] for writing, and `None` in a dry run.
    pub(crate) fn host_bytes_mut(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        assert!(range.start <= range.end && range.end <= self.bytes, "bytes {range:?} of {}", self.bytes);
        // SAFETY: see `host_bytes`, and `self` is borrowed for writing.
        let bytes = || unsafe { std::slice::from_raw_parts_mut(self.pointer.add(range.start), range.len()) };
        (!self.pointer.is_null()).then(bytes)
    }

    fn range(&self, offset: usize, bytes: usize) -> Result<Range<usize>> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(offset..end),
            _ => Err(Error::Value(format!("{bytes} bytes from {offset} on lie outside a buffer of {}", self.bytes))),
        }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        self.device.count_host_bytes(-(self.bytes as isize));
        if let Some(context) = self.device.context().filter(|_| !self.pointer.is_null()) {
            // Errors are ignored, because the process frees the memory at exit.
            let _ = self.device.synchronize();
            // SAFETY: this context allocated the memory, and no enqueued work remains.
            let _ = unsafe { context.free_host(self.pointer) };
        }
    }
}
