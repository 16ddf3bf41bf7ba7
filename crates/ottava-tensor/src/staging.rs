//! Tensors whose bytes the host reads in pieces, for example from files, or writes while the device works.
//!
//! For a GPU, chunks of 32 MiB are read into two pinned buffers in turn. While one chunk is copied to the GPU, the next chunk is read into the
//! other buffer. So the host never holds a whole tensor, and reads overlap with copies.

use crate::cuda::{DeviceBuffer, Event, PinnedBuffer};
use crate::device::{Device, Storage};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// The number of bytes of a staging buffer.
const CHUNK: usize = 32 << 20;

/// Reads tensors into the memory of a device. On the CPU they are read directly into the tensor. For a GPU, chunks are read into two pinned buffers
/// in turn: one buffer is copied to the GPU while the next chunk is read.
pub struct Staging {
    device: Device,
    /// The number of bytes of each buffer.
    chunk: usize,
    /// The buffers, which are allocated for the first tensor on a GPU.
    buffers: Vec<StagingBuffer>,
    /// The index of the buffer for the next chunk.
    next: usize,
}

struct StagingBuffer {
    memory: PinnedBuffer,
    /// The event at the end of the last copy from the buffer.
    copied: Option<Event>,
}

impl Staging {
    /// Creates a staging for tensors of `device`.
    pub fn new(device: &Device) -> Staging {
        Staging::with_chunk(device, CHUNK)
    }

    /// Creates a staging whose buffers have `chunk` bytes each.
    pub fn with_chunk(device: &Device, chunk: usize) -> Staging {
        Staging { device: device.clone(), chunk, buffers: Vec::new(), next: 0 }
    }

    /// Returns the device of the tensors.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Creates a tensor and reads its bytes, little-endian and row-major. `read` gets the offset of a piece, and the memory to write the piece to. A
    /// dry run reads nothing.
    ///
    /// Errors if `read` errors, or if the memory is too small.
    pub fn read<E: From<Error>>(
        &mut self,
        shape: &[usize],
        dtype: DType,
        mut read: impl FnMut(usize, &mut [u8]) -> std::result::Result<(), E>,
    ) -> std::result::Result<Tensor, E> {
        let mut tensor = Tensor::empty(&self.device, shape, dtype)?;
        match tensor.storage_mut() {
            Storage::Host(buffer) => read(0, &mut buffer.as_mut_slice()[..])?,
            Storage::Cuda(buffer) => self.stage(buffer, &mut read)?,
            Storage::Dry(_) => {}
            Storage::Pinned(_) => unreachable!("a new tensor is in device memory"),
        }
        Ok(tensor)
    }

    /// Replaces all elements of `tensor` by the elements in `bytes`, after the work that was enqueued before. On a GPU, this waits only until the copy
    /// before the last one has left its buffer.
    ///
    /// # Panics
    /// Panics if the sizes differ, or if `tensor` is a part of its memory or has views.
    pub fn write(&mut self, tensor: &mut Tensor, bytes: &[u8]) -> Result<()> {
        assert_eq!(tensor.bytes(), bytes.len(), "the bytes of the whole tensor");
        match tensor.storage_mut() {
            Storage::Cuda(buffer) => {
                assert_eq!(buffer.len(), bytes.len(), "the tensor covers its memory");
                self.stage(buffer, &mut |at, piece: &mut [u8]| {
                    piece.copy_from_slice(&bytes[at..at + piece.len()]);
                    Ok(())
                })
            }
            Storage::Host(_) | Storage::Pinned(_) | Storage::Dry(_) => tensor.write_bytes(bytes),
        }
    }

