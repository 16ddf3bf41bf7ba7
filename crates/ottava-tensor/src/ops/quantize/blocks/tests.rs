use super::*;
use crate::Device;
use crate::ops::destination::CastScale;
use crate::ops::destination::tests::{all, hostile};
use crate::ops::{quantize_into, transpose};
use crate::testing::{Tolerance, assert_close, gpu, normals, parity, quantized, values};

const FINER: [Granularity; 4] =
    [Granularity::PerRow, Granularity::Blocks1x128, Granularity::Blocks128x128, Granularity::MixedBlocks];

const PLAIN: CurrentScaling = CurrentScaling { epsilon: 0.0, power_of_two: false };

fn cast(x: &Tensor, format: DType, granularity: Granularity, how: CurrentScaling, copies: CodeCopies) -> Vec<Tensor> {
    let mut seen = CastStatistics::new(x.device(), 3).unwrap();
    let q = quantize_blocks(x, format, granularity, how, copies, &mut seen, 1).unwrap();
    all(&q, &seen)
}

fn e4m3(x: &Tensor, granularity: Granularity, copies: CodeCopies) -> QuantizedTensor {
    quantized(x, DType::E4M3, granularity, copies).unwrap()
}

/// Returns a matrix whose blocks differ by many orders of magnitude. Some blocks are zero.
fn uneven(name: &str, shape: &[usize], dtype: DType) -> Tensor {
    let mut x: Vec<f32> = hostile(name, shape, DType::F32).to_vec().unwrap();
    for (i, x) in x.iter_mut().enumerate() {
        let (row, column) = (i / shape[1], i % shape[1]);
        *x *= [1.0, 1e-3, 1e4, 0.0, 1e-38][(row / 5 + column / 100) % 5];
    }
    crate::ops::cast(&Tensor::from_slice(&Device::Cpu, shape, &x).unwrap(), dtype).unwrap()
}

#[test]
fn quantize_blocks_agrees_across_devices() {
    for (rows, columns) in [(1, 1), (3, 7), (16, 16), (1, 257), (131, 1), (129, 200), (257, 391)] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let inputs = [hostile("x", &[rows, columns], dtype), uneven("x", &[rows, columns], dtype)];
            for (format, how) in [
                (DType::E4M3, PLAIN),
                (DType::E5M2, CurrentScaling { power_of_two: true, ..PLAIN }),
                (DType::E4M3, CurrentScaling { epsilon: 1e-4, power_of_two: true }),
            ] {
                for granularity in FINER {
                    for copies in [CodeCopies::Rows, CodeCopies::Columns, CodeCopies::Both] {
                        parity(&inputs, Tolerance::Exact, |x| {
                            Ok(x.iter().flat_map(|x| cast(x, format, granularity, how, copies)).collect())
                        });
                    }
                }
            }
        }
    }
}

/// Tests rows of one block, and of clusters of two, four and eight blocks. The last block may be partly empty.
#[test]
fn wide_rows_agree_across_devices() {
    for (rows, columns) in [(17, 4096), (3, 4104), (2, 8200), (5, 14336), (1, 32768)] {
        for dtype in [DType::F32, DType::BF16] {
            let inputs = [hostile("x", &[rows, columns], dtype), uneven("x", &[rows, columns], dtype)];
            parity(&inputs, Tolerance::Exact, |x| {
                Ok(x.iter().flat_map(|x| cast(x, DType::E4M3, Granularity::PerRow, PLAIN, CodeCopies::Rows)).collect())
            });
        }
    }
}

/// Tests rows of one block, and of clusters of two blocks, in which a thread has several eights.
#[test]
fn many_rows_agree_across_devices() {
    if gpu().is_none() {
        return;
    }
    for (rows, columns) in [(515, 4104), (513, 24592)] {
        for dtype in [DType::F32, DType::BF16] {
            parity(&[hostile("x", &[rows, columns], dtype)], Tolerance::Exact, |x| {
                Ok(cast(&x[0], DType::E4M3, Granularity::PerRow, PLAIN, CodeCopies::Rows))
            });
        }
    }
}

#[test]
fn unaligned_views_are_cast_to_the_same_bits() {
    for dtype in [DType::F32, DType::BF16] {
        parity(&[hostile("x", &[1 + 33 * 136], dtype)], Tolerance::Exact, |x| {
            let x = x[0].rows(1, 1 + 33 * 136)?.reshape(&[33, 136])?;
            Ok(FINER.iter().flat_map(|&g| cast(&x, DType::E4M3, g, PLAIN, CodeCopies::Both)).collect())
        });
    }
}

