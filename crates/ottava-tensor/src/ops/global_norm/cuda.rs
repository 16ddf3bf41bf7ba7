use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{DType, Result, Tensor};

kernel_source!("global_norm");

/// Tensors that one launch takes: their table travels with its arguments, of which a kernel has 4 KiB.
const CAPACITY: usize = 160;

/// Elements of one block: so many that finding its tensor costs little.
const CHUNK: usize = 1 << 18;

pub(super) fn global_norm(gpu: &CudaDevice, tensors: &[&Tensor], norm: &mut Tensor) -> Result<()> {
    let blocks = |tensors: &[&Tensor]| tensors.iter().map(|t| t.len().div_ceil(CHUNK)).sum::<usize>();
    let count = blocks(tensors);
    let mut partial = Tensor::empty(norm.device(), &[count], DType::F64)?;
    let kernel =
        |dtype, entry| -> Result<Kernel> { Ok(Kernel { source: &SOURCE, defines: launch::storage(dtype)?, entry }) };
    let mut first = 0;
    let narrow = |t: &&Tensor| t.dtype() == DType::BF16;
    let (narrow, wide): (Vec<&Tensor>, Vec<&Tensor>) = tensors.iter().copied().partition(narrow);
    for tensors in wide.chunks(CAPACITY).chain(narrow.chunks(CAPACITY)) {
        let partials = partial.device_ptr_mut() + (first * DType::F64.size()) as u64;
        let mut args = vec![Arg::Ptr(partials), Arg::I32(tensors.len() as i32), Arg::U64(CHUNK as u64)];
        // The last parameter is an array of structs of words, which the driver copies from consecutive arguments.
        let mut end = 0;
        for tensor in tensors {
            end += blocks(&[tensor]) as u64;
            args.extend([Arg::Ptr(tensor.device_ptr()), Arg::U64(tensor.len() as u64), Arg::U64(end)]);
        }
        args.resize(3 + 3 * CAPACITY, Arg::U64(0));
        // SAFETY: `partial` has room for one value of each block, blocks end with their tensor, and the table is full length.
        unsafe { gpu.launch(&kernel(tensors[0].dtype(), "sum_of_squares")?, [end as u32, 1, 1], BLOCK, 0, &args)? };
        first += end as usize;
    }
    let args = [Arg::Ptr(norm.device_ptr_mut()), Arg::Ptr(partial.device_ptr()), Arg::I32(count as i32)];
    // SAFETY: `partial` has `count` elements, all written above; `norm` has one.
    unsafe { gpu.launch(&kernel(DType::F32, "root_of_sum")?, [1, 1, 1], 1024, 0, &args) }
}
