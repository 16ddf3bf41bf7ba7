//! The types of tensors in written files.

use crate::dequantize::{BlockType, named};
use crate::export::finite::{expect_finite, not_finite};
use half::{bf16, f16};
use ottava_common::error::Result;
use serde::Serialize;

/// A type of the matrices of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GgufType {
    /// 8 bits of precision.
    Bfloat16,
    /// 11 bits of precision.
    Float16,
    /// All bits.
    Float32,
    /// Blocks of 32 elements of a row: signed bytes with one scale in F16.
    Q8_0,
}

impl GgufType {
    fn format(self) -> &'static BlockType {
        named(match self {
            GgufType::Bfloat16 => "BF16",
            GgufType::Float16 => "F16",
            GgufType::Float32 => "F32",
            GgufType::Q8_0 => "Q8_0",
        })
    }

    /// Returns the name of the type in llama.cpp.
    pub fn name(self) -> &'static str {
        self.format().name
    }

    /// Returns the number of the type in files.
    pub(super) fn id(self) -> u32 {
        self.format().id
    }

    /// Returns `general.file_type` of files whose matrices have this type (`llama_ftype` in llama.cpp).
    pub(super) fn file_type(self) -> u32 {
        match self {
            GgufType::Float32 => 0,
            GgufType::Float16 => 1,
            GgufType::Q8_0 => 7,
            GgufType::Bfloat16 => 32,
        }
    }

    /// Returns the number of bytes of `elements` elements.
    pub(super) fn bytes(self, elements: usize) -> usize {
        elements / self.format().elements * self.format().bytes
    }

    /// Returns the type of a tensor by the rule of llama.cpp's converter: F32 for vectors, and F16 for matrices whose rows are not whole blocks.
    pub(super) fn of(self, shape: &[usize]) -> GgufType {
        match shape {
            [_, columns] if columns.is_multiple_of(self.format().elements) => self,
            [_, _] => GgufType::Float16,
            _ => GgufType::Float32,
        }
    }

    /// Returns the bytes of `values` of the tensor `name`, rounded to nearest even. For blocks, see [`q8_0`].
    ///
    /// Errors with [`Error::NonFinite`](ottava_common::Error::NonFinite) if a value or a scale is not finite.
    pub(super) fn encode(self, name: &str, values: &[f32]) -> Result<Vec<u8>> {
        expect_finite(name, values)?;
        let too_large = |element: usize| not_finite(name, element, &format!("is too large for {}", self.name()));
        let halves = |round: fn(f32) -> ([u8; 2], bool)| {
            let mut bytes = Vec::with_capacity(2 * values.len());
            for (i, value) in values.iter().enumerate() {
                let (half, finite) = round(*value);
                if !finite {
                    return Err(too_large(i));
                }
                bytes.extend(half);
            }
            Ok(bytes)
        };
        match self {
            GgufType::Float32 => Ok(values.iter().flat_map(|value| value.to_le_bytes()).collect()),
            GgufType::Bfloat16 => halves(|value| {
                let half = bf16::from_f32(value);
                (half.to_le_bytes(), half.is_finite())
            }),
            GgufType::Float16 => halves(|value| {
                let half = f16::from_f32(value);
                (half.to_le_bytes(), half.is_finite())
            }),
            GgufType::Q8_0 => {
                let mut bytes = Vec::with_capacity(self.bytes(values.len()));
                for (i, block) in values.chunks_exact(self.format().elements).enumerate() {
                    bytes.extend(q8_0(block).ok_or_else(|| too_large(i * block.len()))?);
                }
                Ok(bytes)
            }
        }
    }
}

/// Encodes a block of 32 elements like `quantize_row_q8_0_ref` of llama.cpp. The scale is `amax / 127`, rounded to F16. A code is `value · (1 /
/// scale)` with the scale in F32, rounded half away from zero. Returns `None` if the scale is infinite in F16.
fn q8_0(block: &[f32]) -> Option<[u8; 34]> {
    let amax = block.iter().fold(0.0_f32, |amax, value| amax.max(value.abs()));
    let scale = amax / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let stored = f16::from_f32(scale);
    let mut bytes = [0; 34];
    bytes[..2].copy_from_slice(&stored.to_le_bytes());
    for (byte, value) in bytes[2..].iter_mut().zip(block) {
        *byte = (value * inverse).round() as i8 as u8;
    }
    stored.is_finite().then_some(bytes)
}
