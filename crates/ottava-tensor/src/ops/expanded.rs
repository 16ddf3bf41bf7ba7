//! Encodes and decodes [`ExpandedTensor`] on the CPU. On a GPU, only optimizer updates encode and decode it.

use crate::ops::parallel_rows::ParallelRows;
use crate::stored::ExpandedTensor;
use crate::{DType, Device, MemoryKind, Result, Tensor};
use rayon::prelude::*;

/// Encodes `x`, an F32 matrix in CPU memory.
pub fn expanded(x: &Tensor) -> Result<ExpandedTensor> {
    x.expect_dtype("expanded: x", &[DType::F32])?;
    x.expect_device("expanded: x", &Device::Cpu)?;
    let mut out = ExpandedTensor::zeros(&Device::Cpu, x.shape(), MemoryKind::Device)?;
    let [row, groups] = row_of(&out);
    let codes = out.codes.host_mut().par_rows_mut(row).zip(out.groups.host_mut().par_chunks_mut(groups));
    codes.zip(x.host().par_rows(row)).for_each(|((codes, groups), x)| encode_row(x, codes, groups));
    Ok(out)
}

/// Decodes `x`, which is in CPU memory, to F32.
pub fn unexpanded(x: &ExpandedTensor) -> Result<Tensor> {
    x.codes.expect_device("unexpanded: x", &Device::Cpu)?;
    let [row, groups] = row_of(x);
    let mut y = Tensor::empty(&Device::Cpu, x.codes.shape(), DType::F32)?;
    let codes = x.codes.host().par_rows(row).zip(x.groups.host().par_chunks(groups));
    codes.zip(y.host_mut().par_rows_mut(row)).for_each(|((codes, groups), y)| decode_row(codes, groups, y));
    Ok(y)
}

/// Encodes the `values` of a row. `codes` and `groups` are rows of the tensors of [`ExpandedTensor`].
pub(super) fn encode_row(values: &[f32], codes: &mut [u8], groups: &mut [i32]) {
    let codes = codes.chunks_mut(ExpandedTensor::GROUP).zip(groups.chunks_exact_mut(VALUES));
    for ((codes, group), values) in codes.zip(values.chunks(ExpandedTensor::GROUP)) {
        let levels = Levels::fit(values);
        levels.encode(values, codes);
        group.copy_from_slice(&[levels.smallest, levels.step]);
    }
}

/// Decodes the codes of [`encode_row`].
pub(super) fn decode_row(codes: &[u8], groups: &[i32], values: &mut [f32]) {
    let codes = codes.chunks(ExpandedTensor::GROUP).zip(groups.chunks_exact(VALUES));
    for ((codes, group), values) in codes.zip(values.chunks_mut(ExpandedTensor::GROUP)) {
        Levels { smallest: group[0], step: group[1] }.decode(codes, values);
    }
}

/// The number of values that are stored per group: the smallest magnitude and the step.
const VALUES: usize = ExpandedTensor::groups_shape(1, 1)[2];

/// Returns the number of codes of a row, and the number of entries of `groups` for a row.
pub(super) fn row_of(x: &ExpandedTensor) -> [usize; 2] {
    let row = x.codes.shape()[1].max(1);
    [row, row.div_ceil(ExpandedTensor::GROUP) * VALUES]
}

/// The smallest magnitude and the step of a group, as bits of F32. They determine the value of each code.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Levels {
    /// The smallest nonzero magnitude.
    pub smallest: i32,
    /// The distance between codes.
    pub step: i32,
}

/// 2^-120. If the smallest magnitude is at least 2^-120, zero is below the smallest code for any step.
const LEAST: i32 = 0x0380_0000;
/// The largest magnitude that a group can encode: the largest F32 that is not exceeded by 126 rounded steps.
const LARGEST: i32 = 0x7F7F_FF00;
/// 1.5 · 2^23. Adding it rounds to the nearest integer, which is in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;

fn magnitude(x: f32) -> i32 {
    (x.to_bits() & 0x7FFF_FFFF) as i32
}

