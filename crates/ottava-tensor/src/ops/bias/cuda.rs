use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::Groups;
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{DType, Device, Result, Tensor};

kernel_source!("bias");

/// Rows per block. Chunks of grouped rows belong to one group each.
const CHUNK: usize = Groups::ALIGNMENT;

pub(super) fn add_bias(gpu: &CudaDevice, x: &mut Tensor, bias: &Tensor) -> Result<()> {
    let [rows, columns] = x.dims("add_bias: x")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(x.dtype())?, entry: "add_bias" };
    let args = [Arg::Ptr(x.device_ptr_mut()), Arg::Ptr(bias.device_ptr()), Arg::I32(columns as i32)];
    // SAFETY: `x` is `rows · columns` elements and `bias` `columns`, of one type.
    unsafe { gpu.launch(&kernel, [rows.max(1) as u32, 1, 1], BLOCK, 0, &args) }
}

pub(super) fn bias_gradient(gpu: &CudaDevice, dy: &Tensor, dbias: &mut Tensor) -> Result<()> {
    let shape = dy.dims("bias_gradient: dy")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(dy.dtype())?, entry: "partial_sums" };
    // SAFETY: `dy` is `rows · columns` elements.
    unsafe { add_column_sums(gpu, &kernel, &[dy], shape, dbias) }
}

/// `sum[c] += Σ_t` of what `kernel` adds up for each column of `rows` rows; `sum` is F32 `[C]`.
///
/// # Safety
/// `kernel` takes the pointers of partial sums, F32 `[chunks, columns]`, and of `inputs`, which have what it reads, and then rows, columns
/// and rows per chunk; a row of blocks of the grid writes a row of the partial sums.
pub(in crate::ops) unsafe fn add_column_sums(
    gpu: &CudaDevice,
    kernel: &Kernel,
    inputs: &[&Tensor],
    [rows, columns]: [usize; 2],
    sum: &mut Tensor,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let partial = unsafe { partial_sums(gpu, kernel, inputs, [rows, columns], sum.device())? };
    add_partial_sums(gpu, &partial, sum)
}

/// The sums of each chunk of [`add_column_sums`].
///
/// # Safety
/// As for [`add_column_sums`].
unsafe fn partial_sums(
    gpu: &CudaDevice,
    kernel: &Kernel,
    inputs: &[&Tensor],
    [rows, columns]: [usize; 2],
    device: &Device,
) -> Result<Tensor> {
    let chunks = rows.div_ceil(CHUNK).max(1);
    let mut partial = Tensor::empty(device, &[chunks, columns], DType::F32)?;
    let column_blocks = columns.div_ceil(BLOCK as usize).max(1) as u32;
    let mut args = vec![Arg::Ptr(partial.device_ptr_mut())];
    args.extend(inputs.iter().map(|input| Arg::Ptr(input.device_ptr())));
    args.extend([rows, columns, CHUNK].map(|size| Arg::I32(size as i32)));
    // SAFETY: the caller's promise; `partial` has a row for each chunk.
    unsafe { gpu.launch(kernel, [column_blocks, chunks as u32, 1], BLOCK, 0, &args)? };
    Ok(partial)
}

/// `sum[c] += Σ_i partial[i, c]` for F32 `partial` `[N, C]` and `sum` `[C]`.
pub(in crate::ops) fn add_partial_sums(gpu: &CudaDevice, partial: &Tensor, sum: &mut Tensor) -> Result<()> {
    let [chunks, columns] = partial.dims("add_partial_sums: partial")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(DType::F32)?, entry: "add_partial_sums" };
    let args = [
        Arg::Ptr(sum.device_ptr_mut()),
        Arg::Ptr(partial.device_ptr()),
        Arg::I32(columns as i32),
        Arg::I32(chunks as i32),
    ];
    // SAFETY: `partial` is `chunks · columns` elements and `sum` `columns`, F32.
    unsafe { gpu.launch(&kernel, [columns.div_ceil(32) as u32, 1, 1], 1024, 0, &args) }
}

/// Pointers of the rows of groups, and their number.
fn of_groups(groups: &Groups) -> [Arg; 3] {
    [Arg::Ptr(groups.offsets.device_ptr()), Arg::Ptr(groups.counts.device_ptr()), Arg::I32(groups.len() as i32)]
}

pub(super) fn add_grouped_bias(gpu: &CudaDevice, x: &mut Tensor, bias: &Tensor, groups: &Groups) -> Result<()> {
    let [rows, columns] = x.dims("add_grouped_bias: x")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(x.dtype())?, entry: "add_grouped_bias" };
    let pointers = [x.device_ptr_mut(), bias.device_ptr()].map(Arg::Ptr);
    let args = [pointers.as_slice(), &of_groups(groups), &[Arg::I32(columns as i32)]].concat();
    // SAFETY: a block for each row of `x`; `bias` has a row for each group, of the same type, and groups their offsets and counts.
    unsafe { gpu.launch(&kernel, [rows.max(1) as u32, 1, 1], BLOCK, 0, &args) }
}

pub(super) fn grouped_bias_gradient(gpu: &CudaDevice, dy: &Tensor, groups: &Groups, dbias: &mut Tensor) -> Result<()> {
    let [rows, columns] = dy.dims("grouped_bias_gradient: dy")?;
    let defines = launch::storage(dy.dtype())?;
    let kernel = Kernel { source: &SOURCE, defines, entry: "partial_sums" };
    // SAFETY: `dy` is `rows · columns` elements.
    let partial = unsafe { partial_sums(gpu, &kernel, &[dy], [rows, columns], dy.device())? };
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(DType::F32)?, entry: "add_group_sums" };
    let args = [
        Arg::Ptr(dbias.device_ptr_mut()),
        Arg::Ptr(partial.device_ptr()),
        Arg::Ptr(groups.offsets.device_ptr()),
        Arg::I32(columns as i32),
        Arg::I32(CHUNK as i32),
    ];
    // SAFETY: `partial` has a row for each chunk, offsets are multiples of chunks, and `dbias` one for each group.
    unsafe { gpu.launch(&kernel, [columns.div_ceil(32) as u32, groups.len() as u32, 1], 1024, 0, &args) }
}

pub(super) fn grouped_bias_dots(
    gpu: &CudaDevice,
    dy: &Tensor,
    bias: &Tensor,
    groups: &Groups,
    dots: &mut Tensor,
) -> Result<()> {
    let [rows, columns] = dy.dims("grouped_bias_dots: dy")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(dy.dtype())?, entry: "grouped_bias_dots" };
    let pointers = [dots.device_ptr_mut(), dy.device_ptr(), bias.device_ptr()].map(Arg::Ptr);
    let args = [pointers.as_slice(), &of_groups(groups), &[Arg::I32(columns as i32)]].concat();
    // SAFETY: a block for each row of `dy`, and an element of `dots`; `bias` has a row for each group, of the same type.
    unsafe { gpu.launch(&kernel, [rows.max(1) as u32, 1, 1], BLOCK, 0, &args) }
}