#[test]
fn the_transposed_copy_is_the_cast_of_the_transpose() {
    for shape in [[5, 300], [130, 131], [257, 3]] {
        let x = uneven("x", &shape, DType::BF16);
        for granularity in FINER {
            let both = e4m3(&x, granularity, CodeCopies::Both);
            let turned = e4m3(&transpose(&x).unwrap(), granularity.of_columns(), CodeCopies::Rows);
            let alone = e4m3(&x, granularity, CodeCopies::Columns);
            let rest = both.clone().only_transposed();
            for q in [&alone, &rest] {
                assert!(q.codes.is_none() && q.transposed_scale_inv.is_none());
                let what = format!("{granularity:?} of {shape:?}");
                assert_close(&what, turned.codes.as_ref().unwrap(), q.transposed.as_ref().unwrap(), Tolerance::Exact);
                assert_close(&what, &turned.scale_inv, &q.scale_inv, Tolerance::Exact);
            }
            let rows = e4m3(&x, granularity, CodeCopies::Rows);
            assert_close("rows", &rows.codes.unwrap(), &both.codes.unwrap(), Tolerance::Exact);
            assert_close("scales", &rows.scale_inv, &both.scale_inv, Tolerance::Exact);
        }
    }
}

#[test]
fn dequantized_values_are_within_half_a_step() {
    for shape in [[3, 500], [129, 257]] {
        let x = normals("x", &shape, DType::F32);
        for granularity in FINER {
            let q = e4m3(&x, granularity, CodeCopies::Rows);
            let (codes, scales) = (q.codes.unwrap(), q.scale_inv);
            let (pitch, codes, scale_inv) = (codes.shape()[1], values(&codes), values(&scales));
            for (i, x) in values(&x).into_iter().enumerate() {
                let (row, column) = (i / shape[1], i % shape[1]);
                let scale_inv = scale_inv[granularity.scale_index(scales.shape(), row, column / 128)];
                let got = codes[row * pitch + column] * scale_inv;
                // The tolerance is half a step of 3 mantissa bits or of the smallest subnormal, plus two F32 roundings.
                let step = (x.abs() / 16.0).max(scale_inv * 2f64.powi(-10)) * (1.0 + 1e-6);
                assert!((got - x).abs() <= step, "{granularity:?}: {x} at {row}, {column} became {got}");
            }
        }
    }
}

#[test]
fn special_amaxes_give_the_documented_scales() {
    let tiny = f32::from_bits(1);
    let (bf16, least) = (half::bf16::MAX.to_f32(), half::bf16::from_bits(1).to_f32());
    for (amax, dtype, expected) in [
        (0.0, DType::F32, 1.0),
        (f32::NAN, DType::F32, 1.0),
        (f32::INFINITY, DType::F32, 1.0),
        (7.0, DType::F32, 64.0),
        (tiny, DType::F32, f32::MAX),
        (least, DType::BF16, bf16),
    ] {
        let x = Tensor::from_slice(&Device::Cpu, &[1, 2], &[0.0, -amax]).unwrap();
        let x = crate::ops::cast(&x, dtype).unwrap();
        for granularity in FINER {
            for copies in [CodeCopies::Rows, CodeCopies::Columns] {
                let q = e4m3(&x, granularity, copies);
                // In the transposed copy, columns have separate rows and blocks.
                let square = granularity.of_columns() == Granularity::Blocks128x128;
                let at = if copies == CodeCopies::Columns && !square { 1 } else { 0 };
                assert_eq!(q.scale_inv.to_vec::<f32>().unwrap()[at], 1.0 / expected, "{amax:e} {granularity:?}");
            }
        }
    }
    let x = Tensor::from_slice(&Device::Cpu, &[1, 1], &[3f32]).unwrap();
    for (how, expected) in
        [(CurrentScaling { power_of_two: true, ..PLAIN }, 128.0), (CurrentScaling { epsilon: 7.0, ..PLAIN }, 64.0)]
    {
        let mut seen = CastStatistics::new(&Device::Cpu, 1).unwrap();
        let q = quantize_blocks(&x, DType::E4M3, Granularity::PerRow, how, CodeCopies::Rows, &mut seen, 0).unwrap();
        // Padding has the scale of zeros, which is 1 or the scale of epsilon.
        let padding = if how.epsilon > 0.0 { expected } else { 1.0 };
        let scales = q.scale_inv.to_vec::<f32>().unwrap();
        assert_eq!((scales[0], scales[1]), (1.0 / expected, 1.0 / padding));
    }
}

