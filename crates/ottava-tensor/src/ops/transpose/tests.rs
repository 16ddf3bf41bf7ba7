use super::{transpose, transpose_codes};
use crate::ops::{CastStatistics, CodeCopies, CurrentScaling, quantize, quantize_blocks};
use crate::testing::{Tolerance, normals, parity};
use crate::{DType, Device, Granularity, QuantizedTensor, Tensor};

#[test]
fn transpose_agrees_across_devices() {
    for (rows, columns) in [(1, 1), (3, 7), (33, 31), (65, 128), (257, 100), (144, 272), (128, 384), (256, 128)] {
        for dtype in [DType::F32, DType::BF16, DType::E4M3] {
            let x = normals("transpose", &[rows, columns], DType::F32).read_bytes().unwrap();
            let x =
                Tensor::from_bytes(&Device::Cpu, &[rows, columns], dtype, &x[..rows * columns * dtype.size()]).unwrap();
            parity(&[x], Tolerance::Exact, |x| Ok(vec![transpose(&x[0])?]));
        }
    }
}

#[test]
fn transpose_swaps_rows_and_columns() {
    let x = Tensor::from_slice(&Device::Cpu, &[2, 3], &[1i32, 2, 3, 4, 5, 6]).unwrap();
    let y = transpose(&x).unwrap();
    assert_eq!((y.shape(), y.to_vec::<i32>().unwrap()), ([3, 2].as_slice(), vec![1, 4, 2, 5, 3, 6]));
}

#[test]
fn transposed_codes_are_those_that_a_cast_writes() {
    const HOW: CurrentScaling = CurrentScaling { epsilon: 0.0, power_of_two: false };
    for (rows, columns, shared) in [(256, 384, [true, true]), (48, 33, [true, false]), (144, 128, [true, false])] {
        for (granularity, shared) in [Granularity::PerTensor, Granularity::Blocks128x128]
            .into_iter()
            .zip(shared)
            .chain([(Granularity::PerRow, false), (Granularity::MixedBlocks, false)])
        {
            let x = normals("codes", &[rows, columns], DType::BF16);
            parity(&[x], Tolerance::Exact, |x| {
                let statistics = &mut CastStatistics::new(x[0].device(), 1)?;
                let both = match granularity {
                    Granularity::PerTensor => {
                        let scale = Tensor::from_slice(x[0].device(), &[1], &[37.5f32])?;
                        quantize(&x[0], DType::E4M3, &scale, CodeCopies::Both, statistics, 0)?
                    }
                    _ => quantize_blocks(&x[0], DType::E4M3, granularity, HOW, CodeCopies::Both, statistics, 0)?,
                };
                let all = |q: QuantizedTensor| vec![q.transposed.expect("it is transposed"), q.scale_inv];
                let expected = all(both.clone().only_transposed());
                let found = transpose_codes(&QuantizedTensor { transposed: None, ..both.clone() });
                assert_eq!(found.is_ok(), shared, "{granularity}, [{rows}, {columns}]");
                if let Ok(found) = found {
                    let bytes =
                        |tensors: &[Tensor]| tensors.iter().map(Tensor::read_bytes).collect::<crate::Result<Vec<_>>>();
                    assert!(bytes(&all(found))? == bytes(&expected)?, "{granularity}, [{rows}, {columns}]");
                    assert!(granularity == Granularity::PerTensor || transpose_codes(&both.only_rows()).is_err());
                }
                Ok(expected)
            });
        }
    }
}
