//! Owned device memory.

use super::device::CudaDevice;
use super::driver::Stream;
use super::dry;
use super::pool::Pool;
use crate::error::{Error, Result};
use crate::parts::{Memory, Part};
use crate::poison::{POISON, poisons};
use crate::tracker::Entry;
use std::ops::Range;
use std::sync::Arc;

/// Device memory or a part of it. The memory returns to the pool when its last part is dropped. New memory is uninitialised.
pub struct DeviceBuffer(Part<DeviceMemory>);

struct DeviceMemory {
    device: Arc<CudaDevice>,
    pointer: u64,
    bytes: usize,
    home: Home,
}

/// The owner to which memory returns.
enum Home {
    /// The pool. In a dry run, `_entry` counts the memory.
    Pool { _entry: Option<Entry> },
    /// The lender, and the number under which it lent the memory.
    Lender(Arc<dyn Lender>, usize),
}

/// An owner of memory that lends it to one buffer at a time.
pub(super) trait Lender: Send + Sync {
    /// Takes back the memory that was lent under `number`.
    fn take_back(&self, number: usize);
}

impl Memory for DeviceMemory {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl CudaDevice {
    /// Allocates `bytes` of uninitialised device memory, aligned to at least 256 bytes. Returns `Error::OutOfMemory` if the device has too little
    /// memory.
    pub fn alloc(self: &Arc<Self>, bytes: usize) -> Result<DeviceBuffer> {
        DeviceBuffer::from_pool(self, bytes, Pool::allocate)
    }

    /// Allocates like [`CudaDevice::alloc`], but in a separate segment, for memory that is kept long.
    pub(super) fn alloc_segment(self: &Arc<Self>, bytes: usize) -> Result<DeviceBuffer> {
        DeviceBuffer::from_pool(self, bytes, Pool::allocate_segment)
    }
}

/// Where a buffer lies, or lay, in the pool.
pub(crate) struct FormerBuffer {
    device: Arc<CudaDevice>,
    pointer: u64,
    bytes: usize,
    owner: u64,
}

impl FormerBuffer {
    /// Returns the device address.
    pub(crate) fn pointer(&self) -> u64 {
        self.pointer
    }
}

impl DeviceBuffer {
    /// Returns the place of the buffer, if it is a whole buffer of the pool.
    pub(crate) fn former(&self) -> Option<FormerBuffer> {
        let DeviceMemory { device, pointer, bytes, home } = self.0.memory();
        let is_whole = self.len() == *bytes && matches!(home, Home::Pool { .. });
        let owner = || device.with_pool(|pool| pool.owner(*pointer, *bytes));
        is_whole.then(|| FormerBuffer { device: device.clone(), pointer: *pointer, bytes: *bytes, owner: owner() })
    }

    /// Allocates a buffer at the place of a former buffer, or elsewhere if another buffer lies there.
    pub(crate) fn at(former: &FormerBuffer) -> Result<DeviceBuffer> {
        let FormerBuffer { device, pointer, bytes, owner } = former;
        DeviceBuffer::from_pool(device, *bytes, |pool, bytes| match pool.take_again(*pointer, bytes, *owner) {
            true => Ok(*pointer),
            false => pool.allocate(bytes),
        })
    }

    fn from_pool(
        device: &Arc<CudaDevice>,
        bytes: usize,
        take: impl FnOnce(&mut Pool<dry::Memory>, usize) -> Result<u64>,
    ) -> Result<DeviceBuffer> {
        let (pointer, entry) = device.take_memory(bytes, take)?;
        DeviceBuffer::new(DeviceMemory { device: device.clone(), pointer, bytes, home: Home::Pool { _entry: entry } })
    }

    fn new(memory: DeviceMemory) -> Result<DeviceBuffer> {
        let DeviceMemory { pointer, bytes, .. } = memory;
        if let (Some(context), true) = (memory.device.context(), poisons() && bytes > 0) {
            // SAFETY: the memory has these bytes, and nothing else uses them.
            unsafe { context.fill(pointer, POISON, bytes)? };
        }
        Ok(DeviceBuffer(Part::whole(memory)))
    }

    /// Lends the first `bytes` of this buffer. `lender` owns this buffer and gets the memory back under `number`.
    pub(super) fn lend(&self, bytes: usize, lender: Arc<dyn Lender>, number: usize) -> Result<DeviceBuffer> {
        let (device, pointer, home) = (self.device().clone(), self.address(0, bytes)?, Home::Lender(lender, number));
        DeviceBuffer::new(DeviceMemory { device, pointer, bytes, home })
    }

