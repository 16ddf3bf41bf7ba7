use crate::element::Float;
use crate::fp8::{E4M3, E5M2};
use crate::granularity::{Granularity, Shared};
use crate::ops::destination::Seen;
use crate::ops::parallel_rows::ParallelRows;
use crate::ops::quantize::cpu::{current_scale, row};
use crate::ops::transpose::cpu::transpose;
use crate::ops::{CastStatistics, CurrentScaling};
use crate::quantized::QuantizedTensor;
use crate::{DType, Device, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

/// Casts into existing buffers, and writes zeros into their padding.
pub(in crate::ops) fn quantize_blocks(
    x: &Tensor,
    how: CurrentScaling,
    out: &mut QuantizedTensor,
    statistics: &mut CastStatistics,
    slot: usize,
) {
    if x.is_empty() {
        return;
    }
    for codes in out.codes.iter_mut().chain(&mut out.transposed) {
        codes.fill_zero().expect("host memory");
    }
    let seen = match (x.dtype(), out.format) {
        (DType::F32, DType::E4M3) => codes::<f32, E4M3>(x, how, out),
        (DType::F32, _) => codes::<f32, E5M2>(x, how, out),
        (DType::F16, DType::E4M3) => codes::<f16, E4M3>(x, how, out),
        (DType::F16, _) => codes::<f16, E5M2>(x, how, out),
        (_, DType::E4M3) => codes::<bf16, E4M3>(x, how, out),
        (_, _) => codes::<bf16, E5M2>(x, how, out),
    };
    seen.add_to(statistics, slot, x.len());
}

/// Returns the scratch bytes of the transposed copy: the transposed values. For 128x128 blocks, the transposed codes instead, and the codes if they
/// are not kept. Scales are negligible.
pub(in crate::ops) fn scratch(x: &Tensor, out: &QuantizedTensor) -> usize {
    let codes: usize = out.granularity.codes_shape(out.rows, out.columns).iter().product();
    match (out.granularity.of_columns().info().shared, &out.transposed) {
        (_, None) => 0,
        (Shared::Square(_), Some(_)) if out.codes.is_some() && out.granularity.info().copies.is_none() => codes,
        (Shared::Square(_), Some(_)) => 2 * codes,
        (_, Some(_)) => x.bytes(),
    }
}

fn codes<S: Float<Real = f32>, C: Float<Real = f32>>(
    x: &Tensor,
    how: CurrentScaling,
    out: &mut QuantizedTensor,
) -> Seen {
    let largest = C::DTYPE.max_finite().expect("an FP8 format has a largest finite value");
    let scale = |amax: f32| current_scale(amax, largest, super::bound(S::DTYPE), how);
    let size = [out.rows, out.columns];
    let QuantizedTensor { codes, transposed, scale_inv, transposed_scale_inv, .. } = out;
    let (of_rows, of_columns) = match (codes, transposed, transposed_scale_inv) {
        (Some(codes), Some(turned), Some(scales)) => (Some((codes, scale_inv)), Some((turned, &mut **scales))),
        (Some(codes), ..) => (Some((codes, scale_inv)), None),
        (None, turned, _) => (None, turned.as_mut().map(|turned| (turned, scale_inv))),
    };
    let length = out.granularity.block().unwrap_or(usize::MAX);
    let along_rows = |(codes, scale_inv)| rows::<S, C>(x, length, scale, codes, scale_inv);
    match out.granularity {
        Granularity::Blocks128x128 => squares::<S, C>(x.host(), size, scale, of_rows, of_columns),
        Granularity::MixedBlocks => {
            let seen = of_rows.map(along_rows);
            let squares = of_columns.map(|copy| squares::<S, C>(x.host(), size, scale, None, Some(copy)));
            seen.or(squares).unwrap_or_default()
        }
        _ => {
            let seen = of_rows.map(along_rows);
            let turned = of_columns.map(|(codes, scale_inv)| {
                // The transposed copy is a separate cast, because its blocks run along the other dimension.
                let mut turned = host(&[size[1], size[0]], x.dtype());
                transpose(x, &mut turned);
                rows::<S, C>(&turned, length, scale, codes, scale_inv)
            });
            seen.or(turned).unwrap_or_default()
        }
    }
}

fn host(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(&Device::Cpu, shape, dtype).expect("host memory is not refused")
}

/// Returns the largest absolute value. NaN is ignored.
pub(in crate::ops) fn largest<S: Float<Real = f32>>(x: &[S]) -> f32 {
    x.iter().map(|x| x.load().abs()).fold(0.0, f32::max)
}

/// Casts each row in blocks of `length`. `scale_inv` is `[blocks, rows]`, padded. Padding has the scale of zeros.
fn rows<S: Float<Real = f32>, C: Float<Real = f32>>(
    x: &Tensor,
    length: usize,
    scale: impl Fn(f32) -> f32 + Sync,
    codes: &mut Tensor,
    scale_inv: &mut Tensor,
) -> Seen {
    let [padded_rows, pitch] = [codes.shape()[0], codes.shape()[1]];
    let width = x.shape()[1];
    let length = length.min(width);
    let x: &[S] = x.host();
    let (seen, scales): (Vec<_>, Vec<Vec<_>>) = codes
        .host_mut::<C>()
        .par_rows_mut(pitch)
        .zip(x.par_rows(width))
        .map(|(codes, x)| {
            let mut seen = Seen::default();
            let blocks = codes.chunks_mut(length).zip(x.chunks(length)).map(|(codes, x)| {
                let scale = scale(largest(x));
                seen = seen.merge(row(x, scale, codes));
                1.0 / scale
            });
            let scales = blocks.collect();
            (seen, scales)
        })
        .unzip();
    for (block, scale_inv) in scale_inv.host_mut::<f32>().chunks_mut(padded_rows).enumerate() {
        for (r, scale_inv) in scale_inv.iter_mut().enumerate() {
            *scale_inv = scales.get(r).map_or(1.0 / scale(0.0), |scales| scales[block]);
        }
    }
    seen.into_iter().fold(Seen::default(), Seen::merge)
}

/// Casts 128x128 blocks of `[rows, columns]` to codes, with scales for the codes and for the transpose.
fn squares<S: Float<Real = f32>, C: Float<Real = f32>>(
    x: &[S],
    [rows, width]: [usize; 2],
    scale: impl Fn(f32) -> f32 + Sync,
    of_rows: Option<(&mut Tensor, &mut Tensor)>,
    of_columns: Option<(&mut Tensor, &mut Tensor)>,
) -> Seen {
    const BLOCK: usize = 128;
    let granularity = Granularity::Blocks128x128;
    let shape = granularity.codes_shape(rows, width);
    let (codes, scales_of_rows) = of_rows.unzip();
    let mut unkept = None;
    let codes = codes.unwrap_or_else(|| unkept.insert(host(&shape, C::DTYPE)));
    let (seen, scales): (Vec<_>, Vec<Vec<f32>>) = codes
        .host_mut::<C>()
        .par_rows_mut(shape[1] * BLOCK)
        .zip(x.par_rows(width * BLOCK))
        .map(|(codes, x)| {
            let mut amaxes = vec![0f32; width.div_ceil(BLOCK)];
            for x in x.chunks(width) {
                amaxes.iter_mut().zip(x.chunks(BLOCK)).for_each(|(amax, x)| *amax = amax.max(largest(x)));
            }
            let scales: Vec<_> = amaxes.into_iter().map(&scale).collect();
            let mut seen = Seen::default();
            for (codes, x) in codes.chunks_mut(shape[1]).zip(x.chunks(width)) {
                for ((codes, x), &scale) in codes.chunks_mut(BLOCK).zip(x.chunks(BLOCK)).zip(&scales) {
                    seen = seen.merge(row(x, scale, codes));
                }
            }
            (seen, scales.into_iter().map(|scale| 1.0 / scale).collect())
        })
        .unzip();
    let write = |scale_inv: &mut Tensor, turned: bool| {
        let shape = scale_inv.shape().to_vec();
        let scale_inv = scale_inv.host_mut::<f32>();
        for (i, scales) in scales.iter().enumerate() {
            for (j, &scale) in scales.iter().enumerate() {
                let (row, block) = if turned { (j, i) } else { (i, j) };
                scale_inv[granularity.scale_index(&shape, row * BLOCK, block)] = scale;
            }
        }
    };
    if let Some(scale_inv) = scales_of_rows {
        write(scale_inv, false);
    }
    if let Some((transposed, scale_inv)) = of_columns {
        write(scale_inv, true);
        let (length, mut turned) = (shape[0], host(&[shape[1], shape[0]], C::DTYPE));
        transpose(codes, &mut turned);
        // The two copies have different padding.
        let pitch = transposed.shape()[1];
        for (to, from) in transposed.host_mut::<C>().chunks_mut(pitch).zip(turned.host::<C>().chunks(length)) {
            to[..length].copy_from_slice(from);
        }
    }
    seen.into_iter().fold(Seen::default(), Seen::merge)
}
