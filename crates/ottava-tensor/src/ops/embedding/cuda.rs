use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{Result, Tensor};

kernel_source!("embedding");

pub(super) fn embedding(gpu: &CudaDevice, table: &Tensor, ids: &Tensor, y: &mut Tensor) -> Result<()> {
    let [tokens, channels] = y.dims("embedding: y")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(table.dtype())?, entry: "embedding" };
    let args = [
        Arg::Ptr(y.device_ptr_mut()),
        Arg::Ptr(table.device_ptr()),
        Arg::Ptr(ids.device_ptr()),
        Arg::I32(channels as i32),
    ];
    // SAFETY: `y` is `tokens · channels`, `ids` `tokens`, and every id is a row of `table`, as the op's contract demands.
    unsafe { gpu.launch(&kernel, [tokens.max(1) as u32, 1, 1], BLOCK, 0, &args) }
}

pub(super) fn embedding_gradient(gpu: &CudaDevice, dy: &Tensor, ids: &Tensor, dtable: &mut Tensor) -> Result<()> {
    let [tokens, channels] = dy.dims("embedding_gradient: dy")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(dy.dtype())?, entry: "embedding_gradient" };
    let args = [
        Arg::Ptr(dtable.device_ptr_mut()),
        Arg::Ptr(dy.device_ptr()),
        Arg::Ptr(ids.device_ptr()),
        Arg::I32(tokens as i32),
        Arg::I32(channels as i32),
    ];
    // SAFETY: `dy` is `tokens · channels`, `ids` `tokens`, and every id is a row of `dtable`, as the op's contract demands.
    unsafe { gpu.launch(&kernel, [tokens.max(1) as u32, 1, 1], 512, 0, &args) }
}
