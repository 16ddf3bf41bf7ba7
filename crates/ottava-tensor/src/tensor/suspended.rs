//! Tensors whose memory other tensors use for a while.
//!
//! Phases of a run need memory in turns: a KV cache while the model draws completions, and activations while it learns from them. A tensor of one phase
//! is suspended in the other phase, and resumed at the same address, so graphs that were captured with the tensor stay valid.

use super::Tensor;
use crate::cuda::{DeviceBuffer, FormerBuffer};
use crate::device::{Device, Storage};
use crate::dtype::DType;
use crate::error::Result;
use std::sync::Arc;

/// A tensor without memory, and without content.
pub struct Suspended {
    device: Device,
    shape: Box<[usize]>,
    dtype: DType,
    /// Where its memory lay on a GPU.
    former: Option<FormerBuffer>,
}

impl Tensor {
    /// Returns the memory of the tensor to its device, unless views or clones still use it. The content is lost.
    pub fn suspend(self) -> Suspended {
        let Tensor { storage, device, shape, dtype, .. } = self;
        let former = match &*storage {
            Storage::Cuda(buffer) => buffer.former(),
            Storage::Host(_) | Storage::Pinned(_) | Storage::Dry(_) => None,
        };
        Suspended { device, shape, dtype, former }
    }
}

impl Suspended {
    /// Returns a tensor of the same shape and type, whose content is undefined. On a GPU, it lies at the same address, unless another tensor lies there.
    ///
    /// Errors if the device has too little memory.
    pub fn resume(&self) -> Result<Tensor> {
        let Suspended { device, shape, dtype, former } = self;
        let Some(former) = former else { return Tensor::empty(device, shape, *dtype) };
        let storage = Arc::new(Storage::Cuda(DeviceBuffer::at(former)?));
        Ok(Tensor { storage, device: device.clone(), offset: 0, shape: shape.clone(), dtype: *dtype })
    }

    /// Returns whether `resumed` lies where this tensor lay, so that graphs that were captured with this tensor stay valid.
    pub fn is_place_of(&self, resumed: &Tensor) -> bool {
        self.former.as_ref().is_none_or(|former| former.pointer() == resumed.device_ptr())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::GpuModel;

    #[test]
    fn a_suspended_tensor_lends_its_memory() {
        let gpu = Device::dry_gpu(GpuModel::h200());
        for device in [gpu, Device::Cpu.dry()] {
            let tracker = device.tracker().unwrap();
            let shape = [3, 1 << 20];
            let tensor = Tensor::empty(&device, &shape, DType::F32).unwrap();
            let live = || [0; 2].map(|_| tracker.take_peak().bytes)[1];
            let before = live();
            let suspended = tensor.suspend();
            assert_eq!(live(), 0);
            let again = suspended.resume().unwrap();
            assert_eq!((again.shape(), live()), (&shape[..], before));
        }
    }

    #[test]
    fn memory_in_use_is_not_taken() {
        let device = Device::dry_gpu(GpuModel::h200());
        let tensor = Tensor::empty(&device, &[1 << 20], DType::F32).unwrap();
        let address = tensor.device_ptr();
        let clone = tensor.clone();
        let elsewhere = tensor.suspend().resume().unwrap();
        assert_ne!(elsewhere.device_ptr(), address, "a clone still uses the memory");
        let there = clone.suspend().resume().unwrap();
        assert_eq!(there.device_ptr(), address);
    }
}
