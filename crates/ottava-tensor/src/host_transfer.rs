//! Asynchronous copies of tensors between pinned host memory and a GPU.
//!
//! A tensor of a GPU may be in pinned host memory (`MemoryKind::Host`, `cuda/pinned.rs`). Then the host memory holds the tensor, and a copy on the
//! GPU is its mirror: `HostTransfer::fetch` creates the mirror, ops use the mirror, and `HostTransfer::write_back` or `discard_mirrors` releases it.
//! The host memory always has complete values, so an error or a failed capture of a CUDA graph loses nothing. A kernel that gets a tensor without a
//! mirror reads the tensor over PCIe, which is slow but correct.
//!
//! Copies run in two streams, one per direction, and overlap with compute. A copy starts after the work enqueued before it. Compute waits for the
//! copy at `HostTransfer::wait`, or when the `HostTransfer` is dropped. Captured graphs include copies and waits.

use crate::cuda::{CudaDevice, PinnedBuffer, Transfer};
use crate::device::MemoryKind;
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use std::sync::Arc;

/// Asynchronous copies of tensors that overlap with compute.
///
/// Fetching a tensor in host memory ([`MemoryKind::Host`](crate::MemoryKind)) gives it a mirror in device memory. Ops read and write the mirror until
/// the tensor is written back or discarded. Tensors in other memory are skipped, so on a CPU this is a no-op.
/// Ops may read a fetched tensor only after [`HostTransfer::wait`].
#[must_use]
#[derive(Default)]
pub struct HostTransfer {
    // Dropped first, because compute must wait for the copy before its source is freed.
    transfer: Option<Transfer>,
    _source: Option<Tensor>,
}

/// The scope of the mirrors in a dry run.
const FETCHED: &str = "tensors that are fetched from the host's memory";

impl HostTransfer {
    /// Starts copying `tensors` to the device.
    pub fn fetch<'a>(tensors: impl IntoIterator<Item = &'a mut Tensor>) -> Result<HostTransfer> {
        HostTransfer::start(tensors, |device, buffers| {
            let _scope = device.tracker().map(|tracker| tracker.scope(FETCHED));
            Transfer::fetch(device, buffers)
        })
    }

    /// Starts to copy `tensors` from host memory to new tensors in GPU memory. Ops may read the new tensors after [`HostTransfer::wait`].
    ///
    /// Errors if one of `tensors` is not in host memory.
    pub fn upload(tensors: &[&Tensor]) -> Result<(Vec<Tensor>, HostTransfer)> {
        let mut sources = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            sources.push(tensor.pinned().ok_or_else(|| Error::Placement {
                what: "upload".into(),
                expected: "a whole tensor of the host's memory".into(),
                got: tensor.device().to_string(),
            })?);
        }
        let Some(first) = sources.first() else { return Ok((Vec::new(), HostTransfer::default())) };
        let device = first.device().clone();
        let _scope = device.tracker().map(|tracker| tracker.scope(FETCHED));
        let (copies, transfer) = Transfer::upload(&device, &sources)?;
        let copies = tensors.iter().zip(copies).map(|(tensor, copy)| tensor.with_buffer(copy)).collect();
        Ok((copies, HostTransfer { transfer: Some(transfer), _source: None }))
    }

    /// Copies each of `sources` to `buffer`, starting at the given element. Copies from host memory overlap with compute. Other copies are made at
    /// once. Ops may read the buffer only after [`HostTransfer::wait`], and collectives only after [`HostTransfer::before_collectives`].
    ///
    /// Errors if a source has another type or does not fit.
    pub fn upload_into(buffer: &mut Tensor, sources: &[(&Tensor, usize)]) -> Result<HostTransfer> {
        let mut pinned = Vec::new();
        for &(source, start) in sources.iter().filter(|(source, _)| !source.is_empty()) {
            match source.pinned() {
                Some(memory) if buffer.is_on_gpu() && memory.mirror().is_none() => {
                    source.expect_dtype("upload_into: source", &[buffer.dtype()])?;
                    pinned.push((memory, start * buffer.dtype().size()));
                }
                _ => buffer.copy_to_elements(start, source)?,
            }
        }
        let Some(device) = pinned.first().map(|(memory, _)| memory.device().clone()) else {
            return Ok(HostTransfer::default());
        };
        let into = buffer.storage_mut().on_device_mut().expect("the buffer is on a GPU");
        Ok(HostTransfer { transfer: Some(Transfer::upload_into(&device, &pinned, into)?), _source: None })
    }

    /// Makes collectives that are started later wait for the copies. Compute does not wait.
    pub fn before_collectives(&self) -> Result<()> {
        self.transfer.as_ref().map_or(Ok(()), Transfer::before_collectives)
    }

    /// Starts copying the mirrors of `tensors` back to host memory, and releases the mirrors.
    pub fn write_back<'a>(tensors: impl IntoIterator<Item = &'a mut Tensor>) -> Result<HostTransfer> {
        HostTransfer::start(tensors, Transfer::write_back)
    }

    /// Starts `transfer` for the tensors of `tensors` in host memory.
    fn start<'a>(
        tensors: impl IntoIterator<Item = &'a mut Tensor>,
        transfer: impl FnOnce(&Arc<CudaDevice>, &mut [&mut PinnedBuffer]) -> Result<Transfer>,
    ) -> Result<HostTransfer> {
        let mut buffers: Vec<_> = tensors.into_iter().filter_map(Tensor::pinned_mut).collect();
        let device = buffers.first().map(|buffer| buffer.device().clone());
        let transfer = device.map(|device| transfer(&device, &mut buffers)).transpose()?;
        Ok(HostTransfer { transfer, _source: None })
    }

    /// Starts copying `source`, a whole tensor in device memory, to `into`, a tensor of the same size in host memory.
    pub fn store(source: Tensor, into: &mut Tensor) -> Result<HostTransfer> {
        let (expected, got) = (source.device().to_string(), into.device().to_string());
        let (Some(from), Some(to)) = (source.whole_buffer(), into.pinned_mut()) else {
            return Err(Error::Placement { what: "store".into(), expected, got });
        };
        Ok(HostTransfer { transfer: Some(Transfer::store(from, to)?), _source: Some(source) })
    }

    /// Starts to move `source`, a whole tensor, to host memory. The memory is `earlier`, a tensor of the same size in host memory, if given. If
    /// `source` is not in GPU memory, it is returned unchanged.
    pub fn offload(source: Tensor, earlier: Option<Tensor>) -> Result<(Tensor, HostTransfer)> {
        if !source.is_on_gpu() {
            return Ok((source, HostTransfer::default()));
        }
        let mut moved = match earlier {
            Some(earlier) => earlier,
            None => Tensor::zeros_in(source.device(), source.shape(), source.dtype(), MemoryKind::Host)?,
        };
        let transfer = HostTransfer::store(source, &mut moved)?;
        Ok((moved, transfer))
    }

    /// Makes all later work of the device wait for the copies.
    pub fn wait(self) -> Result<()> {
        self.transfer.map_or(Ok(()), Transfer::wait)
    }
}

