//! FP8 quantization with per-tensor scales, and measurement of amaxes. Per-row and per-block scales are in `blocks`.

pub(super) mod blocks;
pub(super) mod cpu;
pub(super) mod cuda;
mod small_blocks;
#[cfg(test)]
mod tests;

use super::destination::{CastScale, CastStatistics, CodeCopies, CurrentScaling, Fp8Output, Output, Produced};
use super::{cast, expect_compute};
use crate::granularity::Granularity;
use crate::ops::dispatch::dispatch;
use crate::quantized::QuantizedTensor;
use crate::{DType, Device, Error, Result, Tensor};

pub(super) use cuda::VARIANTS;
pub(super) use cuda::{
    CAST_EIGHTS, Producer, ROW_EIGHTS, RowKernels, destination, produce, produce_rows, quantize_scaled, tile_bytes,
    tiles,
};

/// Casts `x` `[R, C]` (F32, F16 or BF16) to FP8. Each code is `satcast(float(x) · scale)`: the product is rounded once, and the cast rounds once.
/// `scale_inv = 1 / scale`.
///
/// `scale` is F32 `[1]`. Padding has code 0. Updates entry `slot` of `statistics`.
/// Source: Transformer Engine's cast with a given scale; rounding is as in [`crate::fp8`].
pub fn quantize(
    x: &Tensor,
    format: DType,
    scale: &Tensor,
    copies: CodeCopies,
    statistics: &mut CastStatistics,
    slot: usize,
) -> Result<QuantizedTensor> {
    Fp8Output { format, scale: CastScale::Given(scale), copies, statistics, slot }.cast(x)
}

impl Fp8Output<'_> {
    /// Casts `x` `[R, C]` (F32, F16 or BF16), a computed value, as [`quantize`] or [`quantize_blocks`](blocks::quantize_blocks) does.
    pub fn cast(mut self, x: &Tensor) -> Result<QuantizedTensor> {
        let [rows, columns] = x.dims("quantize: x")?;
        x.expect_dtype("quantize: x", &[DType::F32, DType::F16, DType::BF16])?;
        let mut quantized = prepare(&self, x.device(), rows, columns)?;
        cast_into(x, &mut quantized, &mut self)?;
        Ok(quantized)
    }
}

impl Output<'_> {
    /// Applies the output to a computed value. This is the reference, and the fallback for shapes without a fused kernel.
    pub(super) fn apply(self, value: Tensor) -> Result<Produced> {
        match self {
            Output::Plain => Ok(Produced::Plain(value)),
            Output::Amax { amax } => {
                raise_amax(&value, amax)?;
                Ok(Produced::Measured)
            }
            Output::Fp8(to) => Ok(Produced::Fp8(to.cast(&value)?)),
        }
    }
}

/// Casts in place as [`quantize`] or [`quantize_blocks`](blocks::quantize_blocks): overwrites the copies that `into` has, in its format. `scale` must
/// have the granularity of `into`.
pub fn quantize_into(
    x: &Tensor,
    scale: CastScale,
    into: &mut QuantizedTensor,
    statistics: &mut CastStatistics,
    slot: usize,
) -> Result<()> {
    let mut to = Fp8Output { format: into.format, scale, copies: CodeCopies::Both, statistics, slot };
    expect_into(x, into, &to)?;
    cast_into(x, into, &mut to)
}

/// Casts in place as [`quantize_into`], but first rounds `x`, which is F32, to `dtype` (F16 or BF16). `scale` is a per-tensor scale.
pub fn quantize_rounded_into(
    x: &Tensor,
    dtype: DType,
    scale: &Tensor,
    into: &mut QuantizedTensor,
    statistics: &mut CastStatistics,
    slot: usize,
) -> Result<()> {
    x.expect_dtype("quantize_rounded_into: x", &[DType::F32])?;
    let scale = CastScale::Given(scale);
    let mut to = Fp8Output { format: into.format, scale, copies: CodeCopies::Both, statistics, slot };
    expect_into(x, into, &to)?;
    match x.device() {
        Device::Cuda(gpu) => cuda::quantize_rounded(gpu, x, dtype, into, &mut to),
        _ => cast_into(&cast(x, dtype)?, into, &mut to),
    }
}

