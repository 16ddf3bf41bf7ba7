use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, Defines, kernel_source};
use crate::{Result, Tensor};

kernel_source!("transpose");

/// By size of an element: 1, 2, 4 and 8 bytes.
pub(crate) const VARIANTS: &[Defines] =
    &[&[("WORD", "unsigned char")], &[("WORD", "unsigned short")], &[("WORD", "u32")], &[("WORD", "u64")]];

pub(super) fn transpose(gpu: &CudaDevice, x: &Tensor, y: &mut Tensor) -> Result<()> {
    let [rows, columns] = x.dims("transpose: x")?;
    let defines = VARIANTS[x.dtype().size().ilog2() as usize];
    let tiled = |n: usize| n.is_multiple_of(launch::TILE);
    let (entry, side) = match x.dtype().size() == 1 && tiled(rows) && tiled(columns) && launch::aligned(&[x, y]) {
        true => ("transpose_bytes", launch::TILE),
        false => ("transpose", 64),
    };
    let kernel = Kernel { source: &SOURCE, defines, entry };
    let args =
        [Arg::Ptr(y.device_ptr_mut()), Arg::Ptr(x.device_ptr()), Arg::I32(rows as i32), Arg::I32(columns as i32)];
    let grid = [columns.div_ceil(side).max(1) as u32, rows.div_ceil(side).max(1) as u32, 1];
    // SAFETY: both tensors have `rows · columns` elements of the size in the defines, in whole tiles for `transpose_bytes`.
    unsafe { gpu.launch(&kernel, grid, BLOCK, 0, &args) }
}
