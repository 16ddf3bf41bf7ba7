use super::{CurrentScaling, Fp8Output};
use crate::cuda::{Arg, CudaDevice, Kernel, Source};
use crate::ops::destination::CastScale;
use crate::ops::launch::{self, BLOCK, Defines, kernel_source};
use crate::quantized::{Granularity, QuantizedTensor};
use crate::stored::Scaled;
use crate::{DType, Error, Result, Tensor};

kernel_source!(SOURCE, "quantize", "destination.cuh");

macro_rules! variants {
    ($($storage:literal)*) => {
        &[$(
            &[("X", $storage), ("FORMAT", "e4m3"), ("SHARING", "PerTensor")],
            &[("X", $storage), ("FORMAT", "e5m2"), ("SHARING", "PerTensor")],
            &[("X", $storage), ("FORMAT", "e4m3"), ("SHARING", "PerRow")],
            &[("X", $storage), ("FORMAT", "e5m2"), ("SHARING", "PerRow")],
            &[("X", $storage), ("FORMAT", "e4m3"), ("SHARING", "Blocks1x128")],
            &[("X", $storage), ("FORMAT", "e5m2"), ("SHARING", "Blocks1x128")],
            &[("X", $storage), ("FORMAT", "e4m3"), ("SHARING", "Blocks128x128")],
            &[("X", $storage), ("FORMAT", "e5m2"), ("SHARING", "Blocks128x128")],
        )*]
    };
}

/// What `destination.cuh` is compiled with.
pub(crate) const VARIANTS: &[Defines] = variants!("f32" "f16" "bf16");

/// Side of the tiles in `destination.cuh`.
const TILE: usize = 128;

/// Shared memory that every launch may use without asking for more, and what kernels use of it beside their tiles at most.
const SHARED_BYTES: usize = 48 << 10;
const BESIDE_TILES: usize = 8 << 10;

/// `SHARING` in `destination.cuh`.
fn sharing(granularity: Granularity) -> Result<&'static str> {
    Ok(match granularity {
        Granularity::PerTensor => "PerTensor",
        Granularity::PerRow => "PerRow",
        Granularity::Blocks1x128 => "Blocks1x128",
        Granularity::Blocks128x128 => "Blocks128x128",
        Granularity::Mx => {
            return Err(Error::Value("MX is emulated on the CPU; Hopper has no MX products".into()));
        }
    })
}

/// The defines for values of a type on their way to codes like those of `out`.
fn variant(dtype: DType, out: &QuantizedTensor) -> Result<Defines> {
    let storage = launch::storage(dtype)?[0].1;
    let format = if out.format == DType::E4M3 { "e4m3" } else { "e5m2" };
    let wanted = [("X", storage), ("FORMAT", format), ("SHARING", sharing(out.granularity)?)];
    Ok(VARIANTS.iter().find(|v| **v == wanted).expect("all are listed"))
}

/// The grid of tiles over a matrix, with `side` of them per block along the columns.
pub(in crate::ops) fn tiles(rows: usize, columns: usize, side: usize) -> [u32; 3] {
    let padded = QuantizedTensor::padded;
    [padded(columns).div_ceil(TILE * side).max(1) as u32, padded(rows).div_ceil(TILE).max(1) as u32, 1]
}

/// Dynamic shared memory of `tiles`, which hold codes, or values of `dtype` until there are scales.
pub(in crate::ops) fn tile_bytes(tiles: usize, granularity: Granularity, dtype: DType) -> u32 {
    let held = granularity != Granularity::PerTensor;
    let bytes = tiles * TILE * TILE * if held { dtype.size() } else { 1 };
    // What is asked for must be more than needs no asking.
    let asks = bytes + BESIDE_TILES > SHARED_BYTES;
    (if asks { bytes.max(SHARED_BYTES + 16) } else { bytes }) as u32
}

/// A kernel that ends in `destination.cuh`.
pub(in crate::ops) struct Producer<'a> {
    /// Its text, after `destination.cuh`, and its name in there.
    pub source: &'static Source,
    pub entry: &'static str,
    /// The type that values are rounded to.
    pub dtype: DType,
    pub grid: [u32; 3],
    pub block: u32,
    /// Dynamic shared memory.
    pub shared: u32,
    /// All arguments but the destinations, which are the last.
    pub inputs: &'a [Arg],
}

