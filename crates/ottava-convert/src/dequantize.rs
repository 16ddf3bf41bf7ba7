//! Block formats of GGUF, as defined by `ggml-quants.c` of llama.cpp and by `gguf.quants`.
//!
//! Scales are F16. Values are computed in F32 in the same order of operations as in these two programs, so they are bit-identical.

use half::{bf16, f16};

/// A storage format of elements: blocks with a fixed number of bytes.
#[derive(Debug)]
pub struct BlockType {
    /// The number of the type in files.
    pub id: u32,
    /// The name of the type.
    pub name: &'static str,
    /// The number of elements of a block.
    pub elements: usize,
    /// The number of bytes of a block.
    pub bytes: usize,
    /// Computes the values of one block.
    decode: fn(&[u8], &mut [f32]),
}

/// The types that can be read.
const TYPES: &[BlockType] = &[
    BlockType { id: 0, name: "F32", elements: 1, bytes: 4, decode: f32 },
    BlockType { id: 1, name: "F16", elements: 1, bytes: 2, decode: |block, out| out[0] = half(block, 0) },
    BlockType { id: 30, name: "BF16", elements: 1, bytes: 2, decode: bf16 },
    BlockType { id: 2, name: "Q4_0", elements: 32, bytes: 18, decode: q4_0 },
    BlockType { id: 3, name: "Q4_1", elements: 32, bytes: 20, decode: q4_1 },
    BlockType { id: 6, name: "Q5_0", elements: 32, bytes: 22, decode: q5_0 },
    BlockType { id: 8, name: "Q8_0", elements: 32, bytes: 34, decode: q8_0 },
    BlockType { id: 12, name: "Q4_K", elements: 256, bytes: 144, decode: q4_k },
    BlockType { id: 13, name: "Q5_K", elements: 256, bytes: 176, decode: q5_k },
    BlockType { id: 14, name: "Q6_K", elements: 256, bytes: 210, decode: q6_k },
];

/// The names of other types, for error messages.
const OTHERS: &[(u32, &str)] =
    &[(7, "Q5_1"), (10, "Q2_K"), (11, "Q3_K"), (20, "IQ4_NL"), (23, "IQ4_XS"), (39, "MXFP4")];

/// Returns the type with this number, or the reason why it cannot be read.
pub fn block_type(id: u32) -> Result<&'static BlockType, String> {
    TYPES.iter().find(|kind| kind.id == id).ok_or_else(|| {
        let name =
            OTHERS.iter().find(|other| other.0 == id).map_or(format!("number {id}"), |other| other.1.to_string());
        let known: Vec<_> = TYPES.iter().map(|kind| kind.name).collect();
        format!("has the type {name}, which is not read; {} are", known.join(", "))
    })
}

/// Returns the type with this name, which must exist.
pub fn named(name: &str) -> &'static BlockType {
    TYPES.iter().find(|kind| kind.name == name).expect("types are asked for by their names")
}

impl BlockType {
    /// Dequantizes whole blocks.
    pub fn values(&self, bytes: &[u8]) -> Vec<f32> {
        let mut values = vec![0.0; bytes.len() / self.bytes * self.elements];
        for (block, out) in bytes.chunks_exact(self.bytes).zip(values.chunks_exact_mut(self.elements)) {
            (self.decode)(block, out);
        }
        values
    }
}

/// Returns the F16 at byte `at`.
fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn f32(block: &[u8], out: &mut [f32]) {
    out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
}

fn bf16(block: &[u8], out: &mut [f32]) {
    out[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32();
}

/// Returns the four bits of element `i` of 32: the first 16 elements are the low halves of 16 bytes, the other elements are the high halves.
fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i % 16] >> (i / 16 * 4) & 15
}

/// Block layout: scale; 16 bytes of nibbles. Values: `scale · (q − 8)`.
fn q4_0(block: &[u8], out: &mut [f32]) {
    let scale = half(block, 0);
    for (i, out) in out.iter_mut().enumerate() {
        *out = scale * (f32::from(nibble(&block[2..], i)) - 8.0);
    }
}

