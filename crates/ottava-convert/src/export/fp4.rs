//! Weights in four bits, for the formats NVFP4 and MXFP4 of compressed-tensors.

use ottava_common::error::Result;
use ottava_tensor::fp4::{self, MAX_E2M1};
use ottava_tensor::fp8::{E4M3, E8M0};
use ottava_tensor::ops::{CastStatistics, CodeCopies, CurrentScaling, amax, quantize_blocks};
use ottava_tensor::{DType, Device, Granularity, Tensor};
use std::ops::Range;

/// A matrix `[outputs, inputs]` in four bits.
pub(super) struct Packed {
    /// The codes of two neighbouring inputs in a byte, the first in the low bits, `[outputs, inputs / 2]`.
    codes: Vec<u8>,
    /// The scales of blocks, E4M3 in NVFP4 and E8M0 in MXFP4, `[outputs, inputs / block]`.
    scales: Vec<u8>,
    /// The number that scales of NVFP4 are divided by.
    pub(super) global_scale: Option<f32>,
    /// The number of inputs.
    inputs: usize,
    /// The number of inputs that share a scale.
    block: usize,
}

impl Packed {
    /// Casts `value`, F32 `[outputs, inputs]`, to NVFP4 with these blocks, as training does.
    pub(super) fn nvfp4(value: &Tensor, granularity: Granularity) -> Result<Packed> {
        let mut statistics = CastStatistics::new(&Device::Cpu, 1)?;
        let (copies, how) = (CodeCopies::Rows, CurrentScaling::default());
        let cast = quantize_blocks(value, DType::E4M3, granularity, how, copies, &mut statistics, 0)?;
        let codes = cast.codes.expect("codes along the rows were cast");
        let ([padded, pitch], inputs, block) = (codes.dims("export: codes")?, cast.columns, 16);
        let codes = codes.read_bytes()?;
        let rows = codes.chunks(pitch).take(cast.rows);
        let values = rows.flat_map(|row| &row[..inputs]).map(|code| fp4::code(E4M3(*code).to_f32()));
        let scale_inv = cast.scale_inv.to_vec::<f32>()?;
        let blocks = inputs / block;
        let scales = (0..cast.rows * blocks).map(|at| scale_inv[at % blocks * padded + at / blocks]);
        Ok(Packed {
            codes: pairs(values),
            scales: scales.map(|scale| E4M3::from_f32(scale).0).collect(),
            global_scale: Some(fp4::nvfp4_scale(amax(value)?.to_vec::<f32>()?[0])),
            inputs,
            block,
        })
    }

    /// Casts `value`, F32 `[outputs, inputs]`, to MXFP4. The scale of a block is the smallest power of two with which no value is beyond 6.
    pub(super) fn mxfp4(value: &Tensor) -> Result<Packed> {
        let ([_, inputs], block) = (value.dims("export: a weight")?, 32);
        let values = value.to_vec::<f32>()?;
        let largest = |block: &[f32]| block.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        let scales: Vec<_> =
            values.chunks(block).map(|block| E8M0::rounded_up(largest(block) * (1.0 / MAX_E2M1))).collect();
        let codes = values.chunks(block).zip(&scales).flat_map(|(values, scale)| {
            let factor = E8M0(254 - scale.0).to_f32();
            values.iter().map(move |value| fp4::code(fp4::nearest(value * factor)))
        });
        Ok(Packed {
            codes: pairs(codes),
            scales: scales.iter().map(|scale| scale.0).collect(),
            global_scale: None,
            inputs,
            block,
        })
    }

    /// Returns the codes of some rows.
    pub(super) fn codes(&self, rows: Range<usize>) -> Vec<u8> {
        self.codes[rows.start * self.inputs / 2..rows.end * self.inputs / 2].to_vec()
    }

    /// Returns the scales of the blocks of some rows.
    pub(super) fn scales(&self, rows: Range<usize>) -> Vec<u8> {
        let of_row = self.inputs / self.block;
        self.scales[rows.start * of_row..rows.end * of_row].to_vec()
    }

    /// Returns the values of some rows that readers compute in F32: code times scale, and in NVFP4 the scale is first divided by the global scale.
    pub(super) fn values(&self, rows: Range<usize>) -> Vec<f32> {
        let scale = |at: usize| match self.global_scale {
            Some(global) => E4M3(self.scales[at]).to_f32() / global,
            None => E8M0(self.scales[at]).to_f32(),
        };
        let code = |element: usize| self.codes[element / 2] >> (4 * (element % 2)) & 0xf;
        let elements = rows.start * self.inputs..rows.end * self.inputs;
        elements.map(|element| fp4::value(code(element)) * scale(element / self.block)).collect()
    }
}

/// Packs two codes per byte, the first in the low bits.
fn pairs(codes: impl Iterator<Item = u8>) -> Vec<u8> {
    let codes: Vec<u8> = codes.collect();
    codes.chunks(2).map(|pair| pair[0] | pair[1] << 4).collect()
}
