//! Copies between pinned host memory and device memory, and collectives, that overlap with compute.
//!
//! Each direction has its own stream, and collectives have another stream. A transfer waits for the earlier work of the compute stream, which may
//! still use its memory. Compute waits for the transfer, at the latest when the [`Transfer`] is dropped. Events order the streams, so that callers
//! see one stream.

use super::buffer::DeviceBuffer;
use super::device::CudaDevice;
use super::driver::{Context, Event, Stream};
use super::pinned::PinnedBuffer;
use super::profile::{Call, HOST_TRANSFER};
use crate::error::Result;
use std::sync::Arc;

/// Copies or a collective in progress.
#[must_use]
pub struct Transfer {
    device: Arc<CudaDevice>,
    /// The name of the transfer in a profile.
    name: &'static str,
    /// The event at the end of the transfer. It is `None` after compute waits for it, and in a dry run.
    done: Option<Event>,
    /// The mirrors that are being copied.
    sources: Vec<DeviceBuffer>,
    /// Whether the transfer runs kernels on multiprocessors instead of copy engines.
    takes_multiprocessors: bool,
}

impl Transfer {
    /// Allocates a mirror in device memory for each of `buffers`, and starts to copy the buffers to their mirrors.
    pub(crate) fn fetch(device: &Arc<CudaDevice>, buffers: &mut [&mut PinnedBuffer]) -> Result<Transfer> {
        for buffer in &mut *buffers {
            buffer.mirror = Some(device.alloc(buffer.len())?);
        }
        device.trace(|| format!("fetch {:?}", buffers.iter().map(|buffer| buffer.len()).collect::<Vec<_>>()));
        let done = enqueue(device, Stream::ToDevice, |context| {
            for buffer in buffers {
                let mirror = buffer.mirror.as_ref().expect("made above");
                // SAFETY: the sizes are equal. No enqueued work uses the mirror, and host memory is written only after a
                // synchronisation.
                unsafe { context.copy_to_device(Stream::ToDevice, mirror.ptr(), buffer.host(), buffer.len())? };
            }
            Ok(())
        })?;
        Ok(Transfer::host(device, done))
    }

    /// Starts to copy each of `sources` to new memory of the device.
    pub(crate) fn upload(device: &Arc<CudaDevice>, sources: &[&PinnedBuffer]) -> Result<(Vec<DeviceBuffer>, Transfer)> {
        let copies = sources.iter().map(|source| device.alloc(source.len())).collect::<Result<Vec<_>>>()?;
        device.trace(|| format!("fetch {:?}", sources.iter().map(|source| source.len()).collect::<Vec<_>>()));
        let done = enqueue(device, Stream::ToDevice, |context| {
            for (source, copy) in sources.iter().zip(&copies) {
                // SAFETY: the sizes are equal. No enqueued work uses the copy, and the host memory is written only after the device is idle.
                unsafe { context.copy_to_device(Stream::ToDevice, copy.ptr(), source.host(), source.len())? };
            }
            Ok(())
        })?;
        Ok((copies, Transfer::host(device, done)))
    }

    /// Starts to copy each of `sources` to the given byte of `into`. The caller keeps `into` alive until compute waits for the transfer.
    pub(crate) fn upload_into(
        device: &Arc<CudaDevice>,
        sources: &[(&PinnedBuffer, usize)],
        into: &mut DeviceBuffer,
    ) -> Result<Transfer> {
        let address = |&(source, at): &(&PinnedBuffer, usize)| into.address(at, source.len());
        let addresses = sources.iter().map(address).collect::<Result<Vec<_>>>()?;
        device.trace(|| format!("fetch {:?}", sources.iter().map(|(source, _)| source.len()).collect::<Vec<_>>()));
        let done = enqueue(device, Stream::ToDevice, |context| {
            for ((source, _), to) in sources.iter().zip(addresses) {
                // SAFETY: the range was checked. No enqueued work uses it, and the host memory is written only after the device is idle.
                unsafe { context.copy_to_device(Stream::ToDevice, to, source.host(), source.len())? };
            }
            Ok(())
        })?;
        Ok(Transfer::host(device, done))
    }

