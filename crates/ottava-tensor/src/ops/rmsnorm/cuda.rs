use super::{NormKind, NormWeights};
use crate::cuda::CudaDevice;
use crate::ops::declaration::{AddressMut, kernels};
use crate::ops::destination::Fp8Output;
use crate::ops::launch::{self, BLOCK};
use crate::ops::quantize::{self, Producer, RowKernels};
use crate::ops::{CompressedTensor, SavedActivation, bias};
use crate::{DType, Granularity, QuantizedTensor, Result, Tensor};

kernels! {
    table plain(NormKind) = {
        file: "rmsnorm", headers: [], constants: [STRIP], variants: launch::STORAGE,
        (NormKind::Rms) => [],
        (NormKind::RmsPlusOne) => [ADDS_ONE],
        (NormKind::Layer) => [CENTERED],
    };
    table fp8(NormKind) = {
        file: "rmsnorm", headers: ["destination.cuh", "rows.cuh"], constants: [STRIP], variants: quantize::VARIANTS,
        (NormKind::Rms) => [],
        (NormKind::RmsPlusOne) => [ADDS_ONE],
        (NormKind::Layer) => [CENTERED],
    };
    kernel rmsnorm(
        y: *mut X, rstd: *mut f32, amax: *mut f32, x: *const X, weight: *const X, #[CENTERED] bias: *const X, columns: i32, eps: f32
    );
    kernel rmsnorm_amax(
        rstd: *mut f32, amax: *mut f32, row_amax: *mut f32, column_amax: *mut f32, x: *const X, weight: *const X,
        #[CENTERED] bias: *const X, rows: i32, columns: i32, eps: f32
    );
    kernel rmsnorm_backward(
        dx: *mut X, partial: *mut f32, amax: *mut f32, dy: *const X, x: *const X, weight: *const X, rstd: *const f32, residual: *const X,
        rows: i32, columns: i32, depth: i32
    );
    kernel rmsnorm_backward_compressed(
        dx: *mut X, partial: *mut f32, amax: *mut f32, dy: *const X, codes: *const e4m3, scale_inv: *const u8, weight: *const X,
        rstd: *const f32, residual: *const X, rows: i32, columns: i32, depth: i32
    );
    kernel rmsnorm_codes(x: *const X, weight: *const X, #[CENTERED] bias: *const X, rstd: *const f32; Destination);
    kernel rmsnorm_rows(rstd: *mut f32, x: *const X, weight: *const X, #[CENTERED] bias: *const X, eps: f32; Destination);
    kernel rmsnorm_strips(
        rstd: *mut f32, x: *const X, weight: *const X, #[CENTERED] bias: *const X, eps: f32, group_threads: i32; Destination
    );
}

/// One block holds the whole row (up to 1,024 eights), because row sums are reduced within a block.
const ROW_KERNELS: RowKernels = RowKernels { few: ("rmsnorm_rows", 1024), many: None };
/// The number of rows per strip of `rmsnorm_strips`.
const STRIP: usize = 32;

/// Returns the bias of a LayerNorm, which may be null. Kernels of other norms have no such argument.
fn bias_of<'a>(weights: NormWeights<'a>) -> Option<Option<&'a Tensor>> {
    (weights.kind == NormKind::Layer).then_some(weights.bias)
}

fn aligned(x: &Tensor, weights: NormWeights) -> bool {
    launch::aligned(&[x, weights.weight, weights.bias.unwrap_or(x)])
}

/// The maximum number of blocks per multiprocessor in backward, because each block has a partial dweight; and the bytes of shared memory for the
/// prefetched rows of these blocks.
const MOST_PARTS: usize = 4;
const STAGES_BYTES: usize = 216 << 10;

/// Returns the bytes of dynamic shared memory to which LayerNorm prefetches rows (`Ahead` in rmsnorm.cu): 64 bytes per thread for any type. RMSNorm
/// prefetches to registers.
fn prefetched_bytes(kind: NormKind, threads: usize) -> usize {
    match kind {
        NormKind::Rms | NormKind::RmsPlusOne => 0,
        NormKind::Layer => threads * 64,
    }
}

