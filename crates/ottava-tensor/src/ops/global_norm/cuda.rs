use crate::cuda::{Arg, CudaDevice, Entry};
use crate::ops::Gradient;
use crate::ops::declaration::{AddressMut, kernels};
use crate::ops::launch::{BLOCK, Defines};
use crate::{DType, Device, Result, Tensor};

kernels! {
    static SOURCE = { file: "global_norm", constants: [CAPACITY], variants: VARIANTS };
    kernel sum_of_squares(partial: *mut f64, count: i32, chunk: u64, parts: Parts);
    kernel root_of_sum(norm: *mut f32, partial: *const f64, n: i32);
    kernel sum(all: *mut f64, partial: *const f64, n: i32);
    kernel limit_norm(limited: *mut f32, norm: *const f32, limit: *const f32);
}

/// The maximum number of tensors per launch. Their table is a kernel argument, and a kernel has at most 4 KiB of arguments.
const CAPACITY: usize = 120;

/// The types of gradients.
const VARIANTS: &[Defines] = &[&[("X", "f32")], &[("X", "bf16")], &[("X", "e4m3")]];

/// The number of elements per block. It is large enough to amortise the search for the block's tensor.
const CHUNK: usize = 1 << 18;

fn variant(gradient: &Gradient) -> usize {
    match gradient {
        Gradient::Plain(x) => usize::from(x.dtype() == DType::BF16),
        Gradient::Scaled(_) => 2,
    }
}

/// Returns the sum of squares of each chunk of each gradient.
pub(super) fn sums_of_squares(gpu: &CudaDevice, device: &Device, gradients: &[Gradient]) -> Result<Tensor> {
    let blocks = |x: &Gradient| x.values().len().div_ceil(CHUNK);
    let count = gradients.iter().map(blocks).sum::<usize>();
    let mut partial = Tensor::empty(device, &[count], DType::F64)?;
    let mut first = 0;
    for (i, &defines) in VARIANTS.iter().enumerate() {
        let alike: Vec<&Gradient> = gradients.iter().filter(|x| variant(x) == i).collect();
        for gradients in alike.chunks(CAPACITY) {
            let partials = partial.device_ptr_mut() + (first * DType::F64.size()) as u64;
            let (mut parts, mut end) = (Vec::with_capacity(4 * CAPACITY), 0);
            for gradient in gradients {
                let scale = match gradient {
                    Gradient::Plain(_) => 0,
                    Gradient::Scaled(x) => x.scale_inv.device_ptr(),
                };
                end += blocks(gradient) as u64;
                let values = gradient.values();
                parts.extend([Arg::Ptr(values.device_ptr()), Arg::Ptr(scale)]);
                parts.extend([Arg::U64(values.len() as u64), Arg::U64(end)]);
            }
            parts.resize(4 * CAPACITY, Arg::U64(0));
            let entry = kernel::sum_of_squares(AddressMut(partials), gradients.len(), CHUNK, parts);
            let kernel = SOURCE.kernel(defines, entry);
            // SAFETY: `partial` has one value for each block, the blocks of a tensor end with it, and the table has its full length.
            unsafe { gpu.launch(&kernel, [end as u32, 1, 1], BLOCK, 0)? };
            first += end as usize;
        }
    }
    Ok(partial)
}

pub(super) fn root_of_sum(gpu: &CudaDevice, partial: &Tensor, root: &mut Tensor) -> Result<()> {
    total(gpu, kernel::root_of_sum(root, partial, partial.len()))
}

pub(super) fn sum(gpu: &CudaDevice, partial: &Tensor, sum: &mut Tensor) -> Result<()> {
    total(gpu, kernel::sum(sum, partial, partial.len()))
}

fn total(gpu: &CudaDevice, entry: Entry) -> Result<()> {
    let kernel = SOURCE.kernel(VARIANTS[0], entry);
    // SAFETY: the partial sums have the given number of elements. The total has one element: F32 for a root, F64 for a sum.
    unsafe { gpu.launch(&kernel, [1, 1, 1], 1024, 0) }
}

pub(super) fn limit_norm(gpu: &CudaDevice, norm: &Tensor, limit: &Tensor, limited: &mut Tensor) -> Result<()> {
    let kernel = SOURCE.kernel(VARIANTS[0], kernel::limit_norm(limited, norm, limit));
    // SAFETY: the three tensors have one F32 element each.
    unsafe { gpu.launch(&kernel, [1, 1, 1], 1, 0) }
}
