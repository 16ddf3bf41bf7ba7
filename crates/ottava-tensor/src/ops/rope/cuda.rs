use super::{RopeLayout, Rotation};
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{Result, Tensor};

kernel_source!("rope");

pub(super) fn rope(
    gpu: &CudaDevice,
    x: &mut Tensor,
    table: &Tensor,
    layout: RopeLayout,
    rotation: Rotation,
) -> Result<()> {
    let [tokens, width] = x.dims("rope: x")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(x.dtype())?, entry: "rope" };
    let args = [
        Arg::Ptr(x.device_ptr_mut()),
        Arg::Ptr(table.device_ptr()),
        Arg::I32(width as i32),
        Arg::I32(layout.heads as i32),
        Arg::I32(layout.head_dim as i32),
        Arg::I32(layout.seq_len as i32),
        Arg::I32(layout.start as i32),
        Arg::F32(if rotation == Rotation::Forward { 1.0 } else { -1.0 }),
    ];
    // SAFETY: `x` is `tokens · width` with the rotated heads inside a row, and the table has a row for every position, both checked
    // by the op.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], BLOCK, 0, &args) }
}