/// Launches a kernel that writes `outputs`, all of the granularity of the first, which `prepare` allocated.
///
/// # Safety
/// As for [`CudaDevice::launch`], as far as the inputs go.
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
    let kernel = Kernel { source: how.source, defines: variant(how.dtype, out)?, entry: how.entry };
    let mut amaxes = Vec::new();
    for (out, _) in &*outputs {
        amaxes.push(Amaxes::new(out)?);
    }
    // Scales of rows and columns want whole ones: a launch for their amaxes, and one for the codes.
    let launches: &[bool] = if granularity == Granularity::PerRow { &[true, false] } else { &[false] };
    for &measures in launches {
        let mut args = how.inputs.to_vec();
        for ((out, to), amaxes) in outputs.iter_mut().zip(&mut amaxes) {
            args.extend(destination(out, to, amaxes, how.dtype, measures));
        }
        // SAFETY: the caller's promise for the inputs, and that of `destination`.
        unsafe { gpu.launch(&kernel, how.grid, how.block, how.shared, &args)? };
    }
    Ok(())
}

/// The amaxes of the rows of a matrix and of its columns, those that give scales.
struct Amaxes([Option<Tensor>; 2]);

impl Amaxes {
    fn new(out: &QuantizedTensor) -> Result<Amaxes> {
        let zeros = |copy: &Option<Tensor>, n: usize| match (copy, out.granularity) {
            (Some(codes), Granularity::PerRow) => {
                Tensor::zeros(codes.device(), &[QuantizedTensor::padded(n)], DType::F32).map(Some)
            }
            _ => Ok(None),
        };
        Ok(Amaxes([zeros(&out.codes, out.rows)?, zeros(&out.transposed, out.columns)?]))
    }
}

fn address(t: &mut Option<Tensor>) -> Arg {
    Arg::Ptr(t.as_mut().map_or(0, Tensor::device_ptr_mut))
}

/// Two words of a kernel's struct.
fn two(low: u32, high: u32) -> Arg {
    Arg::U64(u64::from(low) | u64::from(high) << 32)
}

/// `Destination` in `destination.cuh`: its words, which the driver copies from consecutive arguments. They name as much memory as
/// the sizes among them say: `prepare` allocated it, and checked the statistics and the scale.
fn destination(
    out: &mut QuantizedTensor,
    to: &mut Fp8Output,
    amaxes: &mut Amaxes,
    dtype: DType,
    measures: bool,
) -> [Arg; 16] {
    let (scale, how) = match to.scale {
        CastScale::Given(scale) => (scale.device_ptr(), CurrentScaling::default()),
        CastScale::Own(_, how) => (0, how),
    };
    let last = |t: Option<&Tensor>| t.and_then(|t| t.shape().last().copied()).unwrap_or(0) as u32;
    let pitches = two(last(out.codes.as_ref()), last(out.transposed.as_ref()));
    // Where there are only transposed codes, the scales are theirs.
    let turned = out.codes.is_none();
    let [of_rows, of_columns] = match &out.transposed_scale_inv {
        Some(transposed) => [Some(&out.scale_inv), Some(&**transposed)],
        None if turned => [None, Some(&out.scale_inv)],
        None => [Some(&out.scale_inv), None],
    };
    let scale_pitches = two(last(of_rows), last(of_columns));
    let scale_inv = match &mut out.transposed_scale_inv {
        _ if out.granularity == Granularity::PerTensor => [out.scale_inv.device_ptr_mut(), 0],
        Some(transposed) => [out.scale_inv.device_ptr_mut(), transposed.device_ptr_mut()],
        None if turned => [0, out.scale_inv.device_ptr_mut()],
        None => [out.scale_inv.device_ptr_mut(), 0],
    };
    let (slot, statistics) = (to.slot as u64, &mut to.statistics);
    let [codes, transposed] =
        if measures { [Arg::Ptr(0); 2] } else { [address(&mut out.codes), address(&mut out.transposed)] };
    [
        codes,
        transposed,
        Arg::Ptr(scale_inv[0]),
        Arg::Ptr(scale_inv[1]),
        Arg::Ptr(statistics.amax.device_ptr_mut() + 4 * slot),
        Arg::Ptr(statistics.saturated.device_ptr_mut() + 8 * slot),
        Arg::Ptr(statistics.underflowed.device_ptr_mut() + 8 * slot),
        Arg::Ptr(statistics.elements.device_ptr_mut() + 8 * slot),
        Arg::Ptr(scale),
        address(&mut amaxes.0[0]),
        address(&mut amaxes.0[1]),
        two(out.rows as u32, out.columns as u32),
        pitches,
        scale_pitches,
        two(how.epsilon.to_bits(), super::blocks::bound(dtype).to_bits()),
        two(how.power_of_two.into(), measures.into()),
    ]
}

