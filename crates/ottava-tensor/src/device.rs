//! The devices on which tensors live, and the memory that holds them.

use crate::cuda::{CudaDevice, DeviceBuffer, GpuModel, PinnedBuffer};
use crate::error::{Error, Result};
use crate::parts::{Memory, Part};
use crate::poison::{POISON, poisons};
use crate::tracker::{Entry, MemoryTracker, Scope};
use std::cell::UnsafeCell;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// The memory that holds a tensor of a GPU. A CPU has only one memory, so it ignores this value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryKind {
    /// Device memory.
    #[default]
    Device,
    /// Pinned host memory. Kernels access it over the bus.
    Host,
}

/// A place to store tensors and run ops.
#[derive(Clone)]
pub enum Device {
    /// Host memory and the CPU's cores.
    Cpu,
    /// One GPU with its compute stream.
    Cuda(Arc<CudaDevice>),
    /// The CPU in a dry run: tensors have no data, and ops check and count without computing. The variant `Cuda` covers a GPU in a dry run
    /// ([`CudaDevice::dry`]).
    DryCpu(Arc<MemoryTracker>),
}

impl Device {
    /// Opens GPU `ordinal`. The error says what is missing and how to get it.
    pub fn cuda(ordinal: usize) -> Result<Device> {
        Ok(Device::Cuda(CudaDevice::open(ordinal)?))
    }

    /// Returns a GPU in a dry run: tensors have no data, and allocations are checked against the memory size of `model`. Needs no GPU.
    pub fn dry_gpu(model: GpuModel) -> Device {
        Device::Cuda(CudaDevice::dry(model))
    }

    /// Returns whether the results of forward must not depend on the batch ([`CudaDevice::with_batch_invariance`]). Always false for a CPU, whose results
    /// never depend on it.
    pub fn is_batch_invariant(&self) -> bool {
        matches!(self, Device::Cuda(gpu) if gpu.is_batch_invariant())
    }

    /// Returns an empty dry-run device of the same kind.
    pub fn dry(&self) -> Device {
        match self {
            Device::Cpu | Device::DryCpu(_) => Device::DryCpu(Arc::default()),
            Device::Cuda(gpu) => Device::dry_gpu(gpu.model().clone()),
        }
    }

    /// Runs the CPU's part of an op. A dry run skips it.
    pub(crate) fn on_cpu(&self, compute: impl FnOnce()) {
        if let Device::Cpu = self {
            compute();
        }
    }

    /// Returns the memory accounts of a dry run, or `None` on a real device.
    pub fn tracker(&self) -> Option<&Arc<MemoryTracker>> {
        match self {
            Device::Cpu => None,
            Device::Cuda(gpu) => gpu.tracker(),
            Device::DryCpu(tracker) => Some(tracker),
        }
    }

    /// Names the allocations that are made until the guard is dropped. A no-op outside a dry run.
    pub fn scope(&self, name: &'static str) -> Scope {
        self.tracker().map_or(Scope::NONE, |tracker| tracker.scope(name))
    }

    /// Opens a scope like [`Device::scope`], which also names the allocations of inner scopes.
    pub fn whole_scope(&self, name: &'static str) -> Scope {
        self.tracker().map_or(Scope::NONE, |tracker| tracker.whole_scope(name))
    }