    fn stage<E: From<Error>>(
        &mut self,
        to: &mut DeviceBuffer,
        read: &mut impl FnMut(usize, &mut [u8]) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        while self.buffers.len() < 2 {
            let memory = to.device().alloc_host(self.chunk)?;
            self.buffers.push(StagingBuffer { memory, copied: None });
        }
        for at in (0..to.len()).step_by(self.chunk) {
            let bytes = self.chunk.min(to.len() - at);
            let StagingBuffer { memory, copied } = &mut self.buffers[self.next];
            self.next = 1 - self.next;
            if let Some(copied) = copied.take() {
                copied.synchronize()?;
            }
            if let Some(place) = memory.host_bytes_mut(0..bytes) {
                read(at, place)?;
            }
            *copied = memory.copy_to(bytes, to, at)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::GpuModel;
    use crate::testing::gpu;

    /// Reads a tensor of `length` bytes, and returns it with its expected bytes.
    fn staged(staging: &mut Staging, length: usize, seed: usize) -> (Tensor, Vec<u8>) {
        let expected: Vec<u8> = (0..length).map(|i| ((i + seed) * 7 % 251) as u8).collect();
        let read = |at: usize, place: &mut [u8]| -> Result<()> {
            place.copy_from_slice(&expected[at..at + place.len()]);
            Ok(())
        };
        (staging.read(&[length], DType::E4M3, read).unwrap(), expected)
    }

    /// Reads lengths below, at and above a chunk one after the other, so that a buffer is written while copies from it are in flight.
    #[test]
    fn a_staged_tensor_has_the_bytes_that_were_read() {
        for device in [Device::Cpu].into_iter().chain(gpu()) {
            let mut staging = Staging::with_chunk(&device, 1 << 20);
            let lengths = [1, 0, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 7 << 20, (5 << 20) + 3];
            let all: Vec<_> = lengths.iter().enumerate().map(|(i, n)| staged(&mut staging, *n, i)).collect();
            for (length, (tensor, expected)) in lengths.iter().zip(all) {
                assert!(tensor.read_bytes().unwrap() == expected, "{length} bytes on {device}");
            }
        }
    }

    /// Each copy of the tensor is enqueued between two writes, and has the bytes of the first of them.
    #[test]
    fn writes_keep_the_order_of_the_device() {
        for device in [Device::Cpu].into_iter().chain(gpu()) {
            let (mut staging, mut tensor) =
                (Staging::with_chunk(&device, 1 << 10), Tensor::zeros(&device, &[900], DType::I32).unwrap());
            let values = |round: i32| (0..900).map(|at| at * 31 + round).collect::<Vec<i32>>();
            let copies: Vec<Tensor> = (0..20)
                .map(|round| {
                    staging.write(&mut tensor, bytemuck::cast_slice(&values(round))).unwrap();
                    tensor.duplicate().unwrap()
                })
                .collect();
            for (round, copy) in (0..).zip(&copies) {
                assert_eq!(copy.to_vec::<i32>().unwrap(), values(round), "write {round} on {device}");
            }
        }
    }

    #[test]
    fn a_failed_read_ends_the_tensor_and_not_the_staging() {
        for device in [Device::Cpu].into_iter().chain(gpu()) {
            let mut staging = Staging::with_chunk(&device, 1 << 10);
            let error = staging.read(&[5000], DType::E4M3, |at, _| match at {
                0 if device.tracker().is_none() && !matches!(device, Device::Cpu) => Ok(()),
                _ => Err(Error::Value(format!("nothing at {at}"))),
            });
            assert!(error.unwrap_err().to_string().contains("nothing at"), "{device}");
            let (tensor, expected) = staged(&mut staging, 3000, 1);
            assert_eq!(tensor.read_bytes().unwrap(), expected);
        }
    }

    #[test]
    fn a_dry_run_copies_in_chunks_and_reads_nothing() {
        let device = Device::dry_gpu(GpuModel::h200());
        let Device::Cuda(gpu) = &device else { unreachable!("made above") };
        gpu.start_trace();
        let read = |_: usize, _: &mut [u8]| -> Result<()> { panic!("nothing is read") };
        let mut staging = Staging::with_chunk(&device, 1000);
        let tensor = staging.read(&[1250], DType::BF16, read).unwrap();
        assert_eq!(gpu.take_trace(), ["stage 1000 to +0", "stage 1000 to +1000", "stage 500 to +2000"]);
        assert_eq!((tensor.shape(), tensor.dtype(), gpu.host_bytes()), (&[1250][..], DType::BF16, 2000));
        drop(staging);
        assert_eq!(gpu.host_bytes(), 0);
    }
}
