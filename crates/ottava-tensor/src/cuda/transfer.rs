//! Copies between the host's memory and the device's, beside compute.
//!
//! Each direction has a stream of its own, so copies run both ways at once and while kernels do. A copy begins when all that compute was
//! given before it has run, since until then the memory that it takes may be in use; and compute waits for it, at the latest when
//! the [`Transfer`] is dropped. So to everyone else it is as if there were one stream.

use super::buffer::DeviceBuffer;
use super::device::CudaDevice;
use super::driver::{Context, Event, Lane};
use super::pinned::PinnedBuffer;
use crate::error::Result;
use std::sync::Arc;

/// Copies under way.
#[must_use]
pub struct Transfer {
    /// `None` once compute waits for it, and where there is nothing to wait for.
    done: Option<Event>,
    /// What is read meanwhile.
    leaving: Vec<DeviceBuffer>,
}

impl Transfer {
    /// Gives each of `buffers` a mirror in the device's memory, and starts to fill it.
    pub(crate) fn fetch(device: &Arc<CudaDevice>, buffers: &mut [&mut PinnedBuffer]) -> Result<Transfer> {
        for buffer in &mut *buffers {
            buffer.mirror = Some(device.alloc(buffer.len())?);
        }
        device.trace(|| format!("fetch {:?}", buffers.iter().map(|buffer| buffer.len()).collect::<Vec<_>>()));
        let done = enqueue(device, Lane::Up, |context| {
            for buffer in buffers {
                let mirror = buffer.mirror.as_ref().expect("made above");
                // SAFETY: both have as many bytes. Nothing that is enqueued uses the mirror, and the host's memory is not written
                // before the device has come to rest.
                unsafe { context.copy_to_device(Lane::Up, mirror.ptr(), buffer.host(), buffer.len())? };
            }
            Ok(())
        })?;
        Ok(Transfer { done, leaving: Vec::new() })
    }

    /// Starts to copy each of `sources` to new memory of the device.
    pub(crate) fn upload(device: &Arc<CudaDevice>, sources: &[&PinnedBuffer]) -> Result<(Vec<DeviceBuffer>, Transfer)> {
        let copies = sources.iter().map(|source| device.alloc(source.len())).collect::<Result<Vec<_>>>()?;
        device.trace(|| format!("fetch {:?}", sources.iter().map(|source| source.len()).collect::<Vec<_>>()));
        let done = enqueue(device, Lane::Up, |context| {
            for (source, copy) in sources.iter().zip(&copies) {
                // SAFETY: both have as many bytes. Nothing that is enqueued uses the copy, and the host's memory is not written
                // before the device has come to rest.
                unsafe { context.copy_to_device(Lane::Up, copy.ptr(), source.host(), source.len())? };
            }
            Ok(())
        })?;
        Ok((copies, Transfer { done, leaving: Vec::new() }))
    }

    /// Starts to copy each of `buffers` from its mirror, and takes that from it.
    pub(crate) fn write_back(device: &Arc<CudaDevice>, buffers: &mut [&mut PinnedBuffer]) -> Result<Transfer> {
        let leaving: Vec<_> = buffers.iter_mut().map(|buffer| buffer.mirror.take()).collect();
        device
            .trace(|| format!("write back {:?}", leaving.iter().flatten().map(DeviceBuffer::len).collect::<Vec<_>>()));
        let done = enqueue(device, Lane::Down, |context| {
            for (buffer, mirror) in buffers.iter_mut().zip(&leaving) {
                let Some(mirror) = mirror else { continue };
                // SAFETY: both have as many bytes, and whoever reads the host's memory waits for the device, which waits for this.
                unsafe { context.copy_to_host(Lane::Down, buffer.host_mut(), mirror.ptr(), buffer.len())? };
            }
            Ok(())
        })?;
        Ok(Transfer { done, leaving: leaving.into_iter().flatten().collect() })
    }

    /// Starts to copy all of `source`, which its owner keeps until compute waits, over `into`.
    pub(crate) fn store(source: &DeviceBuffer, into: &mut PinnedBuffer) -> Result<Transfer> {
        source.expect_len(into.len())?;
        source.device().trace(|| format!("store {}", source.len()));
        let done = enqueue(source.device(), Lane::Down, |context| {
            // SAFETY: as for `write_back`; the lengths were compared.
            unsafe { context.copy_to_host(Lane::Down, into.host_mut(), source.ptr(), into.len()) }
        })?;
        Ok(Transfer { done, leaving: Vec::new() })
    }

    /// Has all further work of the compute stream wait for the copies.
    pub(crate) fn wait(mut self) -> Result<()> {
        self.hold_back_compute()
    }

    fn hold_back_compute(&mut self) -> Result<()> {
        self.done.take().map_or(Ok(()), |done| done.holds_back(Lane::Compute))
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        // Where this fails the device has failed, and the next call says so. What is leaving goes after this.
        let _ = self.hold_back_compute();
        self.leaving.clear();
    }
}

/// Enqueues `copies` in `lane` behind what compute was given so far, and marks their end. A dry run does nothing.
fn enqueue(device: &CudaDevice, lane: Lane, copies: impl FnOnce(&Context) -> Result<()>) -> Result<Option<Event>> {
    let Some(context) = device.context() else { return Ok(None) };
    Event::end_of(context, Lane::Compute)?.holds_back(lane)?;
    copies(context)?;
    Event::end_of(context, lane).map(Some)
}