impl Tensor {
    /// Returns the same elements in pinned host memory, which ops of the device can read. If the tensor is in host memory, it is returned unchanged.
    pub fn to_host_memory(&self) -> Result<Tensor> {
        let (moved, transfer) = HostTransfer::offload(self.clone(), None)?;
        transfer.wait()?;
        Ok(moved)
    }
}

/// Drops the mirrors of `tensors` without writing them back.
pub fn discard_mirrors<'a>(tensors: impl IntoIterator<Item = &'a mut Tensor>) {
    tensors.into_iter().filter_map(Tensor::pinned_mut).for_each(|buffer| buffer.drop_mirror());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{Graph, test_device};
    use crate::device::Device;

    const N: usize = 3 << 20;

    fn counted(device: &Device, from: usize) -> Tensor {
        Tensor::from_slice(device, &[N], &values(from)).unwrap()
    }

    fn values(from: usize) -> Vec<f32> {
        (from..from + N).map(|i| i as f32).collect()
    }

    /// Write-back copies the writes to a mirror to host memory. Discarding the mirror loses these writes.
    #[test]
    fn write_back_keeps_device_writes_and_evict_drops_them() {
        let Some(device) = test_device().map(Device::Cuda) else { return };
        let mut moved = counted(&device, 0).to_host_memory().unwrap();
        assert_eq!((moved.memory_kind(), moved.to_vec::<f32>().unwrap()), (MemoryKind::Host, values(0)));
        assert!(moved.duplicate().unwrap_err().to_string().contains("not fetched"));
        for (next, kept) in [(1, false), (2, true), (3, true), (4, false)] {
            let (before, next) = (moved.to_vec::<f32>().unwrap(), counted(&device, next));
            HostTransfer::fetch([&mut moved]).unwrap().wait().unwrap();
            let seen = moved.duplicate().unwrap();
            moved.copy_from(0, &next).unwrap();
            match kept {
                true => HostTransfer::write_back([&mut moved]).unwrap().wait().unwrap(),
                false => discard_mirrors([&mut moved]),
            }
            assert_eq!(seen.to_vec::<f32>().unwrap(), before);
            let expected = if kept { next.to_vec::<f32>().unwrap() } else { before };
            assert_eq!(moved.to_vec::<f32>().unwrap(), expected);
        }
    }

    #[test]
    fn an_upload_leaves_the_host_copy_alone() {
        let Some(device) = test_device().map(Device::Cuda) else { return };
        let held: Vec<_> = (1..4).map(|i| counted(&device, i).to_host_memory().unwrap()).collect();
        let (mut copies, transfer) = HostTransfer::upload(&held.iter().collect::<Vec<_>>()).unwrap();
        transfer.wait().unwrap();
        for (i, (copy, held)) in copies.iter_mut().zip(&held).enumerate() {
            assert_eq!((copy.memory_kind(), copy.to_vec::<f32>().unwrap()), (MemoryKind::Device, values(i + 1)));
            copy.fill_zero().unwrap();
            assert_eq!(held.to_vec::<f32>().unwrap(), values(i + 1));
        }
        assert!(HostTransfer::upload(&[&copies[0]]).is_err(), "a tensor of the device is not uploaded");
    }

    /// The parts of a buffer arrive at the right place, and `offload` overwrites the tensor in host memory.
    #[test]
    fn slices_are_uploaded_into_a_buffer_and_stored_again() {
        let Some(device) = test_device().map(Device::Cuda) else { return };
        let [first, second] = [0, 7].map(|from| counted(&device, from).to_host_memory().unwrap());
        let on_device = counted(&device, 3);
        let mut buffer = Tensor::zeros(&device, &[3 * N + 1], crate::DType::F32).unwrap();
        let sources = [(&second, 2 * N + 1), (&first, 0), (&on_device, N)];
        let upload = HostTransfer::upload_into(&mut buffer, &sources).unwrap();
        upload.before_collectives().unwrap();
        upload.wait().unwrap();
        let expected = [values(0), values(3), vec![0.0], values(7)].concat();
        assert_eq!(buffer.to_vec::<f32>().unwrap(), expected);
        assert!(HostTransfer::upload_into(&mut buffer, &[(&first, 2 * N + 2)]).is_err(), "a source that does not fit");
        let (moved, stored) = HostTransfer::offload(on_device, Some(first)).unwrap();
        stored.wait().unwrap();
        assert_eq!((moved.memory_kind(), moved.to_vec::<f32>().unwrap()), (MemoryKind::Host, values(3)));
    }

    /// Events order copies and compute, even though freed memory is reused at once. This holds eagerly and in a captured graph.
    #[test]
    fn transfers_and_compute_keep_the_order_of_the_calls() {
        let Some(device) = test_device() else { return };
        let on = Device::Cuda(device.clone());
        let mut moved: Vec<_> = (0..6).map(|i| counted(&on, 10 * i).to_host_memory().unwrap()).collect();
        let mut slots: Vec<_> =
            (0..6).map(|_| Tensor::zeros_in(&on, &[N], crate::DType::F32, MemoryKind::Host).unwrap()).collect();
        // Rotates the tensors by one place, and stores the old values in `slots`.
        let mut turn = || -> Result<()> {
            let mut leaving = HostTransfer::default();
            let mut before = last_of(&mut moved)?;
            for (tensor, slot) in moved.iter_mut().zip(&mut slots) {
                HostTransfer::fetch([&mut *tensor])?.wait()?;
                let now = tensor.duplicate()?;
                tensor.copy_from(0, &before)?;
                std::mem::replace(&mut leaving, HostTransfer::write_back([tensor])?).wait()?;
                std::mem::replace(&mut leaving, HostTransfer::store(now.clone(), slot)?).wait()?;
                before = now;
            }
            leaving.wait()
        };
        turn().unwrap();
        let mut graph = Graph::capture(&device, &mut turn).unwrap();
        for _ in 0..3 {
            graph.replay().unwrap();
        }
        for i in 0..6 {
            assert_eq!(moved[i].to_vec::<f32>().unwrap()[0], 10.0 * ((i + 6 - 4) % 6) as f32, "{i}");
            assert_eq!(moved[i].to_vec::<f32>().unwrap()[N - 1], (10 * ((i + 6 - 4) % 6) + N - 1) as f32, "{i}");
            assert_eq!(slots[i].to_vec::<f32>().unwrap(), values(10 * ((i + 6 - 3) % 6)), "{i}");
        }
    }

    fn last_of(moved: &mut [Tensor]) -> Result<Tensor> {
        let last = moved.last_mut().expect("there are six");
        HostTransfer::fetch([&mut *last])?.wait()?;
        let copy = last.duplicate();
        discard_mirrors([last]);
        copy
    }
}
