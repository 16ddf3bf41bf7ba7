use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{BLOCK, kernel_source};
use crate::{DType, Result, Tensor};

kernel_source!("global_norm");

/// Partial sums of one tensor.
const PARTS: usize = 132;

pub(super) fn global_norm(gpu: &CudaDevice, tensors: &[&Tensor], norm: &mut Tensor) -> Result<()> {
    let count = tensors.len() * PARTS;
    let mut partial = Tensor::empty(norm.device(), &[count], DType::F64)?;
    let kernel = |entry| Kernel { source: &SOURCE, defines: &[], entry };
    for (i, tensor) in tensors.iter().enumerate() {
        let args = [
            Arg::Ptr(partial.device_ptr_mut() + (i * PARTS * DType::F64.size()) as u64),
            Arg::Ptr(tensor.device_ptr()),
            Arg::U64(tensor.len() as u64),
        ];
        // SAFETY: `tensor` has `tensor.len()` elements and `partial` room for one value of each of its blocks.
        unsafe { gpu.launch(&kernel("sum_of_squares"), [PARTS as u32, 1, 1], BLOCK, 0, &args)? };
    }
    let args = [Arg::Ptr(norm.device_ptr_mut()), Arg::Ptr(partial.device_ptr()), Arg::I32(count as i32)];
    // SAFETY: `partial` has `count` elements, all written above; `norm` has one.
    unsafe { gpu.launch(&kernel("root_of_sum"), [1, 1, 1], BLOCK, 0, &args) }
}
