use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::bias::add_column_sums;
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{Result, Tensor};

kernel_source!("magnitude");

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
    let shape = dy.dims("magnitude_gradient: dy")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(dy.dtype())?, entry: "partial_gradients" };
    // SAFETY: `dy` and `x` are `rows · columns` elements of one type and `magnitude` `columns`, F32.
    unsafe { add_column_sums(gpu, &kernel, &[dy, x, magnitude], shape, dmagnitude) }
}
