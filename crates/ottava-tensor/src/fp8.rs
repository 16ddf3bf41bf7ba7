//! The two 8-bit floating-point formats of Hopper, bit for bit: E4M3 (finite only, "FN") and E5M2.
//!
//! Encoding rounds to nearest, ties to even, supports subnormals, and saturates: values beyond the largest finite value, including infinities, become
//! this value with their sign. The sign of zero is kept. Every NaN becomes `0x7F`. `cvt.rn.satfinite` does the same on the GPU. Decoding is exact.
//! Source: OCP 8-bit floating point specification, revision 1.0 (2023).

use bytemuck::{Pod, Zeroable};

/// One E4M3 code: bias 7, largest finite 448, no infinity, NaN `0x7F` and `0xFF`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct E4M3(pub u8);

/// One E5M2 code: bias 15, largest finite 57,344, infinities `0x7C` and `0xFC`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct E5M2(pub u8);

/// A power of two stored as its exponent, 2⁻¹²⁷ to 2¹²⁷: the shared scale of a group. OCP MX specification v1.0, section 5.4.1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct E8M0(pub u8);

impl E8M0 {
    /// The NaN code.
    pub const NAN: E8M0 = E8M0(255);

    /// Returns the smallest power of two that is at least `x`, which is not negative. Infinity becomes 2¹²⁷, and zero 2⁻¹²⁷.
    pub fn rounded_up(x: f32) -> E8M0 {
        if x.is_infinite() {
            return E8M0(254);
        }
        let (exponent, mantissa) = (x.to_bits() >> 23, x.to_bits() & 0x7F_FFFF);
        // 2^-127 is a subnormal number: half of the mantissa's range.
        let is_covered = mantissa == 0 || exponent == 254 || exponent == 0 && mantissa <= 0x40_0000;
        E8M0(exponent as u8 + u8::from(!is_covered))
    }

    /// Returns the exact value of the code.
    pub fn to_f32(self) -> f32 {
        match self {
            E8M0(0) => f32::from_bits(1 << 22),
            E8M0::NAN => f32::NAN,
            E8M0(exponent) => f32::from_bits(u32::from(exponent) << 23),
        }
    }
}

impl E4M3 {
    /// Rounds `x` to the nearest code, saturating.
    pub fn from_f32(x: f32) -> E4M3 {
        E4M3(encode::<4, 3, 0x7E>(x))
    }

    /// Returns the exact value of the code.
    pub fn to_f32(self) -> f32 {
        E4M3_VALUES[self.0 as usize]
    }
}

impl E5M2 {
    /// Rounds `x` to the nearest code, saturating.
    pub fn from_f32(x: f32) -> E5M2 {
        E5M2(encode::<5, 2, 0x7B>(x))
    }

    /// Returns the exact value of the code.
    pub fn to_f32(self) -> f32 {
        E5M2_VALUES[self.0 as usize]
    }
}

/// The code of every NaN, in both formats.
const NAN: u8 = 0x7F;

/// Encodes with `EXP` exponent and `MAN` mantissa bits. `LARGEST` is the code of the largest finite value.
///
/// The binary32 bits without the sign are rounded as an integer: half of the dropped part (less
/// one, plus the lowest kept bit) is added, and the shift carries into the exponent. Below the smallest normal, a power of two
/// is added that aligns the mantissa so that the hardware's rounding gives the result.
///
/// Both results are computed and one is selected, so that loops over this function vectorise.
#[inline(always)]
fn encode<const EXP: u32, const MAN: u32, const LARGEST: u8>(x: f32) -> u8 {
    let bits = x.to_bits();
    let sign = (bits >> 24) & 0x80;
    let magnitude = bits & 0x7FFF_FFFF;
    let bias = (1 << (EXP - 1)) - 1;
    let smallest_normal = (127 - bias + 1) << 23;
    // One unit of the subnormal grid is 2^(1 - bias - MAN). Adding the power of two whose last place is this unit aligns the mantissa.
    let line_up = f32::from_bits((127 + 23 + 1 - bias - MAN) << 23);
    let subnormal = (f32::from_bits(magnitude) + line_up).to_bits().wrapping_sub(line_up.to_bits());
    let dropped = 23 - MAN;
    let half = (1 << (dropped - 1)) - 1 + ((magnitude >> dropped) & 1);
    let normal = (magnitude.wrapping_add(half) >> dropped).wrapping_sub((127 - bias) << MAN);
    let code = if magnitude < smallest_normal { subnormal } else { normal };
    let code = sign | if code > LARGEST as u32 { LARGEST as u32 } else { code };
    (if magnitude > 0x7F80_0000 { NAN as u32 } else { code }) as u8
}

