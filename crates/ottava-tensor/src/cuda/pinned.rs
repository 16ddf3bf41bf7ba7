//! A range of the host's memory that kernels can reach.

use super::buffer::DeviceBuffer;
use super::device::CudaDevice;
use crate::error::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// Host memory that is never moved, at the same address for the host and for the kernels of a device. A dry run has none.
///
/// A mirror is a copy in the device's own memory, which kernels are given instead while there is one. What they write there, the host
/// sees once it is written back.
pub struct PinnedBuffer {
    device: Arc<CudaDevice>,
    /// Null in a dry run, and where there are no bytes.
    pointer: *mut u8,
    bytes: usize,
    pub(super) mirror: Option<DeviceBuffer>,
}

// SAFETY: the memory has one owner, and who reads or writes it from the host waits for the device first.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above; `&self` only reads.
unsafe impl Sync for PinnedBuffer {}

impl CudaDevice {
    /// `bytes` of zeros in pinned host memory, which kernels read and write over the bus. `Error::HostMemory` when there is none.
    pub fn alloc_host(self: &Arc<Self>, bytes: usize) -> Result<PinnedBuffer> {
        PinnedBuffer::new(self, bytes)
    }
}

impl PinnedBuffer {
    fn new(device: &Arc<CudaDevice>, bytes: usize) -> Result<PinnedBuffer> {
        let mut pointer = std::ptr::null_mut();
        if let Some(context) = device.context().filter(|_| bytes > 0) {
            pointer = context.allocate_host(bytes)?.ok_or(Error::HostMemory { requested: bytes })?;
            // SAFETY: the driver gave as many bytes.
            unsafe { pointer.write_bytes(0, bytes) };
        }
        device.count_host_bytes(bytes as isize);
        Ok(PinnedBuffer { device: device.clone(), pointer, bytes, mirror: None })
    }

    /// The address, for kernels: that of the mirror, if it has one.
    pub fn ptr(&self) -> u64 {
        self.mirror.as_ref().map_or(self.pointer as u64, DeviceBuffer::ptr)
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// The address in the host's memory.
    pub(super) fn host(&self) -> *const u8 {
        self.pointer
    }

    /// [`PinnedBuffer::host`], for writing.
    pub(super) fn host_mut(&mut self) -> *mut u8 {
        self.pointer
    }

    /// The mirror, if it has one.
    pub(crate) fn mirror(&self) -> Option<&DeviceBuffer> {
        self.mirror.as_ref()
    }

    /// [`PinnedBuffer::mirror`], for writing.
    pub(crate) fn mirror_mut(&mut self) -> Option<&mut DeviceBuffer> {
        self.mirror.as_mut()
    }

    /// Forgets the mirror, and what was written there.
    pub(crate) fn drop_mirror(&mut self) {
        self.mirror = None;
    }

    /// The device whose kernels reach it.
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    /// Replaces the bytes from `offset` on, once nothing enqueued reads them. A mirror would be another version, and goes.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        let range = self.range(offset, bytes.len())?;
        self.mirror = None;
        if self.pointer.is_null() {
            return Ok(());
        }
        self.device.synchronize()?;
        // SAFETY: the range was checked, and nobody else has the memory now.
        unsafe { self.pointer.add(range.start).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies the bytes from `offset` on, once nothing enqueued writes them. A dry run has zeros.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        let range = self.range(offset, out.len())?;
        if self.pointer.is_null() {
            out.fill(0);
            return Ok(());
        }
        self.device.synchronize()?;
        // SAFETY: as above.
        unsafe { out.as_mut_ptr().copy_from_nonoverlapping(self.pointer.add(range.start), out.len()) };
        Ok(())
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
            // An error has nowhere to go from here; the memory ends with the process.
            let _ = self.device.synchronize();
            // SAFETY: it came from this context, and nothing enqueued is left.
            let _ = unsafe { context.free_host(self.pointer) };
        }
    }
}
