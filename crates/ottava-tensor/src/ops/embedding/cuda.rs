use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK};
use crate::{Result, Tensor};

kernels! {
    // The key tells whether the table is a part of the vocabulary.
    table source(bool) = {
        file: "embedding", headers: [], constants: [], variants: launch::STORAGE,
        (false) => [],
        (true) => [PART],
    };
    kernel embedding(y: *mut X, table: *const X, ids: *const i32, channels: i32, #[PART] first_id: i32, #[PART] rows: i32);
    kernel embedding_gradient(
        dtable: *mut f32, dy: *const X, ids: *const i32, tokens: i32, channels: i32, #[PART] first_id: i32, #[PART] rows: i32
    );
}

pub(super) fn embedding(
    gpu: &CudaDevice,
    table: &Tensor,
    ids: &Tensor,
    first: Option<usize>,
    y: &mut Tensor,
) -> Result<()> {
    let [tokens, channels] = y.dims("embedding: y")?;
    let entry = kernel::embedding(y, table, ids, channels, first, first.map(|_| table.shape()[0]));
    let kernel = source(first.is_some()).kernel(launch::storage(table.dtype())?, entry);
    // SAFETY: `y` has `tokens · channels` elements and `ids` has `tokens`. The op's contract demands that every id is a row of `table`, and the
    // kernel for a part checks it.
    unsafe { gpu.launch(&kernel, [tokens.max(1) as u32, 1, 1], BLOCK, 0) }
}

pub(super) fn embedding_gradient(
    gpu: &CudaDevice,
    dy: &Tensor,
    ids: &Tensor,
    first: Option<usize>,
    dtable: &mut Tensor,
) -> Result<()> {
    let [tokens, channels] = dy.dims("embedding_gradient: dy")?;
    let rows = first.map(|_| dtable.shape()[0]);
    let entry = kernel::embedding_gradient(dtable, dy, ids, tokens, channels, first, rows);
    let kernel = source(first.is_some()).kernel(launch::storage(dy.dtype())?, entry);
    // SAFETY: as in `embedding`, for `dy` and `dtable`.
    unsafe { gpu.launch(&kernel, [tokens.max(1) as u32, 1, 1], 512, 0) }
}
