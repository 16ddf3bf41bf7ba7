use super::Layout;
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{BLOCK, Defines, elements_by_eight, kernel_source};
use crate::{DType, Result, Tensor};

kernel_source!("dequantize");

/// The types of codes and values.
pub(crate) const VARIANTS: &[Defines] = &[
    &[("C", "e4m3"), ("X", "f32")],
    &[("C", "e4m3"), ("X", "bf16")],
    &[("C", "e5m2"), ("X", "f32")],
    &[("C", "e5m2"), ("X", "bf16")],
];

pub(super) fn dequantize(
    gpu: &CudaDevice,
    codes: &Tensor,
    scale_inv: &Tensor,
    layout: &Layout,
    y: &mut Tensor,
) -> Result<()> {
    let variant = 2 * usize::from(codes.dtype() == DType::E5M2) + usize::from(y.dtype() == DType::BF16);
    let kernel = Kernel { source: &SOURCE, defines: VARIANTS[variant], entry: "dequantize" };
    let Layout { rows, columns, steps, shared, scale_steps } = *layout;
    let mut args = vec![Arg::Ptr(y.device_ptr_mut()), Arg::Ptr(codes.device_ptr()), Arg::Ptr(scale_inv.device_ptr())];
    let sizes = [rows, columns, steps[0], steps[1], shared[0], shared[1], scale_steps[0], scale_steps[1]];
    args.extend(sizes.map(|size| Arg::U64(size as u64)));
    let grid = elements_by_eight(gpu, rows * columns.next_multiple_of(8));
    // SAFETY: `y` has `rows · columns` elements, and `layout` leads to as many codes and to their scales.
    unsafe { gpu.launch(&kernel, grid, BLOCK, 0, &args) }
}
