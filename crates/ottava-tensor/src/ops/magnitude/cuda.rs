use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::bias::add_partial_sums;
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{DType, Result, Tensor};

kernel_source!("magnitude");

/// Rows per block.
const CHUNK: usize = 128;

pub(super) fn compute(
    gpu: &CudaDevice,
    w: &Tensor,
    scaled: Option<(&Tensor, &Tensor)>,
    result: &mut Tensor,
) -> Result<()> {
    let [rows, columns] = w.dims("row_norms: w")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(w.dtype())?, entry: "row_norms" };
    let args = [
        Arg::Ptr(result.device_ptr_mut()),
        Arg::Ptr(w.device_ptr()),
        Arg::Ptr(scaled.map_or(0, |(change, _)| change.device_ptr())),
        Arg::Ptr(scaled.map_or(0, |(_, magnitude)| magnitude.device_ptr())),
        Arg::I32(rows as i32),
        Arg::I32(columns as i32),
    ];
    // SAFETY: `w` and the change, if there is one, are `rows · columns` elements of one type; the result and the magnitudes are `rows`, F32.
    unsafe { gpu.launch(&kernel, [rows.max(1) as u32, 1, 1], BLOCK, 0, &args) }
}

pub(super) fn gradient(
    gpu: &CudaDevice,
    dy: &Tensor,
    x: &Tensor,
    magnitude: &Tensor,
    dmagnitude: &mut Tensor,
) -> Result<()> {
    let [rows, columns] = dy.dims("magnitude_gradient: dy")?;
    let chunks = rows.div_ceil(CHUNK).max(1);
    let mut partial = Tensor::empty(dy.device(), &[chunks, columns], DType::F32)?;
    let column_blocks = columns.div_ceil(BLOCK as usize).max(1) as u32;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(dy.dtype())?, entry: "partial_gradients" };
    let args = [
        Arg::Ptr(partial.device_ptr_mut()),
        Arg::Ptr(dy.device_ptr()),
        Arg::Ptr(x.device_ptr()),
        Arg::Ptr(magnitude.device_ptr()),
        Arg::I32(rows as i32),
        Arg::I32(columns as i32),
        Arg::I32(CHUNK as i32),
    ];
    // SAFETY: `dy` and `x` are `rows · columns` elements of one type and `magnitude` `columns`, F32; the grid has one row of blocks per row of
    // `partial`.
    unsafe { gpu.launch(&kernel, [column_blocks, chunks as u32, 1], BLOCK, 0, &args)? };
    add_partial_sums(gpu, &partial, dmagnitude)
}
