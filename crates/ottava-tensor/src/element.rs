//! The Rust types of tensor elements, and the types in which their arithmetic is done.

use crate::dtype::DType;
use crate::fp8::{E4M3, E5M2, E8M0};
use half::{bf16, f16};
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

/// A plain value that a tensor can hold.
pub trait Element: bytemuck::Pod + Send + Sync + PartialEq + std::fmt::Debug {
    /// The [`DType`] of this type.
    const DTYPE: DType;
}

/// The type in which arithmetic is done: `f32` in production, `f64` for gradient checks.
///
/// Transcendental functions come from `libm` or this crate, so results are bit-identical on every platform.
pub trait Real:
    Element
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + Sum
    + Default
{
    /// Returns the value that is nearest to `x`.
    fn of(x: f64) -> Self;
    /// Returns the value, widened to `f64`.
    fn to_f64(self) -> f64;
    /// Returns the square root, correctly rounded.
    fn sqrt(self) -> Self;
    /// Returns `e` to the power of the value.
    fn exp(self) -> Self;
    /// Returns `e` to the power of the value, minus 1, without cancellation.
    fn exp_m1(self) -> Self;
    /// Returns the natural logarithm.
    fn ln(self) -> Self;
    /// Returns the hyperbolic tangent.
    fn tanh(self) -> Self;
    /// Returns the error function of the value.
    fn erf(self) -> Self;
    /// Returns `self · a + b`, with one rounding if `FUSED`, else with two roundings.
    fn mul_add<const FUSED: bool>(self, a: Self, b: Self) -> Self;
}

/// An element that is widened to a [`Real`] for arithmetic, and rounded when it is stored.
pub trait Float: Element {
    /// The type in which values of this type are computed.
    type Real: Real;
    /// Widens the value exactly.
    fn load(self) -> Self::Real;
    /// Rounds once: to nearest even, saturating for FP8.
    fn store(x: Self::Real) -> Self;
}

macro_rules! element {
    ($($t:ty: $d:ident),*) => { $(impl Element for $t { const DTYPE: DType = DType::$d; })* };
}
element!(f64: F64, f32: F32, f16: F16, bf16: BF16, E4M3: E4M3, E5M2: E5M2, E8M0: E8M0, u8: U8, i16: I16, i32: I32, i64: I64);

macro_rules! real {
    ($t:ty, $exp:path, $exp_m1:path, $ln:path, $tanh:path, $erf:path) => {
        impl Real for $t {
            fn of(x: f64) -> $t {
                x as $t
            }
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
            fn sqrt(self) -> $t {
                <$t>::sqrt(self)
            }
            fn exp(self) -> $t {
                $exp(self)
            }
            fn exp_m1(self) -> $t {
                $exp_m1(self)
            }
            fn ln(self) -> $t {
                $ln(self)
            }
            fn tanh(self) -> $t {
                $tanh(self)
            }
            fn erf(self) -> $t {
                $erf(self)
            }
            #[inline(always)]
            fn mul_add<const FUSED: bool>(self, a: $t, b: $t) -> $t {
                if FUSED { <$t>::mul_add(self, a, b) } else { self * a + b }
            }
        }
        impl Float for $t {
            type Real = $t;
            #[inline(always)]
            fn load(self) -> $t {
                self
            }
            #[inline(always)]
            fn store(x: $t) -> $t {
                x
            }
        }
    };
}
real!(f32, expf, libm::expm1f, libm::logf, libm::tanhf, libm::erff);
real!(f64, libm::exp, libm::expm1, libm::log, libm::tanh, libm::erf);

/// Returns `e^x` to within 1 ulp. Branch-free, so that loops over it vectorise.
///
/// With `x = n·ln 2 + r` and `|r| ≤ ln 2 / 2`, `e^r` is computed by its Taylor polynomial of degree 7, and `2^n` from its bits. `2^n` is multiplied
/// in two halves, so that subnormal results are rounded once. Overflow gives infinity, and NaN stays NaN.
#[inline(always)]
fn expf(x: f32) -> f32 {
    // ln 2 in two parts. The first part has few bits, so that its product with n is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding and subtracting 1.5 · 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x > 100.0 { 100.0 } else { x };
    let clamped = if clamped < -110.0 { -110.0 } else { clamped };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.0 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p * r + c;
    }
    let n = shifted.to_bits() as i32 - ROUND.to_bits() as i32;
    let power = |n: i32| f32::from_bits(((n + 127) << 23) as u32);
    p * power(n >> 1) * power(n - (n >> 1))
}

macro_rules! narrow {
    ($($t:ty),*) => { $(impl Float for $t {
        type Real = f32;
        #[inline(always)]
        fn load(self) -> f32 {
            self.to_f32()
        }
        #[inline(always)]
        fn store(x: f32) -> $t {
            <$t>::from_f32(x)
        }
    })* };
}
narrow!(f16, E4M3, E5M2);

impl Float for bf16 {
    type Real = f32;
    #[inline(always)]
    fn load(self) -> f32 {
        self.to_f32()
    }
    /// Branch-free, so that loops over it vectorise.
    #[inline(always)]
    fn store(x: f32) -> bf16 {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
        let quiet = bits >> 16 | 0x40;
        bf16::from_bits(if bits & 0x7FFF_FFFF > 0x7F80_0000 { quiet } else { rounded } as u16)
    }
}

/// Runs a body once for the floating-point type that `dtype` names: `with_float!(x.dtype(), S => cpu::op::<S>(…))`.
/// The caller has checked that `dtype` is a floating-point type.
macro_rules! with_float {
    ($dtype:expr, $S:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F64 => {
                type $S = f64;
                $body
            }
            $crate::DType::F32 => {
                type $S = f32;
                $body
            }
            $crate::DType::F16 => {
                type $S = half::f16;
                $body
            }
            $crate::DType::BF16 => {
                type $S = half::bf16;
                $body
            }
            $crate::DType::E4M3 => {
                type $S = $crate::fp8::E4M3;
                $body
            }
            $crate::DType::E5M2 => {
                type $S = $crate::fp8::E5M2;
                $body
            }
            other @ ($crate::DType::E8M0
            | $crate::DType::U8
            | $crate::DType::I16
            | $crate::DType::I32
            | $crate::DType::I64) => {
                unreachable!("{other} is not a floating-point type")
            }
        }
    };
}
pub(crate) use with_float;

#[cfg(test)]
mod tests {
    use super::Real;

    #[test]
    fn exp_is_the_exponential_everywhere() {
        let mut worst = 0.0f64;
        for i in -2_200_000..1_800_000 {
            let x = i as f32 * 5e-5;
            let (got, expected) = (f64::from(Real::exp(x)), f64::from(x).exp());
            let rounded = expected as f32;
            if rounded.is_infinite() || rounded == 0.0 {
                assert_eq!(got as f32, rounded, "e^{x}");
                continue;
            }
            let step = f64::from(rounded.next_up()) - f64::from(rounded);
            worst = worst.max((got - expected).abs() / step);
        }
        assert!(worst < 1.5, "{worst} units in the last place");
    }

    #[test]
    fn exp_of_zero_infinities_and_nan_is_exact() {
        assert_eq!(Real::exp(0.0f32), 1.0);
        assert_eq!((Real::exp(f32::INFINITY), Real::exp(f32::NEG_INFINITY)), (f32::INFINITY, 0.0));
        assert!(Real::exp(f32::NAN).is_nan());
    }
}
