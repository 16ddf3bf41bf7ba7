use crate::cuda::CudaDevice;
use crate::ops::bias::add_column_sums;
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK};
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "magnitude", variants: launch::STORAGE };
    kernel row_squares(squares: *mut f32, w: *const X, change: *const X, rows: i32, columns: i32);
    kernel magnitude_factors(result: *mut f32, squares: *const f32, magnitude: *const f32, rows: i32);
    kernel partial_gradients(
        partial: *mut f32, dy: *const X, x: *const X, magnitude: *const f32, rows: i32, columns: i32, chunk: i32
    );
}

pub(super) fn squares(gpu: &CudaDevice, w: &Tensor, change: Option<&Tensor>, squares: &mut Tensor) -> Result<()> {
    let [rows, columns] = w.dims("row_squares: w")?;
    let entry = kernel::row_squares(squares, w, change, rows, columns);
    let kernel = SOURCE.kernel(launch::storage(w.dtype())?, entry);
    // SAFETY: `w` and `change` (if given) have `rows · columns` elements of one type; the squares have `rows` elements, F32.
    unsafe { gpu.launch(&kernel, [rows.max(1) as u32, 1, 1], BLOCK, 0) }
}

pub(super) fn finish(
    gpu: &CudaDevice,
    squares: &Tensor,
    magnitude: Option<&Tensor>,
    result: &mut Tensor,
) -> Result<()> {
    let rows = squares.len();
    let entry = kernel::magnitude_factors(result, squares, magnitude, rows);
    let kernel = SOURCE.kernel(launch::storage(squares.dtype())?, entry);
    // SAFETY: the result, the squares and the magnitudes (if given) have `rows` elements, F32.
    unsafe { gpu.launch(&kernel, [(rows as u32).div_ceil(BLOCK).max(1), 1, 1], BLOCK, 0) }
}

pub(super) fn gradient(
    gpu: &CudaDevice,
    dy: &Tensor,
    x: &Tensor,
    magnitude: &Tensor,
    dmagnitude: &mut Tensor,
) -> Result<()> {
    let shape = dy.dims("magnitude_gradient: dy")?;
    let kernel = |partial: &mut Tensor, [rows, columns, chunk]: [usize; 3]| {
        let entry = kernel::partial_gradients(partial, dy, x, magnitude, rows, columns, chunk);
        Ok(SOURCE.kernel(launch::storage(dy.dtype())?, entry))
    };
    // SAFETY: `dy` and `x` have `rows · columns` elements of one type; `magnitude` has `columns` elements, F32.
    unsafe { add_column_sums(gpu, shape, kernel, dmagnitude) }
}
