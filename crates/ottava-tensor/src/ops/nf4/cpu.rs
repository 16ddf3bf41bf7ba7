use super::{SCALES, VALUES};
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use crate::ops::parallel_rows::TASK;
use crate::stored::Nf4Tensor;
use rayon::prelude::*;

const BLOCK: usize = Nf4Tensor::BLOCK;
const GROUP: usize = Nf4Tensor::GROUP;

/// The smallest divisor of a block, so that a block of zeros has codes of zeros.
const LEAST: f32 = 1e-38;

pub(super) fn quantize(x: &Tensor, codes: &mut Tensor, amaxes: &mut Tensor) {
    let codes = codes.host_mut::<u8>().par_chunks_mut(BLOCK / 2).zip(amaxes.host_mut::<f32>());
    codes.zip(x.host::<f32>().par_chunks(BLOCK)).for_each(|((codes, amax), values)| {
        *amax = amax_of(values);
        let of = |value: f32| nearest(scaled(value, *amax, values.len() == BLOCK), &VALUES) as u8;
        for (code, pair) in codes.iter_mut().zip(values.chunks(2)) {
            // The first element of a pair has the high bits. A missing element counts as zero.
            *code = of(pair[0]) << 4 | pair.get(1).map_or(nearest(0.0, &VALUES) as u8, |second| of(*second));
        }
    });
}

/// Quantizes the amaxes of blocks. Returns their codes, the amax of each group, and the mean that was subtracted.
pub(super) fn quantize_amaxes(amaxes: &[f32]) -> (Vec<u8>, Vec<f32>, f32) {
    let mean = (amaxes.iter().map(|&amax| f64::from(amax)).sum::<f64>() / amaxes.len().max(1) as f64) as f32;
    let shifted: Vec<f32> = amaxes.iter().map(|amax| amax - mean).collect();
    let groups: Vec<f32> = shifted.par_chunks(GROUP).map(amax_of).collect();
    let codes = shifted.par_chunks(GROUP).zip(&groups).flat_map_iter(|(values, &amax)| {
        let is_full = values.len() == GROUP;
        values.iter().map(move |&value| nearest(scaled(value, amax, is_full), &SCALES[..]) as u8)
    });
    (codes.collect(), groups, mean)
}

/// Returns the largest absolute value, or NaN if a value is NaN.
fn amax_of(values: &[f32]) -> f32 {
    let larger = |amax: f32, value: f32| if value > amax || value.is_nan() { value } else { amax };
    values.iter().fold(0.0, |amax, value| if amax.is_nan() { amax } else { larger(amax, value.abs()) })
}

/// Returns `value / amax`, limited to -1 and 1. Like bitsandbytes, full blocks multiply by the inverse, and an incomplete last block divides.
fn scaled(value: f32, amax: f32, is_full: bool) -> f32 {
    let amax = amax.max(LEAST);
    let scaled = if is_full { value * (1.0 / amax) } else { value / amax };
    scaled.clamp(-1.0, 1.0)
}

/// Returns the number of midpoints between neighbouring `levels` that are below `x`. NaN gives the last level.
fn nearest(x: f32, levels: &[f32]) -> usize {
    let (mut low, mut high) = (0, levels.len() - 1);
    while low < high {
        let middle = (low + high) / 2;
        let is_below = (levels[middle] + levels[middle + 1]) / 2.0 >= x;
        if is_below { high = middle } else { low = middle + 1 }
    }
    low
}

pub(super) fn dequantize(x: &Nf4Tensor, y: &mut Tensor) {
    let amaxes = nf4_amaxes(0, x.scales.host(), x.groups.host(), x.mean);
    let values = nf4_values(x.codes.host(), &amaxes, y.len());
    with_float!(y.dtype(), S => {
        let stored = y.host_mut::<S>().par_iter_mut().with_min_len(TASK);
        stored.zip(values).for_each(|(y, value)| *y = S::store(<S as Float>::Real::of(f64::from(value))));
    });
}

/// Returns the amaxes of blocks from their codes `scales`, which begin with the scale of block `first`, the amaxes of all `groups` of 256 and the `mean`.
pub fn nf4_amaxes(first: usize, scales: &[u8], groups: &[f32], mean: f32) -> Vec<f32> {
    let of = |(at, &scale): (usize, &u8)| SCALES[usize::from(scale)] * groups[(first + at) / GROUP] + mean;
    scales.iter().enumerate().map(of).collect()
}

/// Returns the values of `elements` codes, in blocks of 64 with these `amaxes`. The first code of a byte is in its high bits.
pub fn nf4_values(codes: &[u8], amaxes: &[f32], elements: usize) -> Vec<f32> {
    let mut values = vec![0.0; elements];
    let blocks = values.par_chunks_mut(BLOCK).zip(codes.par_chunks(BLOCK / 2)).zip(amaxes);
    blocks.for_each(|((values, codes), amax)| {
        for (at, value) in values.iter_mut().enumerate() {
            let code = if at % 2 == 0 { codes[at / 2] >> 4 } else { codes[at / 2] & 15 };
            *value = VALUES[usize::from(code)] * amax;
        }
    });
    values
}