const fn decode(code: u8, exp: u32, man: u32) -> f32 {
    let bias = (1i32 << (exp - 1)) - 1;
    let exponent = ((code & 0x7F) >> man) as i32;
    let mantissa = (code & ((1 << man) - 1)) as u32;
    let sign = ((code & 0x80) as u32) << 24;
    if exponent == 0 {
        // mantissa · 2^(1 - bias - man). Both factors and the product are exact in binary32.
        let unit = f32::from_bits(((127 + 1 - bias - man as i32) as u32) << 23);
        return f32::from_bits((mantissa as f32 * unit).to_bits() | sign);
    }
    f32::from_bits(sign | ((exponent - bias + 127) as u32) << 23 | mantissa << (23 - man))
}

static E4M3_VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = if code & 0x7F == 0x7F { f32::NAN } else { decode(code as u8, 4, 3) };
        code += 1;
    }
    values
};

static E5M2_VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = match code & 0x7F {
            0x7C => {
                if code & 0x80 == 0 {
                    f32::INFINITY
                } else {
                    f32::NEG_INFINITY
                }
            }
            0x7D..=0x7F => f32::NAN,
            _ => decode(code as u8, 5, 2),
        };
        code += 1;
    }
    values
};

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the nearest finite value by exhaustive search, ties to the even code. This is the definition, computed slowly.
    fn nearest(x: f32, value: fn(u8) -> f32, largest: u8) -> u8 {
        if x.is_nan() {
            return NAN;
        }
        let sign = if x.is_sign_negative() { 0x80 } else { 0 };
        let x = f64::from(x.abs());
        if x >= f64::from(value(largest)) {
            return sign | largest;
        }
        let distance = |code: u8| (f64::from(value(code)) - x).abs();
        let mut best = 0;
        for code in 0..=largest {
            if distance(code) < distance(best) || (distance(code) == distance(best) && code % 2 == 0) {
                best = code;
            }
        }
        sign | best
    }

    fn e4m3(code: u8) -> f32 {
        E4M3(code).to_f32()
    }

    fn e5m2(code: u8) -> f32 {
        E5M2(code).to_f32()
    }

    #[test]
    fn every_code_survives_decode_and_encode() {
        for code in 0..=255 {
            let (a, b) = (e4m3(code), e5m2(code));
            assert_eq!(E4M3::from_f32(a).0, if a.is_nan() { NAN } else { code }, "E4M3 {code:#04x}");
            let expected = match b {
                b if b.is_nan() => NAN,
                b if b.is_infinite() => (code & 0x80) | 0x7B,
                _ => code,
            };
            assert_eq!(E5M2::from_f32(b).0, expected, "E5M2 {code:#04x}");
        }
    }

    #[test]
    fn every_bf16_rounds_to_the_nearest_code_ties_to_even() {
        for bits in 0..=u16::MAX {
            for scale in [1.0, 0.37, 64.0, 1e-30] {
                let x = half::bf16::from_bits(bits).to_f32() * scale;
                assert_eq!(E4M3::from_f32(x).0, nearest(x, e4m3, 0x7E), "E4M3 of {x:e}, bits {bits:#06x}");
                assert_eq!(E5M2::from_f32(x).0, nearest(x, e5m2, 0x7B), "E5M2 of {x:e}, bits {bits:#06x}");
            }
        }
    }

    #[test]
    fn neighbours_of_every_boundary_fall_on_the_right_side() {
        let check = |value: fn(u8) -> f32, encode: fn(f32) -> u8, largest: u8| {
            for code in 0..largest {
                let middle = (value(code) + value(code + 1)) / 2.0; // exact in binary32
                for x in [middle.next_down(), middle, middle.next_up()] {
                    assert_eq!(encode(x), nearest(x, value, largest), "{x:e}");
                    assert_eq!(encode(-x), nearest(-x, value, largest), "{:e}", -x);
                }
            }
        };
        check(e4m3, |x| E4M3::from_f32(x).0, 0x7E);
        check(e5m2, |x| E5M2::from_f32(x).0, 0x7B);
    }

    #[test]
    fn codes_at_the_limits_match_the_specification() {
        assert_eq!((e4m3(0x7E), e4m3(0x08), e4m3(0x01)), (448.0, 2f32.powi(-6), 2f32.powi(-9)));
        assert_eq!((e5m2(0x7B), e5m2(0x04), e5m2(0x01)), (57_344.0, 2f32.powi(-14), 2f32.powi(-16)));
        assert_eq!((E4M3::from_f32(f32::INFINITY).0, E5M2::from_f32(f32::NEG_INFINITY).0), (0x7E, 0xFB));
        assert_eq!((E4M3::from_f32(-f32::NAN).0, E5M2::from_f32(f32::NAN).0), (NAN, NAN));
        assert_eq!((E4M3::from_f32(-0.0).0, E4M3::from_f32(2f32.powi(-10)).0), (0x80, 0x00));
    }
}