    /// Returns whether both values are the same device.
    pub fn same(&self, other: &Device) -> bool {
        match (self, other) {
            (Device::Cpu, Device::Cpu) => true,
            (Device::Cuda(a), Device::Cuda(b)) => Arc::ptr_eq(a, b),
            (Device::DryCpu(a), Device::DryCpu(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }

    /// Waits until all enqueued work is done, and returns an error of this work.
    pub fn synchronize(&self) -> Result<()> {
        match self {
            Device::Cpu | Device::DryCpu(_) => Ok(()),
            Device::Cuda(gpu) => gpu.synchronize(),
        }
    }

    /// Allocates `bytes` of zeroed storage in host memory. For a GPU the memory is pinned.
    pub(crate) fn allocate_in_host(&self, bytes: usize) -> Result<Storage> {
        match self {
            Device::Cuda(gpu) => Ok(Storage::Pinned(gpu.alloc_host(bytes)?)),
            Device::Cpu => Ok(Storage::Host(HostBuffer::zeroed(bytes))),
            Device::DryCpu(_) => self.allocate(bytes),
        }
    }

    /// Allocates storage of `bytes` with undefined content. On the CPU the content is zeros, unless memory is [poisoned](crate::poison).
    pub(crate) fn allocate(&self, bytes: usize) -> Result<Storage> {
        Ok(match self {
            Device::Cpu => {
                let mut buffer = HostBuffer::zeroed(bytes);
                if poisons() {
                    buffer.as_mut_slice().fill(POISON);
                }
                Storage::Host(buffer)
            }
            Device::Cuda(gpu) => Storage::Cuda(gpu.alloc(bytes)?),
            Device::DryCpu(tracker) => {
                let entry = tracker.track(HostBuffer::size(bytes));
                Storage::Dry(Part::whole(DryMemory { bytes, _entry: entry }))
            }
        })
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu | Device::DryCpu(_) => f.write_str("the CPU"),
            Device::Cuda(gpu) => f.write_str(gpu.name()),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The memory behind one or more tensors.
pub(crate) enum Storage {
    Host(HostBuffer),
    Cuda(DeviceBuffer),
    /// Pinned host memory of a GPU.
    Pinned(PinnedBuffer),
    /// An allocation of the CPU in a dry run.
    Dry(Part<DryMemory>),
}

/// Memory of the CPU in a dry run.
pub(crate) struct DryMemory {
    bytes: usize,
    /// The entry of this memory in the accounts.
    _entry: Entry,
}

impl Memory for DryMemory {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Storage {
    /// Divides the storage into `ranges` of its bytes, like [`Part::split`].
    pub(crate) fn split(self, ranges: &[Range<usize>]) -> Result<Vec<Storage>> {
        Ok(match self {
            Storage::Host(HostBuffer(part)) => {
                part.split(ranges)?.into_iter().map(|part| Storage::Host(HostBuffer(part))).collect()
            }
            Storage::Cuda(buffer) => buffer.split(ranges)?.into_iter().map(Storage::Cuda).collect(),
            Storage::Dry(part) => part.split(ranges)?.into_iter().map(Storage::Dry).collect(),
            Storage::Pinned(_) => return Err(Error::Value("split: memory of the host stays in one piece".into())),
        })
    }

    /// Returns the storage that was split, like [`Part::join`].
    pub(crate) fn join(parts: Vec<Storage>) -> Result<Storage> {
        let (mut host, mut cuda, mut dry, count) = (Vec::new(), Vec::new(), Vec::new(), parts.len());
        for part in parts {
            match part {
                Storage::Host(HostBuffer(part)) => host.push(part),
                Storage::Cuda(buffer) => cuda.push(buffer),
                Storage::Dry(part) => dry.push(part),
                Storage::Pinned(_) => {}
            }
        }
        match (host.len(), cuda.len(), dry.len()) {
            (n, ..) if n == count => Ok(Storage::Host(HostBuffer(Part::join(host)?))),
            (_, n, _) if n == count => Ok(Storage::Cuda(DeviceBuffer::join(cuda)?)),
            (.., n) if n == count => Ok(Storage::Dry(Part::join(dry)?)),
            _ => Err(Error::Value("join: the parts are not of one memory".into())),
        }
    }

    /// Returns the number of bytes.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Storage::Host(HostBuffer(part)) => part.len(),
            Storage::Cuda(buffer) => buffer.len(),
            Storage::Pinned(buffer) => buffer.len(),
            Storage::Dry(part) => part.len(),
        }
    }

    /// Returns the buffer in device memory: the storage itself or its mirror.
    pub(crate) fn on_device(&self) -> Option<&DeviceBuffer> {
        match self {
            Storage::Cuda(buffer) => Some(buffer),
            Storage::Pinned(buffer) => buffer.mirror(),
            Storage::Host(_) | Storage::Dry(_) => None,
        }
    }

    /// Returns the buffer of [`Storage::on_device`] for writing.
    pub(crate) fn on_device_mut(&mut self) -> Option<&mut DeviceBuffer> {
        match self {
            Storage::Cuda(buffer) => Some(buffer),
            Storage::Pinned(buffer) => buffer.mirror_mut(),
            Storage::Host(_) | Storage::Dry(_) => None,
        }
    }
}

/// Host memory that is aligned for the widest vector loads, or a part of such memory.
pub(crate) struct HostBuffer(Part<HostMemory>);

pub(crate) struct HostMemory {
    lines: Box<[UnsafeCell<CacheLine>]>,
    bytes: usize,
}

// SAFETY: bytes are accessed only through the `HostBuffer` of their part, under its borrow.
unsafe impl Sync for HostMemory {}

impl Memory for HostMemory {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct CacheLine([u8; 64]);

impl HostBuffer {
    fn zeroed(bytes: usize) -> HostBuffer {
        let line = || UnsafeCell::new(bytemuck::Zeroable::zeroed());
        let lines = std::iter::repeat_with(line).take(bytes.div_ceil(64)).collect();
        HostBuffer(Part::whole(HostMemory { lines, bytes }))
    }

    /// Returns the allocated size of a buffer of `bytes`.
    fn size(bytes: usize) -> usize {
        bytes.next_multiple_of(64)
    }

    fn pointer(&self) -> *mut u8 {
        let first = UnsafeCell::raw_get(self.0.memory().lines.as_ptr()).cast::<u8>();
        // SAFETY: a part lies within its memory.
        unsafe { first.add(self.0.start()) }
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: the bytes are initialised and lie within the memory. Parts do not overlap, so only `&mut self` writes them.
        unsafe { std::slice::from_raw_parts(self.pointer(), self.0.len()) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `self` is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(), self.0.len()) }
    }
}

/// Makes the allocator of glibc keep up to 256 MiB of freed memory instead of returning it to the system. A training step on the CPU allocates
/// the same buffers as the preceding step. Otherwise the system clears their pages each time, which takes 5 % of the quick start's time.
///
/// Affects the whole process. Without glibc, it does nothing.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `mallopt` takes two integers and changes only parameters of the allocator.
    unsafe {
        // The largest threshold that glibc accepts.
        libc::mallopt(libc::M_MMAP_THRESHOLD, 32 << 20);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 256 << 20);
        // Without this padding, the heaps of other threads are unmapped as soon as they are empty.
        libc::mallopt(libc::M_TOP_PAD, 64 << 20);
    }
}