/// Returns the dynamic shared memory plus 16 bytes. If a launch with its static part exceeds 48 KiB, these bytes make it raise the limit.
fn shared_bytes(dynamic: usize) -> u32 {
    dynamic as u32 + 16
}

/// Writes `rstd`, and `y` if given.
pub(super) fn rmsnorm(
    gpu: &CudaDevice,
    x: &Tensor,
    weights: NormWeights,
    eps: f64,
    y: Option<&mut Tensor>,
    rstd: &mut Tensor,
    amax: Option<&mut Tensor>,
) -> Result<()> {
    let [tokens, channels] = x.dims("rmsnorm: x")?;
    let entry = kernel::rmsnorm(y, rstd, amax, x, weights.weight, bias_of(weights), channels, eps);
    let kernel = plain(weights.kind).kernel(launch::storage(x.dtype())?, entry);
    // SAFETY: all matrices have `tokens · channels` elements, weight and bias have `channels`, `amax` has one, and `rstd` has `tokens`, twice as many
    // for a LayerNorm. Each token has a block.
    unsafe { gpu.launch_early(&kernel, [tokens as u32, 1, 1], launch::row_threads(channels, 16), 0) }
}

/// Returns whether a block can keep a row in registers, with eight channels per thread.
pub(super) fn fits_registers(x: &Tensor, weights: NormWeights) -> bool {
    let channels = weights.weight.len();
    channels.is_multiple_of(8) && channels <= 8192 && aligned(x, weights)
}

/// The addresses of amaxes, which may be null.
#[derive(Clone, Copy, Default)]
struct Amaxes {
    all: u64,
    rows: u64,
    columns: u64,
}

/// Computes only `rstd` and the amax. Requires [`fits_registers`].
pub(super) fn rmsnorm_amax(
    gpu: &CudaDevice,
    x: &Tensor,
    weights: NormWeights,
    eps: f64,
    rstd: &mut Tensor,
    amax: &mut Tensor,
) -> Result<()> {
    let amaxes = Amaxes { all: amax.device_ptr_mut(), ..Amaxes::default() };
    // SAFETY: `amax` has one element, and the op has allocated `rstd`.
    unsafe { raise_amaxes(gpu, x, weights, eps, rstd.device_ptr_mut(), amaxes) }
}

/// Computes `rstd` and raises amaxes.
///
/// # Safety
/// Addresses in `amaxes` are null, or have one float, one per row and one per column. `rstd` has one float per row, two for a LayerNorm.
unsafe fn raise_amaxes(
    gpu: &CudaDevice,
    x: &Tensor,
    weights: NormWeights,
    eps: f64,
    rstd: u64,
    amaxes: Amaxes,
) -> Result<()> {
    let [tokens, channels] = x.dims("rmsnorm: x")?;
    let (threads, rows_at_a_time) = (launch::row_threads(channels, 8), 8 / x.dtype().size());
    let at_once = gpu.sm_count() * (1024 / threads as usize);
    let [rstd, all, rows, by_column] = [rstd, amaxes.all, amaxes.rows, amaxes.columns].map(AddressMut);
    let bias = bias_of(weights);
    let entry = kernel::rmsnorm_amax(rstd, all, rows, by_column, x, weights.weight, bias, tokens, channels, eps);
    let kernel = plain(weights.kind).kernel(launch::storage(x.dtype())?, entry);
    let of_columns = if amaxes.columns == 0 { 0 } else { channels * DType::F32.size() };
    let shared = shared_bytes(prefetched_bytes(weights.kind, threads as usize) + of_columns);
    let blocks = tokens.div_ceil(rows_at_a_time).min(at_once) as u32;
    // SAFETY: `x` has `tokens · channels` elements, weight and bias have `channels`, and each eight channels have a thread. The caller guarantees the
    // rest.
    unsafe { gpu.launch(&kernel, [blocks, 1, 1], threads, shared) }
}