    /// Returns the device address. It is a multiple of 256 if the buffer is not a part.
    pub fn ptr(&self) -> u64 {
        self.0.memory().pointer + self.0.start() as u64
    }

    /// Splits the buffer into the byte ranges `ranges`.
    pub(crate) fn split(self, ranges: &[Range<usize>]) -> Result<Vec<DeviceBuffer>> {
        Ok(self.0.split(ranges)?.into_iter().map(DeviceBuffer).collect())
    }

    /// Joins the parts of one buffer into this buffer.
    pub(crate) fn join(parts: Vec<DeviceBuffer>) -> Result<DeviceBuffer> {
        Part::join(parts.into_iter().map(|part| part.0).collect()).map(DeviceBuffer)
    }

    /// Returns the requested length in bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the device that the memory belongs to.
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.0.memory().device
    }

    /// Copies `bytes` from the host to byte `offset` of the buffer, and synchronises.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        let to = self.address(offset, bytes.len())?;
        let Some(context) = self.device().context().filter(|_| !bytes.is_empty()) else {
            self.device().trace(|| format!("write {}", bytes.len()));
            return Ok(());
        };
        // SAFETY: the range was checked, and `bytes` is borrowed until the synchronisation.
        unsafe { context.copy_to_device(Stream::Compute, to, bytes.as_ptr(), bytes.len())? };
        self.device().synchronize()
    }

    /// Copies `out.len()` bytes from byte `offset` to the host, and synchronises. A dry run writes zeros.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        let from = self.address(offset, out.len())?;
        let Some(context) = self.device().context().filter(|_| !out.is_empty()) else {
            self.device().trace(|| format!("read {}", out.len()));
            out.fill(0);
            return Ok(());
        };
        // SAFETY: the range was checked, and `out` is borrowed until the synchronisation.
        unsafe { context.copy_to_host(Stream::Compute, out.as_mut_ptr(), from, out.len())? };
        self.device().synchronize()
    }

    /// Enqueues a copy of `bytes` bytes from another buffer of the same device.
    pub fn copy_from(&mut self, offset: usize, src: &DeviceBuffer, src_offset: usize, bytes: usize) -> Result<()> {
        if !Arc::ptr_eq(self.device(), src.device()) {
            let (expected, got) = (self.device().describe(), src.device().describe());
            return Err(Error::Placement { what: "copy_from: src".to_string(), expected, got });
        }
        let (to, from) = (self.address(offset, bytes)?, src.address(src_offset, bytes)?);
        let Some(context) = self.device().context().filter(|_| bytes > 0) else {
            self.device().trace(|| format!("copy {bytes} to +{offset}"));
            return Ok(());
        };
        // SAFETY: both ranges were checked; `&mut self` and `&src` are different buffers.
        unsafe { context.copy_on_device(Stream::Compute, to, from, bytes) }
    }

    /// Enqueues a fill of `bytes` bytes with zeros, from byte `offset`.
    pub fn fill_zero(&mut self, offset: usize, bytes: usize) -> Result<()> {
        let to = self.address(offset, bytes)?;
        let Some(context) = self.device().context().filter(|_| bytes > 0) else {
            self.device().trace(|| format!("zero {bytes}"));
            return Ok(());
        };
        // SAFETY: the range was checked.
        unsafe { context.fill(to, 0, bytes) }
    }

    /// Returns an error unless the buffer has `bytes` bytes.
    pub(super) fn expect_len(&self, bytes: usize) -> Result<()> {
        match self.len() == bytes {
            true => Ok(()),
            false => Err(Error::Value(format!("a buffer of {} bytes cannot be copied to one of {bytes}", self.len()))),
        }
    }

    /// Returns the address of byte `offset`. A range that exceeds the buffer is an error.
    pub(super) fn address(&self, offset: usize, bytes: usize) -> Result<u64> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.len() => Ok(self.ptr() + offset as u64),
            _ => Err(out_of_range(&(offset..offset.saturating_add(bytes)), self.len())),
        }
    }
}

fn out_of_range(range: &Range<usize>, length: usize) -> Error {
    Error::Value(format!("bytes {range:?} lie outside a buffer of {length}"))
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        match &self.home {
            Home::Pool { .. } => self.device.free_memory(self.pointer, self.bytes),
            Home::Lender(lender, number) => lender.take_back(*number),
        }
    }
}