/// Block layout: scale; minimum; 16 bytes of nibbles. Values: `scale · q + minimum`.
fn q4_1(block: &[u8], out: &mut [f32]) {
    let (scale, minimum) = (half(block, 0), half(block, 2));
    for (i, out) in out.iter_mut().enumerate() {
        *out = scale * f32::from(nibble(&block[4..], i)) + minimum;
    }
}

/// Block layout: scale; the fifth bits of 32 elements; 16 bytes of nibbles. Values: `scale · (q − 16)`.
fn q5_0(block: &[u8], out: &mut [f32]) {
    let scale = half(block, 0);
    for (i, out) in out.iter_mut().enumerate() {
        let fifth = block[2 + i / 8] >> (i % 8) & 1;
        *out = scale * (f32::from(nibble(&block[6..], i) | fifth << 4) - 16.0);
    }
}

/// Block layout: scale; 32 signed bytes. Values: `scale · q`.
fn q8_0(block: &[u8], out: &mut [f32]) {
    let scale = half(block, 0);
    for (out, &q) in out.iter_mut().zip(&block[2..]) {
        *out = scale * f32::from(q as i8);
    }
}

/// Returns the scale and the minimum of run `run` of 32 elements. The 12 bytes are eight pairs of 6-bit numbers. The first four pairs are the low 6
/// bits of bytes 0 to 3 and of bytes 4 to 7. The other four pairs have their low 4 bits in the halves of bytes 8 to 11, and their upper 2 bits in the
/// remaining bits of bytes 0 to 7.
fn scale_and_minimum(bytes: &[u8], run: usize) -> (f32, f32) {
    let lane = run % 4;
    let (scale, minimum) = match run < 4 {
        true => (bytes[lane] & 63, bytes[lane + 4] & 63),
        false => {
            let low = bytes[lane + 8];
            (low & 15 | bytes[lane] >> 6 << 4, low >> 4 | bytes[lane + 4] >> 6 << 4)
        }
    };
    (f32::from(scale), f32::from(minimum))
}

/// Returns the nibble of element `i` of 256. Each 32 bytes have 64 elements: first the low halves of all bytes, then the high halves.
fn nibble_of_runs(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15
}

/// Block layout: scale of scales; scale of minima; 12 bytes of [`scale_and_minimum`]; 128 bytes of nibbles. Values: `scale · scales · q − minimum ·
/// minima`.
fn q4_k(block: &[u8], out: &mut [f32]) {
    with_minima(block, out, |i| nibble_of_runs(&block[16..], i));
}

/// Block layout: like [`q4_k`], with 32 bytes of fifth bits before the nibbles. Bit `run` of each byte belongs to run `run` of 32 elements.
fn q5_k(block: &[u8], out: &mut [f32]) {
    with_minima(block, out, |i| nibble_of_runs(&block[48..], i) | (block[16 + i % 32] >> (i / 32) & 1) << 4);
}

fn with_minima(block: &[u8], out: &mut [f32], q: impl Fn(usize) -> u8) {
    let (scale_of_scales, scale_of_minima) = (half(block, 0), half(block, 2));
    for (run, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, minimum) = scale_and_minimum(&block[4..16], run);
        let (scale, minimum) = (scale_of_scales * scale, scale_of_minima * minimum);
        for (lane, out) in out.iter_mut().enumerate() {
            *out = scale * f32::from(q(run * 32 + lane)) - minimum;
        }
    }
}

/// Block layout: 128 bytes of nibbles; 64 bytes of two upper bits each; 16 signed scales of 16 elements; one scale of the block. Values: `scale ·
/// scales · (q − 32)`.
fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, high, scales, scale) = (&block[..128], &block[128..192], &block[192..208], half(block, 208));
    for (i, out) in out.iter_mut().enumerate() {
        // A block has two halves of 128 elements, each with four runs of 32 elements.
        let (part, run, lane) = (i / 128, i / 32 % 4, i % 32);
        let low = low[part * 64 + run % 2 * 32 + lane] >> (run / 2 * 4) & 15;
        let high = high[part * 32 + lane] >> (run * 2) & 3;
        let scale = scale * f32::from(scales[i / 16] as i8);
        *out = scale * (f32::from(low | high << 4) - 32.0);
    }
}
