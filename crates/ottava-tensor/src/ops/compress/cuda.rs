use super::{CompressedTensor, GROUP, SavedActivation};
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{Result, Tensor};

kernel_source!("compress");

impl CompressedTensor {
    /// Addresses of codes and inverse scales, for writing.
    pub(in crate::ops) fn device_ptrs_mut(&mut self) -> [Arg; 2] {
        [Arg::Ptr(self.codes.device_ptr_mut()), Arg::Ptr(self.scale_inv.device_ptr_mut())]
    }
}

impl SavedActivation {
    /// The kernel that reads this variant.
    pub(in crate::ops) fn entry(&self, exact: &'static str, compressed: &'static str) -> &'static str {
        match self {
            SavedActivation::Exact(_) => exact,
            SavedActivation::Compressed(_) => compressed,
        }
    }

    /// Arguments of that kernel: the address of the values, or the addresses of codes and inverse scales.
    pub(in crate::ops) fn device_ptrs(&self) -> Vec<Arg> {
        match self {
            SavedActivation::Exact(x) => vec![Arg::Ptr(x.device_ptr())],
            SavedActivation::Compressed(x) => vec![Arg::Ptr(x.codes.device_ptr()), Arg::Ptr(x.scale_inv.device_ptr())],
        }
    }
}

pub(super) fn compress(gpu: &CudaDevice, x: &Tensor, y: &mut CompressedTensor) -> Result<()> {
    launch(gpu, "compress", x, y.device_ptrs_mut(), Arg::Ptr(x.device_ptr()))
}

pub(super) fn decompress(gpu: &CudaDevice, x: &CompressedTensor, y: &mut Tensor) -> Result<()> {
    let to = Arg::Ptr(y.device_ptr_mut());
    launch(gpu, "decompress", y, [Arg::Ptr(x.codes.device_ptr()), Arg::Ptr(x.scale_inv.device_ptr())], to)
}

fn launch(gpu: &CudaDevice, entry: &'static str, like: &Tensor, compressed: [Arg; 2], values: Arg) -> Result<()> {
    let [rows, columns] = like.dims("compress: x")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(like.dtype())?, entry };
    let [codes, scale_inv] = compressed;
    let args = [codes, scale_inv, values, Arg::U64(rows as u64), Arg::I32(columns as i32)];
    // SAFETY: values and codes are `rows · columns`, and there is a scale for each started `GROUP` of a row.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, rows * columns.div_ceil(GROUP)), BLOCK, 0, &args) }
}
