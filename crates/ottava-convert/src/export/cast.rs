//! Computes the FP8 codes of a linear with the casts of training.

use super::finite::expect_finite;
use super::format::Fp8Format;
use super::linears::{Group, Scale};
use ottava_checkpoint::WeightFiles;
use ottava_common::error::Result;
use ottava_tensor::ops::{CastStatistics, CodeCopies, amax, quantize, quantize_blocks, take_scale};
use ottava_tensor::{DType, Device, Granularity, QuantizedTensor, Tensor};
use std::ops::Range;

/// The codes and the scales of a fused linear.
pub(super) struct Codes(QuantizedTensor);

impl Group {
    /// Casts the weights of all parts together, like training.
    pub(super) fn cast(&self, weights: &WeightFiles, format: Fp8Format) -> Result<Codes> {
        let value = self.value(weights)?;
        let mut statistics = CastStatistics::new(&Device::Cpu, 1)?;
        let e4m3 = DType::E4M3;
        let scale = match (self.scale, format.granularity()) {
            (Scale::Given(scale), _) => Tensor::from_slice(&Device::Cpu, &[1], &[scale])?,
            (Scale::Own(how), Granularity::PerTensor) => take_scale(&mut amax(&value)?, e4m3, how)?,
            (Scale::Own(how), granularity) => {
                let codes = quantize_blocks(&value, e4m3, granularity, how, CodeCopies::Rows, &mut statistics, 0)?;
                return Ok(Codes(codes));
            }
        };
        Ok(Codes(quantize(&value, e4m3, &scale, CodeCopies::Rows, &mut statistics, 0)?))
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
        let codes = self.0.codes.as_ref().expect("codes along the rows were cast");
        let pitch = codes.shape()[1];
        let bytes = codes.rows(rows.start, rows.end)?.read_bytes()?;
        Ok(bytes.chunks(pitch).flat_map(|row| &row[..self.0.columns]).copied().collect())
    }

    /// Returns the scales of some rows, in the order of their grid. The rows must be whole blocks.
    pub(super) fn scales(&self, rows: Range<usize>) -> Result<Vec<f32>> {
        let scales = self.0.scale_inv.to_vec::<f32>()?;
        Ok(match self.0.granularity {
            Granularity::PerTensor => scales,
            Granularity::PerRow => scales[rows].to_vec(),
            _ => {
                let (pitch, columns) = (self.0.scale_inv.shape()[1], self.0.columns.div_ceil(128));
                let blocks = scales.chunks(pitch).take(rows.end / 128).skip(rows.start / 128);
                blocks.flat_map(|row| &row[..columns]).copied().collect()
            }
        })
    }
}
