use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK, Defines};
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "transpose", variants: VARIANTS };
    kernel transpose(y: *mut WORD, x: *const WORD, rows: i32, columns: i32);
    kernel transpose_bytes(y: *mut u8, x: *const u8, rows: i32, columns: i32);
}

/// The variants by size of an element: 1, 2, 4 and 8 bytes.
const VARIANTS: &[Defines] =
    &[&[("WORD", "unsigned char")], &[("WORD", "unsigned short")], &[("WORD", "u32")], &[("WORD", "u64")]];

pub(super) fn transpose(gpu: &CudaDevice, x: &Tensor, y: &mut Tensor) -> Result<()> {
    let [rows, columns] = x.dims("transpose: x")?;
    let defines = VARIANTS[x.dtype().size().ilog2() as usize];
    let tiled = |n: usize| n.is_multiple_of(launch::TILE);
    let (entry, side) = match x.dtype().size() == 1 && tiled(rows) && tiled(columns) && launch::aligned(&[x, y]) {
        true => (kernel::transpose_bytes(y, x, rows, columns), launch::TILE),
        false => (kernel::transpose(y, x, rows, columns), 64),
    };
    let kernel = SOURCE.kernel(defines, entry);
    let grid = [columns.div_ceil(side).max(1) as u32, rows.div_ceil(side).max(1) as u32, 1];
    // SAFETY: both tensors have `rows · columns` elements of the size in the defines. For `transpose_bytes`, they have whole tiles.
    unsafe { gpu.launch(&kernel, grid, BLOCK, 0) }
}