pub(in crate::ops) fn quantize(
    gpu: &CudaDevice,
    x: &Tensor,
    out: &mut QuantizedTensor,
    to: &mut Fp8Output,
) -> Result<()> {
    let how = Producer {
        source: &SOURCE,
        entry: "quantize",
        dtype: x.dtype(),
        grid: tiles(out.rows, out.columns, 1),
        block: BLOCK,
        shared: tile_bytes(1, out.granularity, x.dtype()),
        inputs: &[Arg::Ptr(x.device_ptr())],
    };
    // SAFETY: `x` is `out.rows · out.columns` elements.
    unsafe { produce(gpu, how, &mut [(out, to)]) }
}

/// Of F16 with a scale, rounded to `dtype` before the cast.
pub(in crate::ops) fn quantize_scaled(
    gpu: &CudaDevice,
    x: &Scaled,
    dtype: DType,
    out: &mut QuantizedTensor,
    to: &mut Fp8Output,
) -> Result<()> {
    let how = Producer {
        source: &SOURCE,
        entry: "quantize_scaled",
        dtype,
        grid: tiles(out.rows, out.columns, 1),
        block: BLOCK,
        shared: tile_bytes(1, out.granularity, dtype),
        inputs: &[Arg::Ptr(x.values.device_ptr()), Arg::Ptr(x.scale_inv.device_ptr())],
    };
    // SAFETY: `x` is `out.rows · out.columns` elements of F16, and a scale.
    unsafe { produce(gpu, how, &mut [(out, to)]) }
}

/// Any of the variants for the type of `x` will do.
fn amax_variant(x: &Tensor) -> Result<Defines> {
    let storage = launch::storage(x.dtype())?[0];
    Ok(VARIANTS.iter().find(|v| v[0] == storage).expect("all are listed"))
}

pub(super) fn amax(gpu: &CudaDevice, x: &Tensor, amax: &mut Tensor, entry: usize) -> Result<()> {
    let kernel = Kernel { source: &SOURCE, defines: amax_variant(x)?, entry: "amax" };
    let at = amax.device_ptr_mut() + 4 * entry as u64;
    let args = [Arg::Ptr(at), Arg::Ptr(x.device_ptr()), Arg::U64(x.len() as u64)];
    // SAFETY: `amax` has the entry and `x` `x.len()` elements.
    unsafe { gpu.launch(&kernel, launch::readers(x.len().div_ceil(8 * BLOCK as usize)), BLOCK, 0, &args) }
}

pub(super) fn take_scale(
    gpu: &CudaDevice,
    amax: &mut Tensor,
    largest: f32,
    how: CurrentScaling,
    scale: &mut Tensor,
) -> Result<()> {
    let kernel = Kernel { source: &SOURCE, defines: VARIANTS[0], entry: "take_scale" };
    let args = [
        Arg::Ptr(scale.device_ptr_mut()),
        Arg::Ptr(amax.device_ptr_mut()),
        Arg::F32(largest),
        Arg::F32(how.epsilon),
        Arg::I32(how.power_of_two.into()),
    ];
    // SAFETY: both tensors have one element.
    unsafe { gpu.launch(&kernel, [1, 1, 1], 1, 0, &args) }
}
