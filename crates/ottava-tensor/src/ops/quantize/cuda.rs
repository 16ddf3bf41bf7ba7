use super::{CurrentScaling, Fp8Output};
use crate::cuda::{Arg, CudaDevice, DEFAULT_SHARED_BYTES, Entry, Source};
use crate::granularity::{Casting, Granularity};
use crate::ops::declaration::{AddressMut, kernels, pack};
use crate::ops::destination::CastScale;
use crate::ops::groups::{Groups, end_of};
use crate::ops::launch::{self, BLOCK, Defines, TILE};
use crate::quantized::QuantizedTensor;
use crate::stored::ScaledTensor;
use crate::{DType, Error, Feature, Result, Tensor};

kernels! {
    static SOURCE = {
        file: "quantize", headers: ["destination.cuh", "rows.cuh"], constants: [ROW_EIGHTS], variants: VARIANTS
    };
    kernel quantize, quantize_few_rows, quantize_rows(x: *const X; Destination);
    kernel quantize_rounded(x: *const f32; Destination);
    kernel quantize_scaled(x: *const f16, scale_inv: *const f32; Destination);
    kernel amax(amax: *mut f32, x: *const X, n: u64);
    kernel take_scale(scale: *mut f32, amax: *mut f32, largest: f32, epsilon: f32, power_of_two: i32);
}

macro_rules! variants {
    ($($storage:literal)*) => {
        &[$(
            &[("X", $storage), ("FORMAT", "e4m3"), ("SHARING", "PerTensor")],
            &[("X", $storage), ("FORMAT", "e5m2"), ("SHARING", "PerTensor")],
            &[("X", $storage), ("FORMAT", "e4m3"), ("SHARING", "PerRow")],
            &[("X", $storage), ("FORMAT", "e5m2"), ("SHARING", "PerRow")],
            // This variant only measures and writes no codes.
            &[("X", $storage), ("FORMAT", "e4m3"), ("SHARING", "RowAmaxes")],
            &[("X", $storage), ("FORMAT", "e4m3"), ("SHARING", "Blocks1x128")],
            &[("X", $storage), ("FORMAT", "e5m2"), ("SHARING", "Blocks1x128")],
            &[("X", $storage), ("FORMAT", "e4m3"), ("SHARING", "Blocks128x128")],
            &[("X", $storage), ("FORMAT", "e5m2"), ("SHARING", "Blocks128x128")],
            &[("X", $storage), ("FORMAT", "e4m3"), ("SHARING", "MixedBlocks")],
            &[("X", $storage), ("FORMAT", "e5m2"), ("SHARING", "MixedBlocks")],
        )*]
    };
}

/// The variants of kernels that include `destination.cuh`.
pub(in crate::ops) const VARIANTS: &[Defines] = variants!("f32" "f16" "bf16");

/// The maximum number of bytes of shared memory that kernels use in addition to their tiles.
const BYTES_OUTSIDE_TILES: usize = 8 << 10;

/// Returns the value of `SHARING` in `destination.cuh`.
fn sharing(granularity: Granularity) -> Result<&'static str> {
    match granularity.info().casting {
        Casting::Fused(sharing) => Ok(sharing),
        Casting::Separate(_) => Err(Error::Value(format!("producers write no codes with {granularity} scales"))),
    }
}

/// Returns the defines of the kernel that casts values of `dtype` to codes like the codes of `out`. With `measures`, returns the defines of the
/// kernel that only measures the amaxes of rows and columns.
fn variant(dtype: DType, out: &QuantizedTensor, measures: bool) -> Result<Defines> {
    let storage = launch::storage(dtype)?[0].1;
    let (format, sharing) = match (measures, out.format) {
        (true, _) => ("e4m3", "RowAmaxes"),
        (false, DType::E4M3) => ("e4m3", sharing(out.granularity)?),
        (false, _) => ("e5m2", sharing(out.granularity)?),
    };
    let wanted = [("X", storage), ("FORMAT", format), ("SHARING", sharing)];
    Ok(VARIANTS.iter().find(|v| **v == wanted).expect("all are listed"))
}

/// Returns the grid of tiles over a matrix. A block has `side` neighbouring tiles along the columns.
pub(in crate::ops) fn tiles(rows: usize, columns: usize, side: usize) -> [u32; 3] {
    let padded = QuantizedTensor::padded;
    [padded(columns).div_ceil(TILE * side).max(1) as u32, padded(rows).div_ceil(TILE).max(1) as u32, 1]
}

