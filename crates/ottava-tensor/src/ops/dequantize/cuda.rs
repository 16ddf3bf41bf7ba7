use super::Layout;
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{BLOCK, Defines, elements_by_eight, kernel_source};
use crate::{DType, Result, Tensor};

kernel_source!("dequantize");

/// The types of codes and values.
pub(crate) const VARIANTS: &[Defines] = &[
    &[("CODE", "e4m3"), ("X", "f32")],
    &[("CODE", "e4m3"), ("X", "bf16")],
    &[("CODE", "e5m2"), ("X", "f32")],
    &[("CODE", "e5m2"), ("X", "bf16")],
];

impl Layout {
    /// The arguments of kernels.
    pub(in crate::ops) fn args(&self) -> [Arg; 7] {
        let Layout { rows, columns, pitch, shared, scale_steps } = *self;
        [rows, columns, pitch, shared[0], shared[1], scale_steps[0], scale_steps[1]].map(|size| Arg::U64(size as u64))
    }
}

pub(super) fn dequantize(
    gpu: &CudaDevice,
    codes: &Tensor,
    scale_inv: &Tensor,
    layout: &Layout,
    every: usize,
    y: &mut Tensor,
) -> Result<()> {
    let variant = 2 * usize::from(codes.dtype() == DType::E5M2) + usize::from(y.dtype() == DType::BF16);
    let kernel = Kernel { source: &SOURCE, defines: VARIANTS[variant], entry: "dequantize" };
    let rows = y.shape()[0];
    let mut args = vec![Arg::Ptr(y.device_ptr_mut()), Arg::Ptr(codes.device_ptr()), Arg::Ptr(scale_inv.device_ptr())];
    args.extend(Layout { rows, ..*layout }.args());
    args.push(Arg::U64(every as u64));
    let grid = elements_by_eight(gpu, rows * layout.columns.next_multiple_of(8));
    // SAFETY: `y` has as many elements as rows that are taken, and `layout` leads to their codes and scales.
    unsafe { gpu.launch(&kernel, grid, BLOCK, 0, &args) }
}