    /// Starts to copy the mirror of each of `buffers` to host memory, and releases the mirrors.
    pub(crate) fn write_back(device: &Arc<CudaDevice>, buffers: &mut [&mut PinnedBuffer]) -> Result<Transfer> {
        let sources: Vec<_> = buffers.iter_mut().map(|buffer| buffer.mirror.take()).collect();
        device
            .trace(|| format!("write back {:?}", sources.iter().flatten().map(DeviceBuffer::len).collect::<Vec<_>>()));
        let done = enqueue(device, Stream::ToHost, |context| {
            for (buffer, mirror) in buffers.iter_mut().zip(&sources) {
                let Some(mirror) = mirror else { continue };
                // SAFETY: the sizes are equal, and host memory is read only after a synchronisation, which waits for this copy.
                unsafe { context.copy_to_host(Stream::ToHost, buffer.host_mut(), mirror.ptr(), buffer.len())? };
            }
            Ok(())
        })?;
        let mut transfer = Transfer::host(device, done);
        transfer.sources = sources.into_iter().flatten().collect();
        Ok(transfer)
    }

    /// Starts to copy `source` to `into`. The caller keeps `source` alive until compute waits for the transfer.
    pub(crate) fn store(source: &DeviceBuffer, into: &mut PinnedBuffer) -> Result<Transfer> {
        source.expect_len(into.len())?;
        source.device().trace(|| format!("store {}", source.len()));
        let done = enqueue(source.device(), Stream::ToHost, |context| {
            // SAFETY: see `write_back`. The lengths were compared.
            unsafe { context.copy_to_host(Stream::ToHost, into.host_mut(), source.ptr(), into.len()) }
        })?;
        Ok(Transfer::host(source.device(), done))
    }

    fn host(device: &Arc<CudaDevice>, done: Option<Event>) -> Transfer {
        Transfer {
            device: device.clone(),
            name: HOST_TRANSFER,
            done,
            sources: Vec::new(),
            takes_multiprocessors: false,
        }
    }

    /// Starts the copies that `work` enqueues in `stream`. The caller keeps their memory alive until compute waits for the transfer.
    pub(super) fn by_copies(
        device: &Arc<CudaDevice>,
        stream: Stream,
        name: &'static str,
        work: impl FnOnce(&Context) -> Result<()>,
    ) -> Result<Transfer> {
        let mut transfer = Transfer::host(device, enqueue(device, stream, work)?);
        transfer.name = name;
        Ok(transfer)
    }

    /// Starts the kernels that `work` enqueues in `stream`, as [`Transfer::by_copies`] starts copies.
    pub(super) fn by_kernels(
        device: &Arc<CudaDevice>,
        stream: Stream,
        name: &'static str,
        work: impl FnOnce(&Context) -> Result<()>,
    ) -> Result<Transfer> {
        let mut transfer = Transfer::by_copies(device, stream, name, work)?;
        transfer.takes_multiprocessors = true;
        Ok(transfer)
    }

    /// Runs `work`. If the transfer needs multiprocessors, the products of `work` leave multiprocessors to it ([`CudaDevice::beside_collectives`]).
    pub(crate) fn beside<R>(&self, work: impl FnOnce() -> R) -> R {
        if self.takes_multiprocessors { self.device.beside_collectives(work) } else { work() }
    }

    /// Makes later collectives wait for the transfer. Compute does not wait.
    pub(crate) fn before_collectives(&self) -> Result<()> {
        self.done.as_ref().map_or(Ok(()), |done| done.make_wait(Stream::Communication))
    }

    /// Makes later work of the compute stream wait for the transfer.
    pub(crate) fn wait(mut self) -> Result<()> {
        self.make_compute_wait()
    }

    fn make_compute_wait(&mut self) -> Result<()> {
        let (Some(done), Some(context)) = (self.done.take(), self.device.context()) else { return Ok(()) };
        self.device.profile.time(context, Call::Wait(self.name), || done.make_wait(Stream::Compute))
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        // The next call reports a failure. Mirrors are freed after compute waits for the transfer.
        let _ = self.make_compute_wait();
        self.sources.clear();
    }
}

/// Enqueues `work` in `stream` after the earlier work of compute. Returns an event at the end of the work, and `None` in a dry run.
fn enqueue(device: &CudaDevice, stream: Stream, work: impl FnOnce(&Context) -> Result<()>) -> Result<Option<Event>> {
    let Some(context) = device.context() else { return Ok(None) };
    Event::end_of(context, Stream::Compute)?.make_wait(stream)?;
    work(context)?;
    Event::end_of(context, stream).map(Some)
}