/// Returns the bytes of dynamic shared memory for `tiles`, with the layout of `Tile` in `destination.cuh`. Tiles hold codes, or values of `dtype` if
/// block scales must first be found. Per-row scales are stored next to the codes. A measuring launch needs less.
pub(in crate::ops) fn tile_bytes(tiles: usize, granularity: Granularity, dtype: DType) -> u32 {
    let lines = if granularity == Granularity::PerRow { 2 * TILE } else { 4 };
    let held = granularity.is_blocks();
    let bytes = tiles * (TILE * TILE * if held { dtype.size() } else { 1 } + lines * DType::F32.size());
    // If static and dynamic memory together exceed the default, the launch must request more than the default, or the limit is not raised.
    let asks = bytes + BYTES_OUTSIDE_TILES > DEFAULT_SHARED_BYTES;
    (if asks { bytes.max(DEFAULT_SHARED_BYTES + 16) } else { bytes }) as u32
}

/// A kernel that ends with the epilogue of `destination.cuh`.
pub(in crate::ops) struct Producer<'a> {
    pub source: &'static Source,
    /// The kernel, and all of its arguments before the destinations.
    pub entry: Entry,
    /// The type to which values are rounded before the cast.
    pub dtype: DType,
    pub grid: [u32; 3],
    pub block: u32,
    /// The bytes of dynamic shared memory.
    pub shared: u32,
    /// The groups of the rows. Rows after the last group are neither read nor written.
    pub groups: Option<&'a Groups>,
    /// Raises the amaxes of rows and columns at two addresses, which may be null. `None` if the kernel itself finds the amaxes.
    pub raise: Option<&'a dyn Fn([u64; 2]) -> Result<()>>,
}

/// Launches a kernel that writes `outputs`. `prepare` must have allocated them, and they must have the same granularity.
///
/// # Safety
/// The inputs must fulfil the contract of [`CudaDevice::launch`].
pub(in crate::ops) unsafe fn produce(
    gpu: &CudaDevice,
    how: Producer,
    outputs: &mut [(&mut QuantizedTensor, &mut Fp8Output)],
) -> Result<()> {
    let out = &outputs[0].0;
    let granularity = out.granularity;
    if granularity != Granularity::PerTensor && out.rows * out.columns == 0 {
        return Ok(());
    }
    let device = out.scale_inv.device().clone();
    let (amaxes, casts) = (variant(how.dtype, out, true)?, variant(how.dtype, out, false)?);
    let mut entry = how.entry;
    if granularity != Granularity::PerRow {
        for (out, to) in outputs {
            entry.args.extend(destination(out, to, how.groups, [0; 2], how.dtype));
        }
        let casts = how.source.kernel(casts, entry);
        // SAFETY: the caller's promise for the inputs, and the promise of `destination`.
        return unsafe { gpu.launch(&casts, how.grid, how.block, how.shared) };
    }
    // Per-row scales need whole rows and columns, so one launch finds the amaxes and one writes the codes.
    let sizes = |out: &QuantizedTensor| {
        let of = |copy: &Option<Tensor>, n| copy.as_ref().map_or(0, |_| QuantizedTensor::padded(n));
        [of(&out.codes, out.rows), of(&out.transposed, out.columns)]
    };
    let all = outputs.iter().flat_map(|(out, _)| sizes(out)).sum();
    let mut measured = Tensor::zeros(&device, &[all], DType::F32)?;
    let mut at = measured.device_ptr_mut();
    for (out, to) in outputs {
        let places = sizes(out).map(|n| {
            let place = if n > 0 { at } else { 0 };
            at += (n * DType::F32.size()) as u64;
            place
        });
        entry.args.extend(destination(out, to, how.groups, places, how.dtype));
        if let Some(raise) = how.raise {
            raise(places)?;
        }
    }
    if how.raise.is_none() {
        let amaxes = how.source.kernel(amaxes, entry.clone());
        // SAFETY: as above; the amaxes have one element per padded row or column.
        unsafe { gpu.launch(&amaxes, how.grid, how.block, how.shared)? };
    }
    let casts = how.source.kernel(casts, entry);
    // SAFETY: as above.
    unsafe { gpu.launch(&casts, how.grid, how.block, how.shared) }
}

