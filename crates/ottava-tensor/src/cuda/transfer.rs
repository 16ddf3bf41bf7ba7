//! Copies between pinned host memory and device memory, and collectives, that overlap with compute.
//!
//! Each direction has its own stream, and so do collectives. A transfer waits for all earlier work of the compute stream, which may still
//! use its memory; compute waits for the transfer, at the latest when the [`Transfer`] is dropped. Events order the streams, so callers see
//! one stream.

use super::buffer::DeviceBuffer;
use super::device::CudaDevice;
use super::driver::{Context, Event, Stream};
use super::pinned::PinnedBuffer;
use super::profile::{Call, HOST_TRANSFER};
use crate::error::Result;
use std::sync::Arc;

/// Copies, or a collective, in flight.
#[must_use]
pub struct Transfer {
    device: Arc<CudaDevice>,
    /// What a profile calls it.
    name: &'static str,
    /// `None` after compute waits for it, and in a dry run.
    done: Option<Event>,
    /// Mirrors that are being copied.
    sources: Vec<DeviceBuffer>,
    /// Whether it runs on multiprocessors, as kernels do, and not on copy engines.
    takes_multiprocessors: bool,
}

impl Transfer {
    /// Allocates a mirror in device memory for each of `buffers`, and starts copying to it.
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
                // SAFETY: both have as many bytes. Nothing that is enqueued uses the copy, and the host's memory is not written
                // before the device has come to rest.
                unsafe { context.copy_to_device(Stream::ToDevice, copy.ptr(), source.host(), source.len())? };
            }
            Ok(())
        })?;
        Ok((copies, Transfer::host(device, done)))
    }

    /// Starts to copy each of `sources` to the given byte of `into`, which the caller keeps alive until compute waits.
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
                // SAFETY: the range was checked. Nothing that is enqueued uses it, and the host's memory is not written before the device
                // has come to rest.
                unsafe { context.copy_to_device(Stream::ToDevice, to, source.host(), source.len())? };
            }
            Ok(())
        })?;
        Ok(Transfer::host(device, done))
    }

    /// Starts copying the mirror of each of `buffers` to host memory, and releases the mirrors.
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

    /// Starts copying `source`, which the caller keeps alive until compute waits, to `into`.
    pub(crate) fn store(source: &DeviceBuffer, into: &mut PinnedBuffer) -> Result<Transfer> {
        source.expect_len(into.len())?;
        source.device().trace(|| format!("store {}", source.len()));
        let done = enqueue(source.device(), Stream::ToHost, |context| {
            // SAFETY: as for `write_back`; the lengths were compared.
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

    /// Starts the copies that `work` enqueues in `stream`, over memory that the caller keeps alive until compute waits.
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

    /// [`Transfer::by_copies`] of kernels.
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

    /// Runs `work`, whose products leave multiprocessors to the transfer if it takes any ([`CudaDevice::beside_collectives`]).
    pub(crate) fn beside<R>(&self, work: impl FnOnce() -> R) -> R {
        if self.takes_multiprocessors { self.device.beside_collectives(work) } else { work() }
    }

    /// Makes later collectives wait for the transfer, but not compute.
    pub(crate) fn before_collectives(&self) -> Result<()> {
        self.done.as_ref().map_or(Ok(()), |done| done.make_wait(Stream::Communication))
    }

    /// Makes all later work of the compute stream wait for the transfer.
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
        // A failure is reported by the next call. Mirrors are freed after compute waits.
        let _ = self.make_compute_wait();
        self.sources.clear();
    }
}

/// Enqueues `work` in `stream` after all earlier work of compute, and returns an event at its end; `None` in a dry run.
fn enqueue(device: &CudaDevice, stream: Stream, work: impl FnOnce(&Context) -> Result<()>) -> Result<Option<Event>> {
    let Some(context) = device.context() else { return Ok(None) };
    Event::end_of(context, Stream::Compute)?.make_wait(stream)?;
    work(context)?;
    Event::end_of(context, stream).map(Some)
}
