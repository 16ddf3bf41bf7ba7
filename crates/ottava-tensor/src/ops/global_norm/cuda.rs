use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::Gradient;
use crate::ops::launch::{BLOCK, Defines, kernel_source};
use crate::{DType, Device, Result, Tensor};

kernel_source!("global_norm"; CAPACITY);

/// Tensors of one launch: their table is a kernel argument, and a kernel has 4 KiB of arguments.
const CAPACITY: usize = 120;

/// The types of gradients.
pub(crate) const VARIANTS: &[Defines] = &[&[("X", "f32")], &[("X", "bf16")], &[("X", "e4m3")]];

/// Elements per block, enough to amortise the search for its tensor.
const CHUNK: usize = 1 << 18;

fn variant(gradient: &Gradient) -> usize {
    match gradient {
        Gradient::Plain(x) => usize::from(x.dtype() == DType::BF16),
        Gradient::Scaled(_) => 2,
    }
}

/// The sum of squares of each chunk of each gradient.
pub(super) fn sums_of_squares(gpu: &CudaDevice, device: &Device, gradients: &[Gradient]) -> Result<Tensor> {
    let blocks = |x: &Gradient| x.values().len().div_ceil(CHUNK);
    let count = gradients.iter().map(blocks).sum::<usize>();
    let mut partial = Tensor::empty(device, &[count], DType::F64)?;
    let mut first = 0;
    for (i, &defines) in VARIANTS.iter().enumerate() {
        let alike: Vec<&Gradient> = gradients.iter().filter(|x| variant(x) == i).collect();
        for gradients in alike.chunks(CAPACITY) {
            let partials = partial.device_ptr_mut() + (first * DType::F64.size()) as u64;
            let mut args = vec![Arg::Ptr(partials), Arg::I32(gradients.len() as i32), Arg::U64(CHUNK as u64)];
            // The last parameter is an array of structs, passed as consecutive 64-bit arguments.
            let mut end = 0;
            for gradient in gradients {
                let scale = match gradient {
                    Gradient::Plain(_) => 0,
                    Gradient::Scaled(x) => x.scale_inv.device_ptr(),
                };
                end += blocks(gradient) as u64;
                let values = gradient.values();
                args.extend([Arg::Ptr(values.device_ptr()), Arg::Ptr(scale)]);
                args.extend([Arg::U64(values.len() as u64), Arg::U64(end)]);
            }
            args.resize(3 + 4 * CAPACITY, Arg::U64(0));
            let kernel = Kernel { source: &SOURCE, defines, entry: "sum_of_squares" };
            // SAFETY: `partial` has room for one value of each block, blocks end with their tensor, and the table is full length.
            unsafe { gpu.launch(&kernel, [end as u32, 1, 1], BLOCK, 0, &args)? };
            first += end as usize;
        }
    }
    Ok(partial)
}

pub(super) fn root_of_sum(gpu: &CudaDevice, partial: &Tensor, root: &mut Tensor) -> Result<()> {
    total(gpu, "root_of_sum", partial, root)
}

pub(super) fn sum(gpu: &CudaDevice, partial: &Tensor, sum: &mut Tensor) -> Result<()> {
    total(gpu, "sum", partial, sum)
}

fn total(gpu: &CudaDevice, entry: &'static str, partial: &Tensor, total: &mut Tensor) -> Result<()> {
    let args = [Arg::Ptr(total.device_ptr_mut()), Arg::Ptr(partial.device_ptr()), Arg::I32(partial.len() as i32)];
    let kernel = Kernel { source: &SOURCE, defines: VARIANTS[0], entry };
    // SAFETY: `partial` has as many elements as the count says, and `total` one, of F32 for a root and of F64 for a sum.
    unsafe { gpu.launch(&kernel, [1, 1, 1], 1024, 0, &args) }
}

pub(super) fn limit_norm(gpu: &CudaDevice, norm: &Tensor, limit: &Tensor, limited: &mut Tensor) -> Result<()> {
    let args = [limited.device_ptr_mut(), norm.device_ptr(), limit.device_ptr()].map(Arg::Ptr);
    let kernel = Kernel { source: &SOURCE, defines: VARIANTS[0], entry: "limit_norm" };
    // SAFETY: the three tensors have one F32 element each.
    unsafe { gpu.launch(&kernel, [1, 1, 1], 1, 0, &args) }
}