impl Levels {
    /// Returns the levels of a group of `values`.
    pub fn fit(values: &[f32]) -> Levels {
        let sizes = || values.iter().map(|x| magnitude(*x));
        let largest = sizes().max().unwrap_or(0);
        if largest > LARGEST {
            return Levels { smallest: f32::NAN.to_bits() as i32, step: 0 };
        }
        let smallest = sizes().filter(|size| *size >= LEAST).min().unwrap_or(LEAST);
        Levels { smallest, step: ((largest.max(smallest) - smallest + 125) / 126).max(1) }
    }

    /// Decodes `codes`.
    pub fn decode(self, codes: &[u8], values: &mut [f32]) {
        for (value, &code) in values.iter_mut().zip(codes) {
            let size = match i32::from(code & 0x7F) {
                0 => 0,
                code => self.smallest + (code - 1) * self.step,
            };
            *value = f32::from_bits(size as u32 | u32::from(code & 0x80) << 24);
        }
    }

    /// Encodes `values`.
    pub fn encode(self, values: &[f32], codes: &mut [u8]) {
        if self.step == 0 {
            return codes.fill(1);
        }
        let inverse = 1.0 / self.step as f32;
        for (code, &x) in codes.iter_mut().zip(values) {
            let above = (magnitude(x) - self.smallest) as f32;
            let size = above.mul_add(inverse, ROUND + 1.0).max(ROUND).to_bits() as u8 & 0x7F;
            *code = size | (x.to_bits() >> 24) as u8 & 0x80;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(values: &[f32]) -> (Levels, Vec<u8>, Vec<f32>) {
        let levels = Levels::fit(values);
        let (mut codes, mut back) = (vec![9; values.len()], vec![7f32; values.len()]);
        levels.encode(values, &mut codes);
        levels.decode(&codes, &mut back);
        (levels, codes, back)
    }

    #[test]
    fn every_range_decodes_within_half_a_step() {
        for range in [0.0, 0.5, 5.0, 16.0, 40.0, 120.0, 230.0] {
            let sign = |i: i32| if i % 3 == 0 { -1.0 } else { 1.0 };
            let values: Vec<f32> = (0..128).map(|i| sign(i) * (range * (i as f32 / 127.0 - 0.5)).exp2()).collect();
            let (_, codes, back) = round_trip(&values);
            for (value, back) in values.iter().zip(&back) {
                // Half a step is the same number of F32 bits everywhere, so between two powers of two the relative error is smaller for larger
                // values.
                let (error, allowed) = ((back / value - 1.0).abs(), 0.5 * range / 126.0 + 2e-5);
                assert!(error <= allowed, "range 2^{range}: {value:e} came back as {back:e}");
            }
            let sizes = codes.iter().map(|code| code & 0x7F);
            assert_eq!(sizes.clone().min(), Some(1));
            assert!(range < 1.0 || sizes.max() == Some(127), "range 2^{range}");
        }
    }

    #[test]
    fn zeros_are_exact_and_values_that_are_not_finite_make_the_group_nan() {
        let (levels, codes, back) = round_trip(&[0.0, -0.0, 1e-37]);
        assert_eq!((levels, &codes[..]), (Levels { smallest: LEAST, step: 1 }, &[0, 0x80, 0][..]));
        assert_eq!(back, [0.0, 0.0, 0.0]);
        // The widest range: one step covers nearly two octaves.
        let (_, codes, back) = round_trip(&[0.0, 3.4e38, -1e-36, 0.0]);
        assert_eq!(codes, [0, 127, 0x81, 0]);
        assert!(back[1].is_finite() && back[1] >= 3.3e38 && back[2] == -1e-36, "{back:?}");
        for bad in [f32::INFINITY, f32::NAN, -f32::NAN] {
            let (_, codes, back) = round_trip(&[1.0, bad, 0.0]);
            assert_eq!(codes, [1, 1, 1]);
            assert!(back.iter().all(|x| x.is_nan()), "{back:?}");
        }
        // A new state holds zeros.
        let mut back = [7f32];
        Levels { smallest: 0, step: 0 }.decode(&[0], &mut back);
        assert_eq!(back, [0.0]);
    }
}