/// The maximum number of threads per block.
const MOST_THREADS: usize = 1024;
/// The number of eights per thread for many rows (`rows.cuh`). With four, a multiprocessor holds too few rows.
pub(in crate::ops) const ROW_EIGHTS: usize = 3;
/// The maximum number of eights in a row that a cluster casts.
const MOST_EIGHTS: usize = 4096;
/// The number of eights per block in [`produce_rows`] if the kernel only casts. With fewer eights, the cluster barrier takes more time than the split
/// saves.
pub(in crate::ops) const CAST_EIGHTS: usize = 512;
/// A matrix has few rows if it has at most [`FEW_ROWS`] rows or at most [`FEW_ELEMENTS`] elements.
const FEW_ROWS: usize = 128;
const FEW_ELEMENTS: usize = 1 << 21;

/// The kernels that end with `cast_row`.
#[derive(Clone, Copy)]
pub(in crate::ops) struct RowKernels {
    /// The kernel for few rows (one eight per thread), and the maximum number of eights per block. A longer row is split over a cluster.
    pub few: (&'static str, usize),
    /// The kernel for many rows.
    pub many: Option<&'static str>,
}

impl RowKernels {
    /// Returns whether [`produce_rows`] can write `out` from `x`. It can if `out` has per-row scales without a transposed copy, and if rows of `x`
    /// are aligned eights that fit in the registers of threads.
    pub fn fit(self, gpu: &CudaDevice, out: &QuantizedTensor, x: &Tensor) -> Result<bool> {
        let most = if gpu.has(Feature::Clusters)? { MOST_EIGHTS } else { ROW_EIGHTS * MOST_THREADS };
        Ok(out.granularity == Granularity::PerRow
            && out.transposed.is_none()
            && (self.many.is_some() || has_few_rows(out))
            && out.columns.is_multiple_of(8)
            && out.columns <= most * 8
            && launch::aligned(&[x]))
    }

    /// Returns the kernel for `out`, and the blocks and threads per row.
    fn choose(self, gpu: &CudaDevice, out: &QuantizedTensor) -> Result<(&'static str, Row)> {
        let (eights, (few, of_block)) = (QuantizedTensor::padded(out.columns) / 8, self.few);
        let row = Row::of_few(eights, of_block);
        Ok(match self.many {
            Some(many) if !has_few_rows(out) || row.blocks > 1 && !gpu.has(Feature::Clusters)? => {
                (many, Row::of_many(eights))
            }
            _ => (few, row),
        })
    }
}

fn has_few_rows(out: &QuantizedTensor) -> bool {
    out.rows <= FEW_ROWS || out.rows * out.columns <= FEW_ELEMENTS
}

/// The number of blocks per row, and the number of threads per block, for `cast_row` in `rows.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
    blocks: u32,
    threads: u32,
}

impl Row {
    /// Returns the shape for few rows: one eight per thread. A row of more than `of_block` eights is split over up to eight blocks, because one
    /// multiprocessor would limit it.
    fn of_few(eights: usize, of_block: usize) -> Row {
        Row::new(eights, eights.div_ceil(of_block).next_power_of_two().min(8), 1)
    }

    /// Returns the shape for many rows of `eights`.
    fn of_many(eights: usize) -> Row {
        Row::new(eights, eights.div_ceil(ROW_EIGHTS * MOST_THREADS).next_power_of_two(), ROW_EIGHTS)
    }

    fn new(eights: usize, blocks: usize, of_thread: usize) -> Row {
        let threads = eights.div_ceil(blocks * of_thread).next_multiple_of(32);
        Row { blocks: blocks as u32, threads: threads as u32 }
    }
}

