//! Copies of tensors in host memory. Another thread reads the copies while the device continues.

use crate::cuda::Event;
use crate::device::{Device, Storage};
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use std::borrow::Cow;
use std::ops::Range;

/// Host memory for copies of tensors, allocated once. For a GPU it is pinned, so that copies reach the bandwidth of the bus.
pub struct Snapshot {
    storage: Storage,
    /// The number of bytes taken by copies.
    used: usize,
    /// Whether copies may not have arrived yet.
    pending: bool,
    /// The event at the end of the last copy. Copies arrive in order.
    last: Option<Event>,
}

impl Snapshot {
    /// The number of bytes at whose multiples copies start.
    const ALIGNMENT: usize = 256;

    /// Allocates memory of `bytes` for tensors of `device`. Errors with `Error::HostMemory` if a GPU's host has too little memory.
    pub fn new(device: &Device, bytes: usize) -> Result<Snapshot> {
        let storage = device.allocate_in_host(bytes)?;
        Ok(Snapshot { storage, used: 0, pending: false, last: None })
    }

    /// Returns the number of bytes of a snapshot that a tensor of `bytes` takes.
    pub const fn padded(bytes: usize) -> usize {
        bytes.next_multiple_of(Snapshot::ALIGNMENT)
    }

    /// Drops all copies.
    pub fn clear(&mut self) {
        self.used = 0;
    }

    /// Starts to copy `tensor`, and returns the range that its bytes will have. Later work of the device may change the tensor.
    ///
    /// Errors if the copy does not fit.
    pub fn copy(&mut self, tensor: &Tensor) -> Result<Range<usize>> {
        let range = self.used..self.used + tensor.bytes();
        let room = self.storage.bytes();
        if range.end > room {
            return Err(Error::Value(format!("{} bytes do not fit a snapshot of {room} bytes", range.end)));
        }
        self.used = Snapshot::padded(range.end);
        self.pending = true;
        if let Some(event) = tensor.copy_to_host(&mut self.storage, range.start)? {
            self.last = Some(event);
        }
        Ok(range)
    }

    /// Waits until all copies have arrived. Does not wait for later work of the device.
    pub fn wait(&mut self) -> Result<()> {
        if let Some(last) = self.last.take() {
            last.synchronize()?;
        }
        self.pending = false;
        Ok(())
    }

    /// Returns the bytes of a copy, or zeros in a dry run. Panics before [`Snapshot::wait`].
    pub fn bytes(&self, range: Range<usize>) -> Cow<'_, [u8]> {
        assert!(!self.pending, "copies have arrived before they are read");
        match &self.storage {
            Storage::Host(buffer) => buffer.as_slice()[range].into(),
            Storage::Pinned(buffer) => buffer.host_bytes(range),
            Storage::Dry(_) => vec![0; range.len()].into(),
            Storage::Cuda(_) => unreachable!("a snapshot is in host memory"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::gpu;
    use crate::{DType, MemoryKind};

    /// Copies tensors that change afterwards: on the device, in host memory, a view, and on the CPU.
    #[test]
    fn a_snapshot_holds_what_tensors_were() {
        for device in [Device::Cpu].into_iter().chain(gpu()) {
            let values = |from: usize| (from..from + 1000).map(|i| i as f32).collect::<Vec<_>>();
            let tensor = |from| Tensor::from_slice(&device, &[1000], &values(from)).unwrap();
            let mut own = [tensor(0), tensor(1).to_host_memory().unwrap()];
            let cpu = Tensor::from_slice(&Device::Cpu, &[1000], &values(2)).unwrap();
            let mut snapshot = Snapshot::new(&device, 4 * Snapshot::padded(4000)).unwrap();
            for round in 0..2 {
                let view = own[0].rows(10, 20).unwrap();
                let tensors = [&own[0], &own[1], &cpu, &view];
                let expected: Vec<_> = tensors.iter().map(|tensor| tensor.read_bytes().unwrap()).collect();
                let ranges: Vec<_> = tensors.iter().map(|tensor| snapshot.copy(tensor).unwrap()).collect();
                drop(view);
                own.iter_mut().for_each(|tensor| tensor.write_bytes(bytemuck::cast_slice(&values(3 + round))).unwrap());
                snapshot.wait().unwrap();
                for (i, (range, expected)) in ranges.into_iter().zip(expected).enumerate() {
                    assert!(*snapshot.bytes(range) == expected, "tensor {i} on {device}");
                }
                let error = snapshot.copy(&tensor(0)).unwrap_err().to_string();
                assert!(error.contains("do not fit a snapshot"), "{error}");
                snapshot.clear();
            }
        }
    }

    #[test]
    fn a_dry_run_counts_a_snapshot_and_reads_zeros() {
        let device = Device::dry_gpu(crate::cuda::GpuModel::h200());
        let Device::Cuda(gpu) = &device else { unreachable!("made above") };
        let tensor = Tensor::zeros_in(&device, &[7], DType::F32, MemoryKind::Host).unwrap();
        let before = gpu.host_bytes();
        let mut snapshot = Snapshot::new(&device, 1000).unwrap();
        assert_eq!(gpu.host_bytes() - before, 1000);
        let range = snapshot.copy(&tensor).unwrap();
        snapshot.wait().unwrap();
        assert_eq!(*snapshot.bytes(range), [0; 28]);
    }
}