#[test]
fn statistics_count_what_was_lost_once() {
    // The block with an infinity has scale 1, so 600 saturates and 1e-6 underflows. The other block loses nothing.
    let mut x = vec![0f32; 256];
    x[..4].copy_from_slice(&[f32::INFINITY, -600.0, 1e-6, f32::NAN]);
    x[128..130].copy_from_slice(&[1e-6, 1e-7]);
    let x = Tensor::from_slice(&Device::Cpu, &[1, 256], &x).unwrap();
    for (granularity, copies, expected) in [
        (Granularity::Blocks1x128, CodeCopies::Both, [2, 1]),
        (Granularity::Blocks128x128, CodeCopies::Both, [2, 1]),
        (Granularity::PerRow, CodeCopies::Both, [2, 3]),
        // Along the rows, each element is a separate block.
        (Granularity::Blocks1x128, CodeCopies::Columns, [1, 0]),
        (Granularity::MixedBlocks, CodeCopies::Both, [2, 1]),
        (Granularity::MixedBlocks, CodeCopies::Columns, [2, 1]),
    ] {
        let mut seen = CastStatistics::new(&Device::Cpu, 1).unwrap();
        quantize_blocks(&x, DType::E4M3, granularity, PLAIN, copies, &mut seen, 0).unwrap();
        let counts = [&seen.saturated, &seen.underflowed].map(|t| t.to_vec::<i64>().unwrap()[0]);
        assert_eq!(counts, expected, "{granularity:?}");
        assert_eq!(seen.amax.to_vec::<f32>().unwrap(), [f32::INFINITY]);
        assert_eq!(seen.elements.to_vec::<i64>().unwrap(), [256]);
    }
}

#[test]
fn empty_matrices_are_cast_and_per_tensor_scales_refused() {
    for shape in [[0, 5], [5, 0]] {
        let x = Tensor::zeros(&Device::Cpu, &shape, DType::BF16).unwrap();
        for granularity in FINER {
            let q = e4m3(&x, granularity, CodeCopies::Both);
            assert_eq!((q.rows, q.columns), (shape[0], shape[1]));
        }
    }
    let x = normals("x", &[2, 2], DType::F32);
    let mut seen = CastStatistics::new(&Device::Cpu, 1).unwrap();
    let tensor = Granularity::PerTensor;
    assert!(quantize_blocks(&x, DType::E4M3, tensor, PLAIN, CodeCopies::Rows, &mut seen, 0).is_err());
    assert!(quantize_blocks(&x, DType::BF16, Granularity::PerRow, PLAIN, CodeCopies::Rows, &mut seen, 0).is_err());
}

#[test]
fn quantize_into_overwrites_in_place() {
    for granularity in FINER {
        for copies in [CodeCopies::Rows, CodeCopies::Columns, CodeCopies::Both] {
            let shape = [37, 200];
            let inputs = [hostile("old", &shape, DType::BF16), uneven("new", &shape, DType::BF16)];
            parity(&inputs, Tolerance::Exact, |x| {
                let [mut before, mut fresh] =
                    [CastStatistics::new(x[0].device(), 1)?, CastStatistics::new(x[0].device(), 1)?];
                let mut into = quantize_blocks(&x[0], DType::E4M3, granularity, PLAIN, copies, &mut before, 0)?;
                before = CastStatistics::new(x[0].device(), 1)?;
                quantize_into(&x[1], CastScale::Own(granularity, PLAIN), &mut into, &mut before, 0)?;
                let new = quantize_blocks(&x[1], DType::E4M3, granularity, PLAIN, copies, &mut fresh, 0)?;
                for (new, into) in all(&new, &fresh).iter().zip(all(&into, &before)) {
                    assert_close(&format!("{granularity} {copies:?}"), new, &into, Tolerance::Exact);
                }
                Ok(all(&into, &before))
            });
        }
    }
}

#[test]
fn quantize_into_refuses_another_granularity() {
    let x = normals("x", &[20, 30], DType::F32);
    let mut into = e4m3(&x, Granularity::PerRow, CodeCopies::Both);
    let mut seen = CastStatistics::new(&Device::Cpu, 1).unwrap();
    let one = Tensor::from_slice(&Device::Cpu, &[1], &[1f32]).unwrap();
    for (scale, reason) in [
        (CastScale::Given(&one), "per-tensor scales cannot replace per-row scales"),
        (CastScale::Own(Granularity::Mx, PLAIN), "mx scales cannot replace per-row scales"),
        (CastScale::Own(Granularity::PerTensor, PLAIN), "a per-tensor scale must be given"),
    ] {
        let error = quantize_into(&x, scale, &mut into, &mut seen, 0).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}