/// Launches one of the `kernels` of `source`. `entry` is the entry of any of these kernels, with their inputs. Rows after the last of `groups` are
/// neither read nor written.
///
/// # Safety
/// The inputs must fulfil the contract of [`CudaDevice::launch_early`].
pub(in crate::ops) unsafe fn produce_rows(
    gpu: &CudaDevice,
    source: &'static Source,
    kernels: RowKernels,
    dtype: DType,
    entry: Entry,
    (out, to): (&mut QuantizedTensor, &mut Fp8Output),
    groups: Option<&Groups>,
) -> Result<()> {
    if out.rows * out.columns == 0 {
        return Ok(());
    }
    let (name, Row { blocks, threads }) = kernels.choose(gpu, out)?;
    let defines = variant(dtype, out, false)?;
    let args = [&entry.args[..], &destination(out, to, groups, [0; 2], dtype)].concat();
    let kernel = source.kernel(defines, Entry { name, args });
    let grid = [QuantizedTensor::padded(out.rows) as u32 * blocks, 1, 1];
    // SAFETY: the caller's promise for the inputs, and the promise of `destination`; the blocks of each padded row have threads for its columns.
    unsafe { gpu.launch_early_in_clusters(&kernel, grid, blocks, threads, 0) }
}

fn address(t: &mut Option<Tensor>) -> Arg {
    Arg::Ptr(t.as_mut().map_or(0, Tensor::device_ptr_mut))
}

/// Returns the `Destination` of `destination.cuh` as consecutive 64-bit arguments. `prepare` has allocated its memory and checked statistics and
/// scale.
pub(in crate::ops) fn destination(
    out: &mut QuantizedTensor,
    to: &mut Fp8Output,
    groups: Option<&Groups>,
    amaxes: [u64; 2],
    dtype: DType,
) -> [Arg; 17] {
    let (scale, how) = match to.scale {
        CastScale::Given(scale) => (scale.device_ptr(), CurrentScaling::default()),
        CastScale::Own(_, how) => (0, how),
    };
    let last = |t: Option<&Tensor>| t.and_then(|t| t.shape().last().copied()).unwrap_or(0) as u32;
    let pitches = pack(last(out.codes.as_ref()), last(out.transposed.as_ref()));
    // If there are only transposed codes, `scale_inv` has the scales of the transposed codes.
    let turned = out.codes.is_none();
    let [of_rows, of_columns] = match &out.transposed_scale_inv {
        Some(transposed) => [Some(&out.scale_inv), Some(&**transposed)],
        None if turned => [None, Some(&out.scale_inv)],
        None => [Some(&out.scale_inv), None],
    };
    let scale_pitches = pack(last(of_rows), last(of_columns));
    let scale_inv = match &mut out.transposed_scale_inv {
        _ if out.granularity == Granularity::PerTensor => [out.scale_inv.device_ptr_mut(), 0],
        Some(transposed) => [out.scale_inv.device_ptr_mut(), transposed.device_ptr_mut()],
        None if turned => [0, out.scale_inv.device_ptr_mut()],
        None => [out.scale_inv.device_ptr_mut(), 0],
    };
    let [amax, saturated, underflowed, elements] = to.statistics.device_ptrs_mut(to.slot).map(Arg::Ptr);
    [
        address(&mut out.codes),
        address(&mut out.transposed),
        Arg::Ptr(scale_inv[0]),
        Arg::Ptr(scale_inv[1]),
        amax,
        saturated,
        underflowed,
        elements,
        Arg::Ptr(scale),
        Arg::Ptr(amaxes[0]),
        Arg::Ptr(amaxes[1]),
        pack(out.rows as u32, out.columns as u32),
        pitches,
        scale_pitches,
        pack(how.epsilon.to_bits(), super::blocks::bound(dtype).to_bits()),
        Arg::U64(how.power_of_two.into()),
        Arg::Ptr(end_of(groups).0),
    ]
}

const ROW_KERNELS: RowKernels = RowKernels { few: ("quantize_few_rows", CAST_EIGHTS), many: Some("quantize_rows") };

pub(in crate::ops) fn quantize(
    gpu: &CudaDevice,
    x: &Tensor,
    out: &mut QuantizedTensor,
    to: &mut Fp8Output,
) -> Result<()> {
    // SAFETY: `x` has `out.rows · out.columns` elements of its type.
    unsafe {
        match ROW_KERNELS.fit(gpu, out, x)? {
            true => produce_rows(gpu, &SOURCE, ROW_KERNELS, x.dtype(), kernel::quantize_rows(x), (out, to), None),
            false => cast(gpu, kernel::quantize(x), x.dtype(), out, to),
        }
    }
}