/// Computes `rstd`, then casts the normalised `x`.
pub(super) fn rmsnorm_codes(
    gpu: &CudaDevice,
    x: &Tensor,
    weights: NormWeights,
    eps: f64,
    rstd: &mut Tensor,
    out: &mut QuantizedTensor,
    to: &mut Fp8Output,
) -> Result<()> {
    if fits_registers(x, weights) && ROW_KERNELS.fit(gpu, out, x)? {
        let entry = kernel::rmsnorm_rows(rstd, x, weights.weight, bias_of(weights), eps);
        // SAFETY: `x` has `out.rows · out.columns` elements, the op has allocated `rstd`, and weight and bias have a value per column.
        return unsafe {
            quantize::produce_rows(gpu, fp8(weights.kind), ROW_KERNELS, x.dtype(), entry, (out, to), None)
        };
    }
    // For per-row scales of rows and columns, the pass for `rstd` also finds the amaxes.
    let rstd_at = rstd.device_ptr_mut();
    let raise = |[rows, columns]: [u64; 2]| {
        // SAFETY: the op has allocated `rstd`, and the amaxes of `produce` have one element per row and column.
        unsafe { raise_amaxes(gpu, x, weights, eps, rstd_at, Amaxes { all: 0, rows, columns }) }
    };
    let by_rows = out.granularity == Granularity::PerRow && fits_registers(x, weights);
    if !by_rows {
        rmsnorm(gpu, x, weights, eps, None, rstd, None)?;
    }
    let how = Producer {
        source: fp8(weights.kind),
        entry: kernel::rmsnorm_codes(x, weights.weight, bias_of(weights), &*rstd),
        dtype: x.dtype(),
        grid: quantize::tiles(out.rows, out.columns, 1),
        block: BLOCK,
        shared: quantize::tile_bytes(1, out.granularity, x.dtype()),
        groups: None,
        raise: if by_rows { Some(&raise) } else { None },
    };
    // SAFETY: `x` has `out.rows · out.columns` elements, the op has allocated `rstd`, and weight and bias have a value per column.
    unsafe { quantize::produce(gpu, how, &mut [(out, to)]) }
}

/// The maximum number of bytes of dynamic shared memory for [`rmsnorm_strips`].
const STRIP_BYTES: usize = 224 << 10;

/// Returns the threads of a group, the threads of a block, and the bytes of dynamic shared memory of [`rmsnorm_strips`].
fn strip_launch(x: &Tensor, kind: NormKind, transposed: bool) -> (usize, usize, usize) {
    let columns = x.shape()[1];
    let group = columns.div_ceil(8).next_multiple_of(32);
    let groups = [8, 4, 2].into_iter().find(|groups| groups * group <= 1024).unwrap_or(1);
    let codes = if transposed { columns.next_multiple_of(128) * STRIP } else { 0 };
    let parameters = if kind == NormKind::Layer { 2 * columns * x.dtype().size() } else { 0 };
    (group, groups * group, codes + prefetched_bytes(kind, groups * group) + parameters)
}

/// Returns whether [`rmsnorm_strips`] can replace [`rmsnorm`] and [`rmsnorm_codes`] by one pass: strips must fit in shared memory, and there must be
/// enough strips to fill the GPU.
pub(super) fn fits_strips(gpu: &CudaDevice, x: &Tensor, weights: NormWeights) -> bool {
    let (rows, columns) = (x.shape()[0], x.shape()[1]);
    let (_, _, shared) = strip_launch(x, weights.kind, true);
    columns.is_multiple_of(QuantizedTensor::PAD)
        && shared <= STRIP_BYTES
        && 2 * rows.div_ceil(STRIP) > gpu.sm_count()
        && aligned(x, weights)
}

