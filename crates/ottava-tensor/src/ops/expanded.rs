//! Dynamic range expansion of [`ExpandedTensor`](crate::ExpandedTensor) values on the CPU. Logarithm and power are polynomials of FMAs, so that a GPU
//! gives the same bits. Their error is about 10⁻⁵; that of E4M3 codes is 6 · 10⁻².

use crate::fp8::E4M3;
use std::sync::LazyLock;

/// Parameters of a group: power, and log2 of step and middle.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Curve {
    pub step: f32,
    pub power: f32,
    pub middle: f32,
}

/// `16 · log2(448² / 2)`: log2 of the range of E4M3, in sixteenths.
const RANGE: f32 = 265.835_36;
/// `log2(448)`.
const LARGEST: f32 = 8.807_355;

impl Curve {
    /// The curve of a group of `values`.
    pub fn fit(values: &[f32]) -> Curve {
        if values.iter().any(|v| !v.is_finite()) {
            return Curve { step: f32::NAN, power: 1.0, middle: 0.0 };
        }
        let largest = values.iter().fold(0f32, |m, v| m.max(v.abs()));
        if largest == 0.0 {
            return Curve { step: 0.0, power: 1.0, middle: 0.0 };
        }
        let smallest = values.iter().filter(|v| **v != 0.0).fold(largest, |m, v| m.min(v.abs()));
        let (largest, smallest) = (log2(largest), log2(smallest));
        let (range, middle) = (largest - smallest, 0.5 * (largest + smallest));
        let power = if range > 0.0 { (RANGE / range).floor().clamp(1.0, 256.0) * 0.0625 } else { 16.0 };
        Curve { step: power * (largest - middle) - LARGEST, power, middle }
    }

    /// The values of `codes`.
    pub fn decode(self, codes: &[E4M3], values: &mut [f32]) {
        let root = 1.0 / self.power;
        if self.step.is_nan() {
            let pairs = values.iter_mut().zip(codes);
            return pairs.for_each(|(value, code)| *value = if code.0 & 0x7F == 0 { 0.0 } else { f32::NAN });
        }
        for (value, code) in values.iter_mut().zip(codes) {
            let size = code.0 & 0x7F;
            let x = exp2((LOGARITHMS[size as usize] + self.step).mul_add(root, self.middle).max(-127.0));
            *value = if size == 0 { 0.0 } else { f32::from_bits(x.to_bits() | u32::from(code.0 & 0x80) << 24) };
        }
    }

    /// The codes of `values`.
    pub fn encode(self, values: &[f32], codes: &mut [E4M3]) {
        for (code, &x) in codes.iter_mut().zip(values) {
            *code = E4M3::from_f32(match x == 0.0 {
                true => x,
                false if self.step.is_nan() => f32::NAN,
                false => exp2(self.power * (log2(x.abs()) - self.middle) - self.step).copysign(x),
            });
        }
    }
}

/// log2 of the value of each code without its sign.
pub(crate) static LOGARITHMS: LazyLock<[f32; 128]> =
    LazyLock::new(|| std::array::from_fn(|code| log2(E4M3(code as u8).to_f32())));

/// `log2(max(x, 2^-125))`, by a polynomial for mantissas from √½ to √2.
fn log2(x: f32) -> f32 {
    const ROOT_OF_HALF: i32 = 0x3F35_04F3;
    let bits = x.max(f32::MIN_POSITIVE * 2.0).to_bits() as i32 - ROOT_OF_HALF;
    let f = f32::from_bits(((bits & 0x7F_FFFF) + ROOT_OF_HALF) as u32) - 1.0;
    let mut q = -0.211_495_3f32;
    for c in [0.319_824_13, -0.365_860_7, 0.479_671_33, -0.721_223_35, 1.442_703] {
        q = q.mul_add(f, c);
    }
    q.mul_add(f, (bits >> 23) as f32)
}

/// `2^x` for `x` from -126 to 127; zero at -127.
fn exp2(x: f32) -> f32 {
    // Adding and subtracting 1.5 · 2^23 rounds to the nearest integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x + ROUND;
    let f = x - (shifted - ROUND);
    let mut p = 0.009_685_697f32;
    for c in [0.055_922_024, 0.240_218_65, 0.693_121, 1.0] {
        p = p.mul_add(f, c);
    }
    f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log2_and_exp2_are_accurate() {
        for i in 0..200_000u32 {
            let x = f32::from_bits(i * 10_000 + 0x0100_0000);
            let error = (f64::from(log2(x)) - f64::from(x).log2()).abs();
            assert!(error < 2e-5, "log2({x:e}) is off by {error:e}");
            let y = (i as f32 / 100_000.0 - 1.0) * 124.0;
            let error = (f64::from(exp2(y)) / f64::from(y).exp2() - 1.0).abs();
            assert!(error < 4e-6, "exp2({y}) is off by {error:e}");
        }
    }

    /// The bound is half a step of E4M3 on the expanded scale.
    #[test]
    fn every_range_decodes_within_half_a_step() {
        for range in [0.0, 0.5, 5.0, 16.0, 40.0, 120.0] {
            let values: Vec<f32> = (0..128)
                .map(|i| (if i % 3 == 0 { -1.0 } else { 1.0 }) * (range * (i as f32 / 127.0 - 0.5)).exp2())
                .collect();
            let curve = Curve::fit(&values);
            let (mut codes, mut back) = (vec![E4M3(0); 128], vec![0f32; 128]);
            curve.encode(&values, &mut codes);
            curve.decode(&codes, &mut back);
            let power = f64::from(curve.power);
            let largest = values.iter().fold(0f32, |m, v| m.max(v.abs()));
            for (value, back) in values.iter().zip(&back) {
                let stretched = f64::from(value.abs() / largest).powf(power) * 448.0;
                let half = (stretched / 16.0).max(0.5f64.powi(10));
                let allowed = (1.0 + half / stretched).powf(1.0 / power) - 1.0 + 1e-3;
                let error = f64::from((back / value - 1.0).abs());
                assert!(error <= allowed, "range 2^{range}: {value:e} came back as {back:e}, power {}", curve.power);
            }
        }
    }

    #[test]
    fn zeros_are_exact_and_non_finite_values_decode_to_nan() {
        let (mut codes, mut back) = (vec![E4M3(1); 3], vec![7f32; 3]);
        let round = |values: &[f32], codes: &mut [E4M3], back: &mut [f32]| {
            let curve = Curve::fit(values);
            curve.encode(values, codes);
            curve.decode(codes, back);
            curve
        };
        let curve = round(&[0.0, -0.0, 0.0], &mut codes, &mut back);
        assert_eq!((curve, &back[..]), (Curve { step: 0.0, power: 1.0, middle: 0.0 }, &[0.0, 0.0, 0.0][..]));
        for bad in [f32::INFINITY, f32::NAN] {
            round(&[1.0, bad, 0.0], &mut codes, &mut back);
            assert!(back[0].is_nan() && back[1].is_nan() && back[2] == 0.0, "{back:?}");
        }
        round(&[1e-36, 0.0, 1e37], &mut codes, &mut back);
        assert!((back[2] / 1e37 - 1.0).abs() < 0.02 && (1e-38..1e-34).contains(&back[0]) && back[1] == 0.0, "{back:?}");
    }
}
