use super::{DrawnColumns, TokenDraws, threshold};
use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK};
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "dropout", variants: launch::STORAGE };
    kernel dropout(
        y: *mut X, x: *const X, numbers: *const i32, seed: *const i32, columns: i32, key: u64, first: u64,
        threshold: u64, factor: f32
    );
    kernel add_noise(
        y: *mut X, x: *const X, numbers: *const i32, seed: *const i32, columns: i32, key: u64, first: u64, size: f32
    );
}

pub(super) fn dropout(
    gpu: &CudaDevice,
    x: &Tensor,
    p: f64,
    draws: &TokenDraws,
    DrawnColumns { key, first }: DrawnColumns,
    y: &mut Tensor,
) -> Result<()> {
    let [rows, columns] = x.dims("dropout: x")?;
    let TokenDraws { seed, numbers } = draws;
    let (threshold, factor) = (u64::from(threshold(p)), (1.0 / (1.0 - p)) as f32);
    let entry = kernel::dropout(y, x, numbers, seed, columns, key, first as u64, threshold, factor);
    let kernel = SOURCE.kernel(launch::storage(x.dtype())?, entry);
    // SAFETY: `x` and `y` have `rows · columns` elements of one type; `numbers` has `rows` elements and `seed` has 2.
    unsafe { gpu.launch(&kernel, [rows.max(1) as u32, 1, 1], BLOCK, 0) }
}

pub(super) fn add_noise(
    gpu: &CudaDevice,
    x: &Tensor,
    size: f32,
    draws: &TokenDraws,
    DrawnColumns { key, first }: DrawnColumns,
    y: &mut Tensor,
) -> Result<()> {
    let [rows, columns] = x.dims("add_noise: x")?;
    let TokenDraws { seed, numbers } = draws;
    let entry = kernel::add_noise(y, x, numbers, seed, columns, key, first as u64, size);
    let kernel = SOURCE.kernel(launch::storage(x.dtype())?, entry);
    // SAFETY: `x` and `y` have `rows · columns` elements of one type; `numbers` has `rows` elements and `seed` has 2.
    unsafe { gpu.launch(&kernel, [rows.max(1) as u32, 1, 1], BLOCK, 0) }
}
