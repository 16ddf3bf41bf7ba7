//! Computes the codes of a linear with the casts of training.

use super::finite::expect_finite;
use super::format::{Fp8Format, Scheme};
use super::fp4::Packed;
use super::linears::{Group, Scale};
use ottava_checkpoint::WeightFiles;
use ottava_common::error::Result;
use ottava_tensor::ops::{CastStatistics, CodeCopies, amax, quantize, quantize_blocks, take_scale};
use ottava_tensor::{DType, Device, Granularity, QuantizedTensor, Tensor};
use std::ops::Range;

/// The codes and the scales of a fused linear.
pub(super) enum Codes {
    /// In FP8.
    Fp8(QuantizedTensor),
    /// In four bits.
    Fp4(Packed),
}

impl Group {
    /// Casts the weights of all parts together, like training.
    pub(super) fn cast(&self, weights: &WeightFiles, format: Fp8Format) -> Result<Codes> {
        let value = self.value(weights)?;
        match format.scheme {
            // Squares are the blocks of training. Strips lose less, and have the same layout.
            Scheme::Nvfp4 if self.recast.is_none() => {
                return Ok(Codes::Fp4(Packed::nvfp4(&value, Granularity::Nvfp4Squares)?));
            }
            Scheme::Nvfp4 => return Ok(Codes::Fp4(Packed::nvfp4(&value, Granularity::Nvfp4)?)),
            Scheme::Mxfp4 => return Ok(Codes::Fp4(Packed::mxfp4(&value)?)),
            Scheme::Dynamic | Scheme::Static | Scheme::Block => {}
        }
        let granularity = format.granularity().expect("each FP8 format has scales of a recipe");
        let mut statistics = CastStatistics::new(&Device::Cpu, 1)?;
        let e4m3 = DType::E4M3;
        let scale = match (self.scale, granularity) {
            (Scale::Given(scale), _) => Tensor::from_slice(&Device::Cpu, &[1], &[scale])?,
            (Scale::Own(how), Granularity::PerTensor) => take_scale(&mut amax(&value)?, e4m3, how)?,
            (Scale::Own(how), granularity) => {
                let codes = quantize_blocks(&value, e4m3, granularity, how, CodeCopies::Rows, &mut statistics, 0)?;
                return Ok(Codes::Fp8(codes));
            }
        };
        Ok(Codes::Fp8(quantize(&value, e4m3, &scale, CodeCopies::Rows, &mut statistics, 0)?))
    }

    /// Returns the stacked weights `[outputs, inputs]` in F32. A run stores the BF16 weights that its layers read, so the codes equal the codes of
    /// the run.
    fn value(&self, weights: &WeightFiles) -> Result<Tensor> {
        let mut value = Tensor::empty(&Device::Cpu, &[self.outputs(), self.inputs], DType::F32)?;
        for ((part, _), rows) in self.parts.iter().zip(self.rows()) {
            let name = format!("{part}.weight");
            let values = weights.values(&name)?;
            expect_finite(&name, &values.to_vec::<f32>()?)?;
            value.copy_from(rows.start, &values)?;
        }
        Ok(value)
    }

    /// Returns the rows of each part in the stacked weights.
    pub(super) fn rows(&self) -> Vec<Range<usize>> {
        let mut end = 0;
        let rows = self.parts.iter().map(|(_, outputs)| {
            let start = end;
            end += outputs;
            start..end
        });
        rows.collect()
    }
}

impl Codes {
    /// Returns the codes of some rows, without padding.
    pub(super) fn codes(&self, rows: Range<usize>) -> Result<Vec<u8>> {
        let cast = match self {
            Codes::Fp8(cast) => cast,
            Codes::Fp4(packed) => return Ok(packed.codes(rows)),
        };
        let codes = cast.codes.as_ref().expect("codes along the rows were cast");
        let pitch = codes.shape()[1];
        let bytes = codes.rows(rows.start, rows.end)?.read_bytes()?;
        Ok(bytes.chunks(pitch).flat_map(|row| &row[..cast.columns]).copied().collect())
    }
}

/// Returns the scales of some rows of FP8 codes, in the order of their grid. The rows must be whole blocks.
pub(super) fn scales(cast: &QuantizedTensor, rows: Range<usize>) -> Result<Vec<f32>> {
    let scales = cast.scale_inv.to_vec::<f32>()?;
    Ok(match cast.granularity {
        Granularity::PerTensor => scales,
        Granularity::PerRow => scales[rows].to_vec(),
        _ => {
            let (pitch, columns) = (cast.scale_inv.shape()[1], cast.columns.div_ceil(128));
            let blocks = scales.chunks(pitch).take(rows.end / 128).skip(rows.start / 128);
            blocks.flat_map(|row| &row[..columns]).copied().collect()
        }
    })
}
