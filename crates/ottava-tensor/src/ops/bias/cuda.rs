use crate::cuda::{CudaDevice, Kernel};
use crate::ops::Groups;
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK};
use crate::{DType, Device, Result, Tensor};

kernels! {
    static SOURCE = { file: "bias", variants: launch::STORAGE };
    kernel add_bias(x: *mut X, bias: *const X, columns: i32);
    kernel add_grouped_bias(x: *mut X, bias: *const X, offsets: *const i32, counts: *const i32, groups: i32, columns: i32);
    kernel grouped_bias_dots(
        dots: *mut f32, dy: *const X, bias: *const X, offsets: *const i32, counts: *const i32, groups: i32, columns: i32
    );
    kernel partial_sums(partial: *mut f32, dy: *const X, rows: i32, columns: i32, chunk: i32);
    kernel add_partial_sums(sum: *mut f32, partial: *const f32, columns: i32, chunks: i32);
    kernel add_group_sums(sum: *mut f32, partial: *const f32, offsets: *const i32, columns: i32, chunk: i32);
}

/// The number of rows per block. All rows of a chunk of grouped rows belong to one group.
const CHUNK: usize = Groups::ALIGNMENT;

pub(super) fn add_bias(gpu: &CudaDevice, x: &mut Tensor, bias: &Tensor) -> Result<()> {
    let [rows, columns] = x.dims("add_bias: x")?;
    let kernel = SOURCE.kernel(launch::storage(x.dtype())?, kernel::add_bias(x, bias, columns));
    // SAFETY: `x` has `rows · columns` elements and `bias` has `columns`, of one type.
    unsafe { gpu.launch(&kernel, [rows.max(1) as u32, 1, 1], BLOCK, 0) }
}

pub(super) fn bias_gradient(gpu: &CudaDevice, dy: &Tensor, dbias: &mut Tensor) -> Result<()> {
    let shape = dy.dims("bias_gradient: dy")?;
    // SAFETY: `dy` has `rows · columns` elements.
    unsafe { add_column_sums(gpu, shape, sums_of(dy), dbias) }
}

/// Returns a function that makes the kernel for the column sums of `dy`.
fn sums_of(dy: &Tensor) -> impl FnOnce(&mut Tensor, [usize; 3]) -> Result<Kernel> {
    move |partial, [rows, columns, chunk]| {
        Ok(SOURCE.kernel(launch::storage(dy.dtype())?, kernel::partial_sums(partial, dy, rows, columns, chunk)))
    }
}

/// Adds to `sum`, F32 `[C]`, the column sums that `kernel` computes over `rows` rows.
///
/// # Safety
/// `kernel` gets a tensor for partial sums, F32 `[chunks, columns]`, and `[rows, columns, rows per chunk]`, and returns a kernel. Its other arguments
/// must be valid for what the kernel reads. A row of blocks of the grid must write a row of the partial sums.
pub(in crate::ops) unsafe fn add_column_sums(
    gpu: &CudaDevice,
    [rows, columns]: [usize; 2],
    kernel: impl FnOnce(&mut Tensor, [usize; 3]) -> Result<Kernel>,
    sum: &mut Tensor,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let partial = unsafe { partial_sums(gpu, [rows, columns], kernel, sum.device())? };
    add_partial_sums(gpu, &partial, sum)
}

/// Returns the column sums of each chunk of rows.
///
/// # Safety
/// As for [`add_column_sums`].
unsafe fn partial_sums(
    gpu: &CudaDevice,
    [rows, columns]: [usize; 2],
    kernel: impl FnOnce(&mut Tensor, [usize; 3]) -> Result<Kernel>,
    device: &Device,
) -> Result<Tensor> {
    let chunks = rows.div_ceil(CHUNK).max(1);
    let mut partial = Tensor::empty(device, &[chunks, columns], DType::F32)?;
    let column_blocks = columns.div_ceil(BLOCK as usize).max(1) as u32;
    let kernel = kernel(&mut partial, [rows, columns, CHUNK])?;
    // SAFETY: the caller's promise; `partial` has a row for each chunk.
    unsafe { gpu.launch(&kernel, [column_blocks, chunks as u32, 1], BLOCK, 0)? };
    Ok(partial)
}

/// Computes `sum[c] += Σ_i partial[i, c]` for F32 `partial` `[N, C]` and `sum` `[C]`.
pub(in crate::ops) fn add_partial_sums(gpu: &CudaDevice, partial: &Tensor, sum: &mut Tensor) -> Result<()> {
    let [chunks, columns] = partial.dims("add_partial_sums: partial")?;
    let kernel = SOURCE.kernel(launch::storage(DType::F32)?, kernel::add_partial_sums(sum, partial, columns, chunks));
    // SAFETY: `partial` has `chunks · columns` elements and `sum` has `columns`, F32.
    unsafe { gpu.launch(&kernel, [columns.div_ceil(32) as u32, 1, 1], 1024, 0) }
}

pub(super) fn add_grouped_bias(gpu: &CudaDevice, x: &mut Tensor, bias: &Tensor, groups: &Groups) -> Result<()> {
    let [rows, columns] = x.dims("add_grouped_bias: x")?;
    let defines = launch::storage(x.dtype())?;
    let entry = kernel::add_grouped_bias(x, bias, &groups.offsets, &groups.counts, groups.len(), columns);
    let kernel = SOURCE.kernel(defines, entry);
    // SAFETY: each row of `x` has a block; `bias` has a row of the same type for each group, and `groups` has their offsets and counts.
    unsafe { gpu.launch(&kernel, [rows.max(1) as u32, 1, 1], BLOCK, 0) }
}

pub(super) fn grouped_bias_gradient(gpu: &CudaDevice, dy: &Tensor, groups: &Groups, dbias: &mut Tensor) -> Result<()> {
    let [rows, columns] = dy.dims("grouped_bias_gradient: dy")?;
    // SAFETY: `dy` has `rows · columns` elements.
    let partial = unsafe { partial_sums(gpu, [rows, columns], sums_of(dy), dy.device())? };
    let entry = kernel::add_group_sums(dbias, &partial, &groups.offsets, columns, CHUNK);
    let kernel = SOURCE.kernel(launch::storage(DType::F32)?, entry);
    // SAFETY: `partial` has a row for each chunk, offsets are multiples of a chunk, and `dbias` has a row for each group.
    unsafe { gpu.launch(&kernel, [columns.div_ceil(32) as u32, groups.len() as u32, 1], 1024, 0) }
}

pub(super) fn grouped_bias_dots(
    gpu: &CudaDevice,
    dy: &Tensor,
    bias: &Tensor,
    groups: &Groups,
    dots: &mut Tensor,
) -> Result<()> {
    let [rows, columns] = dy.dims("grouped_bias_dots: dy")?;
    let entry = kernel::grouped_bias_dots(dots, dy, bias, &groups.offsets, &groups.counts, groups.len(), columns);
    let kernel = SOURCE.kernel(launch::storage(dy.dtype())?, entry);
    // SAFETY: each row of `dy` has a block and an element of `dots`; `bias` has a row of the same type for each group.
    unsafe { gpu.launch(&kernel, [rows.max(1) as u32, 1, 1], BLOCK, 0) }
}