/// Checks a cast of `x` to the existing copies of `into`.
fn expect_into(x: &Tensor, into: &QuantizedTensor, to: &Fp8Output) -> Result<()> {
    x.expect("quantize_into: x", &[into.rows, into.columns])?;
    x.expect_dtype("quantize_into: x", &[DType::F32, DType::F16, DType::BF16])?;
    x.expect_device("quantize_into: x", into.scale_inv.device())?;
    let (granularity, there) = (expect_output(to, x.device())?, into.granularity);
    if granularity != there {
        return Err(Error::Value(format!("quantize_into: {granularity} scales cannot replace {there} scales")));
    }
    let shape = match into.codes {
        Some(_) => granularity.of_rows().scales_shape(into.rows, into.columns),
        None => granularity.of_columns().scales_shape(into.columns, into.rows),
    };
    into.scale_inv.expect("quantize_into: scale_inv", &shape)
}

/// Casts `x` into the existing copies of `into`.
pub(super) fn cast_into(x: &Tensor, into: &mut QuantizedTensor, to: &mut Fp8Output) -> Result<()> {
    if let Some(how) = into.granularity.microscaling() {
        return small_blocks::cast_into(x, how, into, to);
    }
    let scratch = match to.scale {
        CastScale::Given(_) => cpu::scratch(into),
        CastScale::Own(..) => blocks::cpu::scratch(x, into),
    };
    let on_cpu = |into: &mut QuantizedTensor, to: &mut Fp8Output| match to.scale {
        CastScale::Given(scale) => cpu::quantize(x, scale, into, to.statistics, to.slot),
        CastScale::Own(_, how) => blocks::cpu::quantize_blocks(x, how, into, to.statistics, to.slot),
    };
    dispatch! { x.device(),
        scratch => scratch,
        cpu => on_cpu(into, to),
        gpu => cuda::quantize(gpu, x, into, to)?,
    }
    Ok(())
}

/// Checks an output for a matrix `[rows, columns]`, and allocates its operand.
pub(super) fn prepare(to: &Fp8Output, device: &Device, rows: usize, columns: usize) -> Result<QuantizedTensor> {
    let granularity = expect_output(to, device)?;
    let codes = |rows, length| Tensor::empty(device, &granularity.codes_shape(rows, length), to.format);
    // 128x128 scales have padding that no thread block writes. An empty matrix has no thread blocks.
    let scales = |granularity: Granularity, rows, length| {
        let unwritten = granularity == Granularity::Blocks128x128 || rows * length == 0;
        let shape = granularity.scales_shape(rows, length);
        if unwritten { Tensor::zeros(device, &shape, DType::F32) } else { Tensor::empty(device, &shape, DType::F32) }
    };
    let of_rows = || scales(granularity.of_rows(), rows, columns);
    let of_columns = || scales(granularity.of_columns(), columns, rows);
    let (copies, of_both) = (to.copies, granularity != Granularity::PerTensor && to.copies == CodeCopies::Both);
    Ok(QuantizedTensor {
        codes: copies.rows().then(|| codes(rows, columns)).transpose()?,
        transposed: copies.columns().then(|| codes(columns, rows)).transpose()?,
        scale_inv: if copies.rows() { of_rows()? } else { of_columns()? },
        transposed_scale_inv: of_both.then(|| of_columns().map(Box::new)).transpose()?,
        granularity,
        format: to.format,
        rows,
        columns,
    })
}

/// Checks an output on `device`, and returns its granularity.
pub(super) fn expect_output(to: &Fp8Output, device: &Device) -> Result<Granularity> {
    match to.scale {
        CastScale::Given(scale) => expect_cast(to.format, scale, to.statistics, to.slot, device)?,
        CastScale::Own(Granularity::PerTensor, _) => {
            return Err(Error::Value("quantize: a per-tensor scale must be given; the cast cannot find it".into()));
        }
        CastScale::Own(granularity, how) => {
            expect_measured(to.format, to.statistics, to.slot, device)?;
            if granularity.has_tensor_scale() && (to.format != DType::E4M3 || how != CurrentScaling::default()) {
                let words = "stores E2M1 values as E4M3 codes, and has no settings of scales";
                return Err(Error::Value(format!("quantize: {granularity} {words}")));
            }
        }
    }
    Ok(to.granularity())
}

