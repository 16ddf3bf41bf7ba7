use super::{CompressedTensor, GROUP};
use crate::element::Float;
use crate::fp8::{E4M3, E8M0};
use crate::ops::parallel_rows::ParallelRows;
use crate::{DType, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

pub(super) fn compress(x: &Tensor, y: &mut CompressedTensor) {
    match x.dtype() {
        DType::F32 => compress_rows::<f32>(x, y),
        DType::F16 => compress_rows::<f16>(x, y),
        _ => compress_rows::<bf16>(x, y),
    }
}

fn compress_rows<S: Float<Real = f32>>(x: &Tensor, y: &mut CompressedTensor) {
    let (width, groups) = (x.shape()[1].max(1), y.scale_inv.shape()[1].max(1));
    let rows =
        y.codes.host_mut::<E4M3>().par_rows_mut(width).zip(y.scale_inv.host_mut::<E8M0>().par_chunks_mut(groups));
    rows.zip(x.host::<S>().par_rows(width)).for_each(|((codes, scale_inv), x)| {
        for ((codes, scale_inv), x) in codes.chunks_mut(GROUP).zip(scale_inv).zip(x.chunks(GROUP)) {
            // Absolute values have the same order as their bits. NaN is above infinity.
            let amax = x.iter().map(|x| x.load().to_bits() & 0x7FFF_FFFF).fold(0, u32::max);
            *scale_inv = smallest_scale_inv(amax);
            let scale = f32::from_bits((254 - u32::from(scale_inv.0.min(254))) << 23);
            for (code, &x) in codes.iter_mut().zip(x) {
                *code = if *scale_inv == E8M0::NAN { E4M3::default() } else { E4M3::from_f32(x.load() * scale) };
            }
        }
    });
}

/// Returns the biased exponent of the smallest power of two that divides a value with these `bits` to at most 448 = 1.75 · 2⁸. It is the exponent of
/// the value minus 8, plus one if the mantissa exceeds 1.75. A carry of the addition adds this one.
pub(in crate::ops) fn smallest_scale_inv(bits: u32) -> E8M0 {
    match bits {
        0x7F80_0000.. => E8M0::NAN,
        bits => E8M0(((bits + 0x1F_FFFF) >> 23).saturating_sub(8).max(1) as u8),
    }
}

pub(super) fn decompress(x: &CompressedTensor, y: &mut Tensor) {
    match y.dtype() {
        DType::F32 => decompress_rows::<f32>(x, y),
        DType::F16 => decompress_rows::<f16>(x, y),
        _ => decompress_rows::<bf16>(x, y),
    }
}

fn decompress_rows<S: Float<Real = f32>>(x: &CompressedTensor, y: &mut Tensor) {
    let (width, groups) = (y.shape()[1].max(1), x.scale_inv.shape()[1].max(1));
    let rows = x.codes.host::<E4M3>().par_rows(width).zip(x.scale_inv.host::<E8M0>().par_chunks(groups));
    y.host_mut::<S>().par_rows_mut(width).zip(rows).for_each(|(y, (codes, scale_inv))| {
        for ((y, codes), scale_inv) in y.chunks_mut(GROUP).zip(codes.chunks(GROUP)).zip(scale_inv) {
            for (y, code) in y.iter_mut().zip(codes) {
                *y = S::store(code.to_f32() * scale_inv.to_f32());
            }
        }
    });
}
