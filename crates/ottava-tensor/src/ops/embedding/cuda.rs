use crate::cuda::{Arg, CudaDevice, Kernel, Source};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{Result, Tensor};

kernel_source!("embedding");
kernel_source!(PART, "embedding" + PART);

/// The kernels for a whole vocabulary, or for a part of `rows` tokens from `first` on, and their last arguments.
fn source(first: Option<usize>, rows: usize) -> (&'static Source, Vec<Arg>) {
    let part = first.map(|first| [first, rows].map(|n| Arg::I32(n as i32)));
    (if part.is_some() { &PART } else { &SOURCE }, part.into_iter().flatten().collect())
}

pub(super) fn embedding(
    gpu: &CudaDevice,
    table: &Tensor,
    ids: &Tensor,
    first: Option<usize>,
    y: &mut Tensor,
) -> Result<()> {
    let [tokens, channels] = y.dims("embedding: y")?;
    let (source, part) = source(first, table.shape()[0]);
    let kernel = Kernel { source, defines: launch::storage(table.dtype())?, entry: "embedding" };
    let mut args = vec![
        Arg::Ptr(y.device_ptr_mut()),
        Arg::Ptr(table.device_ptr()),
        Arg::Ptr(ids.device_ptr()),
        Arg::I32(channels as i32),
    ];
    args.extend(part);
    // SAFETY: `y` is `tokens · channels`, `ids` `tokens`, and every id is a row of `table`, as the op's contract demands, or the kernel of a
    // part checks it.
    unsafe { gpu.launch(&kernel, [tokens.max(1) as u32, 1, 1], BLOCK, 0, &args) }
}

pub(super) fn embedding_gradient(
    gpu: &CudaDevice,
    dy: &Tensor,
    ids: &Tensor,
    first: Option<usize>,
    dtable: &mut Tensor,
) -> Result<()> {
    let [tokens, channels] = dy.dims("embedding_gradient: dy")?;
    let (source, part) = source(first, dtable.shape()[0]);
    let kernel = Kernel { source, defines: launch::storage(dy.dtype())?, entry: "embedding_gradient" };
    let mut args = vec![
        Arg::Ptr(dtable.device_ptr_mut()),
        Arg::Ptr(dy.device_ptr()),
        Arg::Ptr(ids.device_ptr()),
        Arg::I32(tokens as i32),
        Arg::I32(channels as i32),
    ];
    args.extend(part);
    // SAFETY: as in `embedding`, for `dy` and `dtable`.
    unsafe { gpu.launch(&kernel, [tokens.max(1) as u32, 1, 1], 512, 0, &args) }
}