pub(super) fn rmsnorm_strips(
    gpu: &CudaDevice,
    x: &Tensor,
    weights: NormWeights,
    eps: f64,
    rstd: &mut Tensor,
    out: &mut QuantizedTensor,
    to: &mut Fp8Output,
) -> Result<()> {
    let (group, threads, shared) = strip_launch(x, weights.kind, out.transposed.is_some());
    let at_once = gpu.sm_count() * (1024 / threads).min(STRIP_BYTES / shared.max(1)).max(1);
    let how = Producer {
        source: fp8(weights.kind),
        entry: kernel::rmsnorm_strips(rstd, x, weights.weight, bias_of(weights), eps, group),
        dtype: x.dtype(),
        grid: [out.rows.div_ceil(STRIP).min(at_once) as u32, 1, 1],
        block: threads as u32,
        shared: shared_bytes(shared),
        groups: None,
        raise: None,
    };
    // SAFETY: `x` has `out.rows · out.columns` elements, the op has allocated `rstd`, weight and bias have a value per column, and shared memory has
    // room for the data that the kernel keeps in it. `fits_strips` holds.
    unsafe { quantize::produce(gpu, how, &mut [(out, to)]) }
}

/// The inputs of backward.
pub(super) struct Backward<'a> {
    pub dy: &'a Tensor,
    pub x: &'a SavedActivation,
    pub weights: NormWeights<'a>,
    /// The statistics of forward; for a LayerNorm, they include means.
    pub statistics: &'a Tensor,
    pub residual: Option<&'a Tensor>,
}

pub(super) fn norm_backward(
    gpu: &CudaDevice,
    from: Backward,
    dx: &mut Tensor,
    dweight: &mut Tensor,
    dbias: Option<&mut Tensor>,
    amax: Option<&mut Tensor>,
) -> Result<()> {
    let kind = from.weights.kind;
    let [tokens, channels] = from.dy.dims("norm_backward: dy")?;
    let threads = launch::row_threads(channels, 8);
    let at_once = (1024 / threads as usize).min(MOST_PARTS);
    let parts = tokens.min(gpu.sm_count() * at_once);
    let sums = if kind == NormKind::Layer { 2 } else { 1 };
    let mut partial = Tensor::empty(from.dy.device(), &[sums * parts, channels], DType::F32)?;
    let stage = threads as usize * 8 * from.dy.dtype().size() * if from.residual.is_some() { 3 } else { 2 };
    let depth = (STAGES_BYTES / at_once / stage).clamp(2, 4);
    let Backward { dy, x, weights, statistics, residual } = from;
    let sum = &mut partial;
    let entry = match x {
        SavedActivation::Exact(x) => kernel::rmsnorm_backward(
            dx,
            sum,
            amax,
            dy,
            x,
            weights.weight,
            statistics,
            residual,
            tokens,
            channels,
            depth,
        ),
        SavedActivation::Compressed(CompressedTensor { codes, scale_inv, .. }) => kernel::rmsnorm_backward_compressed(
            dx,
            sum,
            amax,
            dy,
            codes,
            scale_inv,
            weights.weight,
            statistics,
            residual,
            tokens,
            channels,
            depth,
        ),
    };
    let kernel = plain(kind).kernel(launch::storage(dy.dtype())?, entry);
    // SAFETY: all matrices have `tokens · channels` elements, `weight` has `channels`, `statistics` has `tokens` or twice as many, and `amax` has
    // one. `partial`, which is not shared yet, has a row per block and sum. Shared memory has `depth` slots for eight channels of each input per
    // thread.
    unsafe { gpu.launch(&kernel, [parts as u32, 1, 1], threads, shared_bytes(depth * stage))? };
    if let Some(dbias) = dbias {
        bias::add_partial_sums(gpu, &partial.rows(parts, 2 * parts)?, dbias)?;
    }
    bias::add_partial_sums(gpu, &partial.rows(0, parts)?, dweight)
}
