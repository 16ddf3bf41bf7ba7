use super::{CastStatistics, CurrentScaling};
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, Defines, kernel_source};
use crate::quantized::QuantizedTensor;
use crate::{Result, Tensor};

kernel_source!("quantize");

pub(crate) const VARIANTS: &[Defines] = &[
    &[("X", "f32"), ("FORMAT", "e4m3")],
    &[("X", "f32"), ("FORMAT", "e5m2")],
    &[("X", "f16"), ("FORMAT", "e4m3")],
    &[("X", "f16"), ("FORMAT", "e5m2")],
    &[("X", "bf16"), ("FORMAT", "e4m3")],
    &[("X", "bf16"), ("FORMAT", "e5m2")],
];

/// Side of the tiles in `quantize.cu`.
const TILE: usize = 64;

fn variant(x: &Tensor, format: &str) -> Result<Defines> {
    let storage = launch::storage(x.dtype())?[0].1;
    Ok(VARIANTS.iter().find(|v| v[0].1 == storage && v[1].1 == format).expect("all pairs are listed"))
}

pub(super) fn quantize(
    gpu: &CudaDevice,
    x: &Tensor,
    scale: &Tensor,
    out: &mut QuantizedTensor,
    statistics: &mut CastStatistics,
    slot: usize,
) -> Result<()> {
    let (rows, columns) = (QuantizedTensor::padded(out.rows), QuantizedTensor::padded(out.columns));
    let format = if out.format == crate::DType::E4M3 { "e4m3" } else { "e5m2" };
    let kernel = Kernel { source: &SOURCE, defines: variant(x, format)?, entry: "quantize" };
    let pointer = |t: &mut Option<Tensor>| Arg::Ptr(t.as_mut().map_or(0, Tensor::device_ptr_mut));
    let args = [
        pointer(&mut out.codes),
        pointer(&mut out.transposed),
        Arg::Ptr(out.scale_inv.device_ptr_mut()),
        Arg::Ptr(statistics.amax.device_ptr_mut() + 4 * slot as u64),
        Arg::Ptr(statistics.saturated.device_ptr_mut() + 8 * slot as u64),
        Arg::Ptr(statistics.underflowed.device_ptr_mut() + 8 * slot as u64),
        Arg::Ptr(statistics.elements.device_ptr_mut() + 8 * slot as u64),
        Arg::Ptr(x.device_ptr()),
        Arg::Ptr(scale.device_ptr()),
        Arg::I32(out.rows as i32),
        Arg::I32(out.columns as i32),
        Arg::I32(rows as i32),
        Arg::I32(columns as i32),
    ];
    let grid = [columns.div_ceil(TILE).max(1) as u32, rows.div_ceil(TILE).max(1) as u32, 1];
    // SAFETY: the codes are `rows · columns` bytes each, `x` is `out.rows · out.columns` elements, the statistics have a
    // slot `slot`, and scale and scale_inv one element.
    unsafe { gpu.launch(&kernel, grid, BLOCK, 0, &args) }
}

pub(super) fn amax(gpu: &CudaDevice, x: &Tensor, amax: &mut Tensor) -> Result<()> {
    let kernel = Kernel { source: &SOURCE, defines: variant(x, "e4m3")?, entry: "amax" };
    let args = [Arg::Ptr(amax.device_ptr_mut()), Arg::Ptr(x.device_ptr()), Arg::U64(x.len() as u64)];
    // SAFETY: `amax` has one element and `x` `x.len()`.
    unsafe { gpu.launch(&kernel, launch::elements(x.len()), BLOCK, 0, &args) }
}

pub(super) fn current_scale(
    gpu: &CudaDevice,
    amax: &Tensor,
    largest: f32,
    how: CurrentScaling,
    scale: &mut Tensor,
) -> Result<()> {
    let kernel = Kernel { source: &SOURCE, defines: VARIANTS[0], entry: "current_scale" };
    let args = [
        Arg::Ptr(scale.device_ptr_mut()),
        Arg::Ptr(amax.device_ptr()),
        Arg::F32(largest),
        Arg::F32(how.epsilon),
        Arg::I32(how.power_of_two.into()),
    ];
    // SAFETY: both tensors have one element.
    unsafe { gpu.launch(&kernel, [1, 1, 1], 1, 0, &args) }
}