/// Checks the scale and the statistics of a cast on `device`.
pub(super) fn expect_cast(
    format: DType,
    scale: &Tensor,
    statistics: &CastStatistics,
    slot: usize,
    device: &Device,
) -> Result<()> {
    scale.expect("quantize: scale", &[1])?;
    scale.expect_dtype("quantize: scale", &[DType::F32])?;
    scale.expect_device("quantize: scale", device)?;
    expect_measured(format, statistics, slot, device)
}

/// Checks the format and the statistics of a cast on `device`.
pub(super) fn expect_measured(format: DType, statistics: &CastStatistics, slot: usize, device: &Device) -> Result<()> {
    statistics.amax.expect_device("quantize: statistics", device)?;
    if !format.is_fp8() {
        return Err(Error::Value(format!("quantize: {format} is not an FP8 format")));
    }
    if slot >= statistics.amax.len() {
        let entries = statistics.amax.len();
        return Err(Error::Value(format!("quantize: slot {slot} of statistics with {entries} entries")));
    }
    Ok(())
}

/// Returns the largest absolute value of `x` as F32 `[1]`. NaN is ignored, as in the hardware's maximum.
pub fn amax(x: &Tensor) -> Result<Tensor> {
    let mut amax = Tensor::zeros(x.device(), &[1], DType::F32)?;
    raise_amax(x, &mut amax)?;
    Ok(amax)
}

/// Raises `amax` F32 `[1]` to the largest absolute value of `x`.
pub fn raise_amax(x: &Tensor, amax: &mut Tensor) -> Result<()> {
    expect_compute("amax: x", x)?;
    expect_amax(amax, x.device())?;
    dispatch! { x.device(),
        cpu => cpu::amax(x, amax, 0),
        gpu => cuda::amax(gpu, x, amax, 0)?,
    }
    Ok(())
}

/// Raises the amax in entry `slot` of `statistics` to the largest absolute value of `x`, as a cast does, but does not cast.
pub fn measure(x: &Tensor, statistics: &mut CastStatistics, slot: usize) -> Result<()> {
    expect_compute("measure: x", x)?;
    expect_measured(DType::E4M3, statistics, slot, x.device())?;
    dispatch! { x.device(),
        cpu => cpu::amax(x, &mut statistics.amax, slot),
        gpu => cuda::amax(gpu, x, &mut statistics.amax, slot)?,
    }
    Ok(())
}

pub(super) fn expect_amax(amax: &Tensor, device: &Device) -> Result<()> {
    amax.expect("amax", &[1])?;
    amax.expect_dtype("amax", &[DType::F32])?;
    amax.expect_device("amax", device)
}

/// Returns the scale of current scaling, F32 `[1]`: `largest finite of format / amax`. Resets `amax` F32 `[1]` to zero.
///
/// An amax of 0, infinity or NaN gives 1. A quotient that overflows F32 gives the largest finite F32.
/// Source: Transformer Engine, `common/recipe/recipe_common.cuh`.
pub fn take_scale(amax: &mut Tensor, format: DType, how: CurrentScaling) -> Result<Tensor> {
    expect_amax(amax, &amax.device().clone())?;
    let largest = largest_finite(format)?;
    let mut scale = amax.empty_like()?;
    dispatch! { amax.device().clone(),
        cpu => {
            let amax = std::mem::take(&mut amax.host_mut::<f32>()[0]);
            scale.host_mut()[0] = cpu::current_scale(amax, largest, f32::MAX, how);
        },
        gpu => cuda::take_scale(&gpu, amax, largest, how, &mut scale)?,
    }
    Ok(scale)
}

pub(super) fn largest_finite(format: DType) -> Result<f32> {
    format.max_finite().ok_or_else(|| Error::Value(format!("{format} needs no scale")))
}
