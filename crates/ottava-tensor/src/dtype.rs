//! The element types of tensors. This file has the only table of their sizes, ranges and names.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DType {
    /// IEEE binary64. Only on the CPU, for gradient checks.
    F64,
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16: the upper half of an `F32`.
    BF16,
    /// FP8 with 4 exponent and 3 mantissa bits, finite only ("E4M3FN").
    E4M3,
    /// FP8 with 5 exponent and 2 mantissa bits, with infinities.
    E5M2,
    /// A power of two stored as its exponent: the shared scale of a group.
    E8M0,
    /// Unsigned 8-bit integers: codes of expanded values.
    U8,
    /// Signed 16-bit integers: the low half of a split F32.
    I16,
    /// Signed 32-bit integers: token ids and targets.
    I32,
    /// Signed 64-bit integers: counters.
    I64,
}

use DType::{BF16, E4M3, E5M2, E8M0, F16, F32, F64, I16, I32, I64, U8};

impl DType {
    /// Returns the number of bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            F64 | I64 => 8,
            F32 | I32 => 4,
            F16 | BF16 | I16 => 2,
            E4M3 | E5M2 | E8M0 | U8 => 1,
        }
    }

    /// Returns the largest finite value of formats that are narrow enough to need a scale (E4M3, E5M2: OCP 8-bit floating point, 2023).
    pub const fn max_finite(self) -> Option<f32> {
        match self {
            E4M3 => Some(448.0),
            E5M2 => Some(57_344.0),
            F16 => Some(65_504.0),
            F64 | F32 | BF16 | E8M0 | U8 | I16 | I32 | I64 => None,
        }
    }

    /// Returns whether this is one of the two 8-bit floating-point formats.
    pub const fn is_fp8(self) -> bool {
        matches!(self, E4M3 | E5M2)
    }

    /// Returns the distance from 1.0 to the next value, the unit in which rounding errors are stated. Returns 0 for integers and bare exponents.
    pub const fn epsilon(self) -> f64 {
        match self {
            F64 => f64::EPSILON,
            F32 => f32::EPSILON as f64,
            F16 => 1.0 / 1024.0,
            BF16 => 1.0 / 128.0,
            E4M3 => 1.0 / 8.0,
            E5M2 => 1.0 / 4.0,
            E8M0 | U8 | I16 | I32 | I64 => 0.0,
        }
    }

    /// Returns the name in messages and configuration files.
    pub const fn name(self) -> &'static str {
        match self {
            F64 => "float64",
            F32 => "float32",
            F16 => "float16",
            BF16 => "bfloat16",
            E4M3 => "float8_e4m3",
            E5M2 => "float8_e5m2",
            E8M0 => "float8_e8m0",
            U8 => "uint8",
            I16 => "int16",
            I32 => "int32",
            I64 => "int64",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
