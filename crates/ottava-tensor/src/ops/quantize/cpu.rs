use super::{CastStatistics, CurrentScaling};
use crate::element::{Float, Real, with_float};
use crate::fp8::{E4M3, E5M2};
use crate::ops::destination::Seen;
use crate::ops::parallel_rows::{ParallelRows, TASK};
use crate::quantized::QuantizedTensor;
use crate::wide::wide;
use crate::{DType, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

/// Casts into existing buffers, and writes zeros into their padding.
pub(in crate::ops) fn quantize(
    x: &Tensor,
    scale: &Tensor,
    out: &mut QuantizedTensor,
    statistics: &mut CastStatistics,
    slot: usize,
) {
    let scale = scale.host::<f32>()[0];
    out.scale_inv.host_mut()[0] = 1.0 / scale;
    let seen = match (x.dtype(), out.format) {
        (DType::F32, DType::E4M3) => codes::<f32, E4M3>(x, scale, out),
        (DType::F32, _) => codes::<f32, E5M2>(x, scale, out),
        (DType::F16, DType::E4M3) => codes::<f16, E4M3>(x, scale, out),
        (DType::F16, _) => codes::<f16, E5M2>(x, scale, out),
        (_, DType::E4M3) => codes::<bf16, E4M3>(x, scale, out),
        (_, _) => codes::<bf16, E5M2>(x, scale, out),
    };
    seen.add_to(statistics, slot, x.len());
}

/// Returns the scratch bytes: the codes, if only the transpose is kept.
pub(in crate::ops) fn scratch(out: &QuantizedTensor) -> usize {
    if out.codes.is_some() { 0 } else { QuantizedTensor::padded(out.rows) * QuantizedTensor::padded(out.columns) }
}

fn codes<S: Float<Real = f32>, C: Float<Real = f32>>(x: &Tensor, scale: f32, out: &mut QuantizedTensor) -> Seen {
    let (width, padded) = (out.columns.max(1), QuantizedTensor::padded(out.columns).max(1));
    let keep = out.codes.is_some();
    let mut codes = out.codes.take().unwrap_or_else(|| {
        Tensor::empty(x.device(), &[QuantizedTensor::padded(out.rows), padded], out.format)
            .expect("host memory is not refused")
    });
    let values = x.host::<S>();
    let (rows, padding) = codes.host_mut::<C>().split_at_mut(values.len() / width * padded);
    let seen = rows
        .par_rows_mut(padded)
        .zip(values.par_rows(width))
        .map(|(codes, x)| {
            codes[x.len()..].fill(C::store(0.0));
            row(x, scale, codes)
        })
        .reduce(Seen::default, Seen::merge);
    padding.fill(C::store(0.0));
    if let Some(transposed) = &mut out.transposed {
        // Transposes the codes. Values are not cast again.
        crate::ops::transpose::cpu::transpose(&codes, transposed);
    }
    out.codes = keep.then_some(codes);
    seen
}

wide! {
    /// Casts and counts in two loops, because a single loop would not vectorise.
    pub(in crate::ops) fn row[S: Float<Real = f32>, C: Float<Real = f32>](x: &[S], scale: f32, codes: &mut [C]) -> Seen {
        for (code, &x) in codes.iter_mut().zip(x) {
            *code = C::store(x.load() * scale);
        }
        let largest = C::DTYPE.max_finite().expect("an FP8 format has a largest finite value");
        let (mut amax, mut saturated, mut underflowed) = (0u32, 0u32, 0u32);
        for (&code, &x) in bytemuck::cast_slice::<C, u8>(codes).iter().zip(x) {
            let x = x.load();
            // Absolute values have the same order as their bits. NaN, which has the largest bits, is ignored.
            let magnitude = x.to_bits() & 0x7FFF_FFFF;
            let counted = if magnitude > 0x7F80_0000 { 0 } else { magnitude };
            amax = if counted > amax { counted } else { amax };
            saturated += u32::from((x * scale).abs() > largest);
            underflowed += u32::from(magnitude != 0) & u32::from(code & 0x7F == 0);
        }
        Seen { amax: f32::from_bits(amax), saturated: saturated.into(), underflowed: underflowed.into() }
    }
}

pub(in crate::ops) fn amax(x: &Tensor, amax: &mut Tensor, entry: usize) {
    let largest = with_float!(x.dtype(), S => x
        .host::<S>()
        .par_iter()
        .with_min_len(TASK)
        .map(|x| (x.load().to_f64() as f32).abs())
        .reduce(|| 0.0, f32::max));
    let amax = &mut amax.host_mut::<f32>()[entry];
    *amax = amax.max(largest);
}

/// Returns the scale of current scaling. A quotient that overflows F32 becomes `bound`.
pub(in crate::ops) fn current_scale(amax: f32, largest: f32, bound: f32, how: CurrentScaling) -> f32 {
    let amax = if amax < how.epsilon { how.epsilon } else { amax };
    if amax == 0.0 || !amax.is_finite() {
        return 1.0;
    }
    let scale = largest / amax;
    let scale = if scale.is_finite() { scale } else { bound };
    if how.power_of_two { f32::from_bits(scale.to_bits() & 0x7F80_0000) } else { scale }
}
