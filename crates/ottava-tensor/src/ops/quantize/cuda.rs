use super::{CurrentScaling, Fp8Output};
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, Defines, kernel_source};
use crate::quantized::QuantizedTensor;
use crate::{DType, Result, Tensor};

kernel_source!(SOURCE, "quantize", "destination.cuh");

pub(crate) const VARIANTS: &[Defines] = &[
    &[("X", "f32"), ("FORMAT", "e4m3")],
    &[("X", "f32"), ("FORMAT", "e5m2")],
    &[("X", "f16"), ("FORMAT", "e4m3")],
    &[("X", "f16"), ("FORMAT", "e5m2")],
    &[("X", "bf16"), ("FORMAT", "e4m3")],
    &[("X", "bf16"), ("FORMAT", "e5m2")],
];

/// Side of the tiles in `destination.cuh`.
const TILE: usize = 128;

/// Shared memory of a tile of codes.
pub(in crate::ops) const TILE_BYTES: u32 = (TILE * TILE) as u32;

/// The defines for values of the type of `x` on their way to codes of `format`.
pub(in crate::ops) fn fp8_variant(x: &Tensor, format: DType) -> Result<Defines> {
    let storage = launch::storage(x.dtype())?[0].1;
    let format = if format == DType::E4M3 { "e4m3" } else { "e5m2" };
    Ok(VARIANTS.iter().find(|v| v[0].1 == storage && v[1].1 == format).expect("all pairs are listed"))
}

/// The grid of tiles over a matrix, with `side` of them per block along the columns.
pub(in crate::ops) fn tiles(rows: usize, columns: usize, side: usize) -> [u32; 3] {
    let padded = QuantizedTensor::padded;
    [padded(columns).div_ceil(TILE * side).max(1) as u32, padded(rows).div_ceil(TILE).max(1) as u32, 1]
}

/// The arguments `DESTINATION` of a kernel, then `more`. They name as much memory as the sizes among them say: `prepare`
/// allocated it, and checked the statistics and the scale.
pub(in crate::ops) fn destination(out: &mut QuantizedTensor, to: &mut Fp8Output, more: &[Arg]) -> Vec<Arg> {
    let scale = super::given(to).expect("`prepare` made sure of it");
    let pointer = |t: &mut Option<Tensor>| Arg::Ptr(t.as_mut().map_or(0, Tensor::device_ptr_mut));
    let (slot, statistics) = (to.slot as u64, &mut to.statistics);
    let mut args = vec![
        pointer(&mut out.codes),
        pointer(&mut out.transposed),
        Arg::Ptr(out.scale_inv.device_ptr_mut()),
        Arg::Ptr(statistics.amax.device_ptr_mut() + 4 * slot),
        Arg::Ptr(statistics.saturated.device_ptr_mut() + 8 * slot),
        Arg::Ptr(statistics.underflowed.device_ptr_mut() + 8 * slot),
        Arg::Ptr(statistics.elements.device_ptr_mut() + 8 * slot),
        Arg::Ptr(scale.device_ptr()),
        Arg::I32(out.rows as i32),
        Arg::I32(out.columns as i32),
        Arg::I32(QuantizedTensor::padded(out.rows) as i32),
        Arg::I32(QuantizedTensor::padded(out.columns) as i32),
    ];
    args.extend_from_slice(more);
    args
}

pub(super) fn quantize(gpu: &CudaDevice, x: &Tensor, out: &mut QuantizedTensor, to: &mut Fp8Output) -> Result<()> {
    let kernel = Kernel { source: &SOURCE, defines: fp8_variant(x, to.format)?, entry: "quantize" };
    let grid = tiles(out.rows, out.columns, 1);
    let args = destination(out, to, &[Arg::Ptr(x.device_ptr())]);
    // SAFETY: `x` is `out.rows · out.columns` elements; the rest is as `destination` says.
    unsafe { gpu.launch(&kernel, grid, BLOCK, 0, &args) }
}

pub(super) fn amax(gpu: &CudaDevice, x: &Tensor, amax: &mut Tensor, entry: usize) -> Result<()> {
    let kernel = Kernel { source: &SOURCE, defines: fp8_variant(x, DType::E4M3)?, entry: "amax" };
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
