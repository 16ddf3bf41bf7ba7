use super::Layout;
use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::{BLOCK, Defines, elements_by_eight};
use crate::{DType, Result, Tensor};

kernels! {
    static SOURCE = { file: "dequantize", variants: VARIANTS };
    kernel dequantize(
        y: *mut X, codes: *const CODE, scales: *const f32, tensor_scale: *const f32, rows: u64, columns: u64, pitch: u64, rows_shared: u64, columns_shared: u64,
        row_scales: u64, column_scales: u64, every: u64
    );
}

/// The types of codes, and the types of values.
const VARIANTS: &[Defines] = &[
    &[("CODE", "e4m3"), ("X", "f32")],
    &[("CODE", "e4m3"), ("X", "bf16")],
    &[("CODE", "e5m2"), ("X", "f32")],
    &[("CODE", "e5m2"), ("X", "bf16")],
];

pub(super) fn dequantize(
    gpu: &CudaDevice,
    codes: &Tensor,
    (scale_inv, tensor_scale): (&Tensor, Option<&Tensor>),
    layout: &Layout,
    every: usize,
    y: &mut Tensor,
) -> Result<()> {
    let variant = 2 * usize::from(codes.dtype() == DType::E5M2) + usize::from(y.dtype() == DType::BF16);
    let rows = y.shape()[0];
    let Layout {
        columns, pitch, shared: [rows_shared, columns_shared], scale_steps: [row_scales, column_scales], ..
    } = *layout;
    let entry = kernel::dequantize(
        y,
        codes,
        scale_inv,
        tensor_scale,
        rows,
        columns,
        pitch,
        rows_shared,
        columns_shared,
        row_scales,
        column_scales,
        every,
    );
    let kernel = SOURCE.kernel(VARIANTS[variant], entry);
    let grid = elements_by_eight(gpu, rows * layout.columns.next_multiple_of(8));
    // SAFETY: `y` has the elements of the selected rows, and `layout` describes their codes and scales. `tensor_scale` has an
    // element for each row.
    unsafe { gpu.launch(&kernel, grid, BLOCK, 0) }
}