/// Casts F32 values that are first rounded to `dtype`.
pub(super) fn quantize_rounded(
    gpu: &CudaDevice,
    x: &Tensor,
    dtype: DType,
    out: &mut QuantizedTensor,
    to: &mut Fp8Output,
) -> Result<()> {
    // SAFETY: `x` has `out.rows · out.columns` F32 elements.
    unsafe { cast(gpu, kernel::quantize_rounded(x), dtype, out, to) }
}

/// Casts scaled F16 values that are first rounded to `dtype`.
pub(in crate::ops) fn quantize_scaled(
    gpu: &CudaDevice,
    x: &ScaledTensor,
    dtype: DType,
    out: &mut QuantizedTensor,
    to: &mut Fp8Output,
) -> Result<()> {
    // SAFETY: `x` has `out.rows · out.columns` F16 elements and one scale.
    unsafe { cast(gpu, kernel::quantize_scaled(&x.values, &x.scale_inv), dtype, out, to) }
}

/// Launches a kernel that casts a matrix of `dtype`.
///
/// # Safety
/// The inputs must fulfil the contract of [`CudaDevice::launch`].
unsafe fn cast(
    gpu: &CudaDevice,
    entry: Entry,
    dtype: DType,
    out: &mut QuantizedTensor,
    to: &mut Fp8Output,
) -> Result<()> {
    let how = Producer {
        source: &SOURCE,
        entry,
        dtype,
        grid: tiles(out.rows, out.columns, 1),
        block: BLOCK,
        shared: tile_bytes(1, out.granularity, dtype),
        groups: None,
        raise: None,
    };
    // SAFETY: the caller's promise.
    unsafe { produce(gpu, how, &mut [(out, to)]) }
}

/// Returns the first variant for the type of `x`.
fn amax_variant(x: &Tensor) -> Result<Defines> {
    let storage = launch::storage(x.dtype())?[0];
    Ok(VARIANTS.iter().find(|v| v[0] == storage).expect("all are listed"))
}

pub(super) fn amax(gpu: &CudaDevice, x: &Tensor, amax: &mut Tensor, entry: usize) -> Result<()> {
    let at = amax.device_ptr_mut() + 4 * entry as u64;
    let kernel = SOURCE.kernel(amax_variant(x)?, kernel::amax(AddressMut(at), x, x.len()));
    // SAFETY: `amax` has one element at the address, and `x` has `x.len()` elements.
    unsafe { gpu.launch(&kernel, launch::readers(gpu, x.len().div_ceil(8 * BLOCK as usize)), BLOCK, 0) }
}

pub(super) fn take_scale(
    gpu: &CudaDevice,
    amax: &mut Tensor,
    largest: f32,
    how: CurrentScaling,
    scale: &mut Tensor,
) -> Result<()> {
    let entry = kernel::take_scale(scale, amax, largest, how.epsilon, how.power_of_two);
    let kernel = SOURCE.kernel(VARIANTS[0], entry);
    // SAFETY: both tensors have one element.
    unsafe { gpu.launch(&kernel, [1, 1, 1], 1, 0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the limits of `cast_row` and `row_amax` in `rows.cuh`.
    #[test]
    fn every_row_has_threads_for_its_eights() {
        for eights in (2..=MOST_EIGHTS).step_by(2) {
            for of_block in [256, CAST_EIGHTS] {
                let Row { blocks, threads } = Row::of_few(eights, of_block);
                assert!((blocks * threads) as usize >= eights, "{eights}");
                assert!([1, 2, 4, 8].contains(&blocks) && threads <= 512 && threads.is_multiple_of(32), "{eights}");
            }
            let Row { blocks, threads } = Row::of_many(eights);
            assert!((blocks * threads) as usize * ROW_EIGHTS >= eights && threads.is_multiple_of(32), "{eights}");
            // Only a cluster has more than one block.
            assert!(threads <= 1024 && blocks <= if eights <= ROW_EIGHTS * MOST_THREADS { 1 } else { 2 }, "{eights}");
        }
        assert_eq!(Row::of_few(1024, 1024), Row { blocks: 1, threads: 1024 });
        // The hidden size and the feed-forward size of Llama-3-8B.
        assert_eq!(Row::of_few(4096 / 8, CAST_EIGHTS), Row { blocks: 1, threads: 512 });
        assert_eq!(Row::of_few(14336 / 8, 256), Row { blocks: 8, threads: 224 });
        assert_eq!(Row::of_many(14336 / 8), Row { blocks: 1, threads: 608 });
    }
}
