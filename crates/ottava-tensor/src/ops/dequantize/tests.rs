use super::dequantize;
use crate::element::Float;
use crate::fp8::{E4M3, E5M2};
use crate::ops::{CastScale, CastStatistics, CodeCopies, CurrentScaling, Fp8Output, Operand, transpose};
use crate::testing::{Tolerance, normals, parity, values};
use crate::{DType, Granularity, QuantizedTensor, Result, Tensor};

fn quantized(x: &Tensor, format: DType, granularity: Granularity, copies: CodeCopies) -> Result<QuantizedTensor> {
    let mut statistics = CastStatistics::new(x.device(), 1)?;
    let scale = Tensor::from_slice(x.device(), &[1], &[3.5f32])?;
    let scale = match granularity {
        Granularity::PerTensor => CastScale::Given(&scale),
        finer => CastScale::Own(finer, CurrentScaling::default()),
    };
    Fp8Output { format, scale, copies, statistics: &mut statistics, slot: 0 }.cast(x)
}

const SHAPES: [[usize; 2]; 4] = [[1, 1], [3, 300], [130, 257], [256, 512]];
const GRANULARITIES: [Granularity; 5] = [
    Granularity::PerTensor,
    Granularity::PerRow,
    Granularity::Blocks1x128,
    Granularity::Blocks128x128,
    Granularity::MixedBlocks,
];

#[test]
fn values_agree_across_devices() {
    for shape in SHAPES {
        let x = normals("codes", &shape, DType::BF16);
        for granularity in GRANULARITIES {
            parity(std::slice::from_ref(&x), Tolerance::Exact, |x| {
                let mut all = Vec::new();
                for (format, dtype) in [(DType::E4M3, DType::BF16), (DType::E5M2, DType::F32)] {
                    let codes = quantized(&x[0], format, granularity, CodeCopies::Both)?;
                    for every in [1, 3] {
                        all.push(dequantize(Operand::Rows(&codes), every, dtype)?);
                        all.push(dequantize(Operand::Columns(&codes), every, dtype)?);
                    }
                }
                Ok(all)
            });
        }
    }
}

/// Each value is its code times the inverse scale of its row and block. If both copies of the codes have equal scales, they have the same values.
#[test]
fn values_are_codes_times_inverse_scales() {
    for shape in SHAPES {
        let x = normals("codes", &shape, DType::BF16);
        for granularity in GRANULARITIES.into_iter().chain([Granularity::Mx]) {
            for format in [DType::E4M3, DType::E5M2] {
                let q = quantized(&x, format, granularity, CodeCopies::Rows).unwrap();
                let codes = q.codes.as_ref().unwrap();
                let loaded: Vec<f32> = match format {
                    DType::E4M3 => codes.host::<E4M3>().iter().map(|code| code.load()).collect(),
                    _ => codes.host::<E5M2>().iter().map(|code| code.load()).collect(),
                };
                let (scales, granularity) = (values(&q.scale_inv), granularity.of_rows());
                let expected = (0..x.len()).map(|i| {
                    let (row, column) = (i / shape[1], i % shape[1]);
                    let block = granularity.block().map_or(0, |block| column / block);
                    let scale = scales[granularity.scale_index(q.scale_inv.shape(), row, block)];
                    f64::from(loaded[row * codes.shape()[1] + column] * scale as f32)
                });
                let all = dequantize(Operand::Rows(&q), 1, DType::F32).unwrap();
                let got = values(&all);
                assert_eq!(got, expected.collect::<Vec<_>>(), "{shape:?} {granularity} {format}");
                let sampled = values(&dequantize(Operand::Rows(&q), 3, DType::F32).unwrap());
                let rows = got.chunks(shape[1]).step_by(3).flatten();
                assert!(sampled.iter().eq(rows), "{shape:?} {granularity} {format}");
                if matches!(granularity, Granularity::PerTensor | Granularity::Blocks128x128) {
                    let columns = quantized(&x, format, granularity, CodeCopies::Columns).unwrap();
                    let columns = dequantize(Operand::Columns(&columns), 1, DType::F32).unwrap();
                    assert_eq!(values(&columns), values(&transpose(&all).unwrap()), "{granularity}");
                }
            }
        }
    }
}
