use super::*;
use crate::fp4;
use crate::fp8::{E4M3, E5M2, E8M0};
use crate::granularity::Granularity;
use crate::ops::destination::Fp8Output;
use crate::ops::destination::tests::{all, hostile};
use crate::ops::{
    Accumulation, CastScale, CodeCopies, CurrentScaling, Operand, SUMS, amax, compare_codes, dequantize, gemm_nt,
    gemm_nt_add, gemm_nt_plus, quantize_blocks, transpose,
};
use crate::testing::{Tolerance, normals, parity, quantized, relative_error, values};
use crate::{DType, Device};
use safetensors::SafeTensors;

const FORMATS: [Granularity; 5] = [
    Granularity::Mx,
    Granularity::Nvfp4,
    Granularity::Nvfp4Squares,
    Granularity::Nvfp4Stochastic,
    Granularity::Nvfp4Rows,
];

const PLAIN: CurrentScaling = CurrentScaling { epsilon: 0.0, power_of_two: false };

fn cast(x: &Tensor, format: DType, granularity: Granularity, copies: CodeCopies) -> Vec<Tensor> {
    let mut seen = CastStatistics::new(x.device(), 3).unwrap();
    let q = quantize_blocks(x, format, granularity, PLAIN, copies, &mut seen, 1).unwrap();
    all(&q, &seen)
}

/// Returns an array of `tests/data/microscaling.safetensors`.
fn recorded(name: &str, dtype: DType) -> Tensor {
    static FILE: &[u8] = include_bytes!("../../../tests/data/microscaling.safetensors");
    let file = SafeTensors::deserialize(FILE).expect("the recorded file is whole");
    let view = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    Tensor::from_bytes(&Device::Cpu, view.shape(), dtype, view.data()).expect("shape and bytes agree")
}

/// Compares the codes and scales of one copy. `code` and `scale` return the values of recorded codes and scales.
fn assert_copy(
    what: &str,
    copy: &str,
    (codes, scale_inv): (&Tensor, &Tensor),
    code: impl Fn(u8) -> f32,
    scale: impl Fn(u8) -> f32,
) {
    let expected = recorded(&format!("{what}/{copy}s"), DType::U8);
    let ([rows, columns], [padded, pitch]) = (expected.dims("codes").unwrap(), codes.dims("codes").unwrap());
    let got: Vec<f32> = values(codes).into_iter().map(|value| value as f32).collect();
    for (i, expected) in expected.host::<u8>().iter().enumerate() {
        let (got, expected) = (got[i / columns * pitch + i % columns], code(*expected));
        assert_eq!(got.to_bits(), expected.to_bits(), "{what}/{copy}s[{}, {}]", i / columns, i % columns);
    }
    let expected = recorded(&format!("{what}/{copy}_scales"), DType::U8);
    let blocks = expected.shape()[1];
    assert_eq!(expected.shape()[0], rows);
    for (i, expected) in expected.host::<u8>().iter().enumerate() {
        let got = scale_inv.host::<f32>()[i % blocks * padded + i / blocks];
        assert_eq!(got, scale(*expected), "{what}/{copy}_scales[{}, {}]", i / blocks, i % blocks);
    }
}

#[test]
fn mxfp8_has_the_codes_and_scales_of_torchao() {
    for (name, dtype) in [("f32", DType::F32), ("bf16", DType::BF16)] {
        let x = recorded(&format!("mx/{name}/x"), dtype);
        for (format_name, format) in [("e4m3", DType::E4M3), ("e5m2", DType::E5M2)] {
            let q = quantized(&x, format, Granularity::Mx, CodeCopies::Both).unwrap();
            let code = |code: u8| if format == DType::E4M3 { E4M3(code).to_f32() } else { E5M2(code).to_f32() };
            let (codes, turned) = (q.codes.unwrap(), q.transposed.unwrap());
            let scales = [&q.scale_inv, &**q.transposed_scale_inv.as_ref().unwrap()];
            for (copy, codes, scale_inv) in [("row", &codes, scales[0]), ("column", &turned, scales[1])] {
                let what = format!("mx/{name}/{format_name}");
                assert_copy(&what, copy, (codes, scale_inv), code, |scale| E8M0(scale).to_f32());
            }
        }
    }
}

#[test]
fn nvfp4_has_the_codes_and_scales_of_transformer_engine() {
    for (case, granularity) in
        [("1d", Granularity::Nvfp4), ("2d", Granularity::Nvfp4Squares), ("rht", Granularity::Nvfp4)]
    {
        let what = format!("nvfp4/{case}");
        let x = recorded(&format!("{what}/x"), DType::BF16);
        let q = quantized(&x, DType::E4M3, granularity, CodeCopies::Both).unwrap();
        let (codes, turned) = (q.codes.unwrap(), q.transposed.unwrap());
        let scales = [&q.scale_inv, &**q.transposed_scale_inv.as_ref().unwrap()];
        for (copy, codes, scale_inv) in [("row", &codes, scales[0]), ("column", &turned, scales[1])] {
            // The recorded columns of "1d" are not transformed.
            if (case, copy) == ("1d", "column") {
                continue;
            }
            assert_copy(&what, copy, (codes, scale_inv), fp4::value, |scale| E4M3(scale).to_f32());
            let amax = recorded(&format!("{what}/{copy}_amax"), DType::F32).host::<f32>()[0];
            let last = scale_inv.rows(scale_inv.shape()[0] - 1, scale_inv.shape()[0]).unwrap();
            assert!(last.host::<f32>().iter().all(|scale| *scale == 1.0 / (2688.0 / amax)), "{what}/{copy}");
        }
    }
}

/// A block of zeros has the smallest scale, and a block with infinity the largest, so that products of the block are not finite.
#[test]
fn blocks_without_a_finite_amax_have_scales() {
    let mut x = vec![1.0f32; 5 * 32];
    x[..32].fill(0.0);
    (x[32], x[64]) = (f32::INFINITY, f32::NAN);
    x[96..128].fill(f32::NAN);
    let x = Tensor::from_slice(&Device::Cpu, &[5, 32], &x).unwrap();
    let q = quantized(&x, DType::E4M3, Granularity::Mx, CodeCopies::Rows).unwrap();
    let scales: Vec<f32> = q.scale_inv.host::<f32>()[..5].to_vec();
    let of_one = 2f32.powi(-8);
    assert_eq!(scales, [2f32.powi(-127), 2f32.powi(127), of_one, 2f32.powi(-127), of_one]);
    let y = values(&dequantize(Operand::Rows(&q), 1, DType::F32).unwrap());
    assert!(y[..32].iter().all(|y| *y == 0.0) && y[32].is_infinite() && y[64].is_nan() && y[65] == 1.0);
    for granularity in [Granularity::Nvfp4, Granularity::Nvfp4Stochastic] {
        let q = quantized(&x, DType::E4M3, granularity, CodeCopies::Rows).unwrap();
        let y = values(&dequantize(Operand::Rows(&q), 1, DType::F32).unwrap());
        assert!(y[..32].iter().all(|y| *y == 0.0) && y[32] > 2000.0 && y[64].is_nan() && y[100].is_nan());
        let zeros = Tensor::zeros(&Device::Cpu, &[3, 20], DType::BF16).unwrap();
        let q = quantized(&zeros, DType::E4M3, granularity, CodeCopies::Rows).unwrap();
        assert!(values(&dequantize(Operand::Rows(&q), 1, DType::F32).unwrap()).iter().all(|y| *y == 0.0));
    }
}

#[test]
fn casts_to_small_blocks_agree_across_devices() {
    for (rows, columns) in [(1, 1), (3, 7), (16, 16), (1, 257), (131, 1), (33, 100), (129, 200)] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let inputs = [hostile("x", &[rows, columns], dtype), normals("x", &[rows, columns], dtype)];
            let formats = FORMATS.map(|granularity| (DType::E4M3, granularity));
            for (format, granularity) in formats.into_iter().chain([(DType::E5M2, Granularity::Mx)]) {
                for copies in [CodeCopies::Rows, CodeCopies::Columns, CodeCopies::Both] {
                    parity(&inputs, Tolerance::Exact, |x| {
                        Ok(x.iter().flat_map(|x| cast(x, format, granularity, copies)).collect())
                    });
                }
            }
            parity(&inputs[1..], Tolerance::Exact, |x| {
                Ok(vec![hadamard(&x[0], Hadamard::Forward)?, hadamard(&x[0], Hadamard::Inverse)?])
            });
        }
    }
}

#[test]
fn products_of_small_blocks_agree_across_devices() {
    for [m, n, k] in [[1, 1, 1], [5, 3, 40], [33, 17, 100], [64, 48, 256]] {
        let inputs = [[m, k], [n, k], [m, n], [k, m], [k, n]].map(|shape| normals("x", &shape, DType::BF16));
        for granularity in FORMATS {
            let of_weights = if granularity == Granularity::Mx { granularity } else { Granularity::Nvfp4Squares };
            // Sums run in another order, and a result is rounded to BF16 once.
            parity(&inputs, Tolerance::Steps(DType::BF16, 1.0), |x| {
                let a = quantized(&x[0], DType::E4M3, granularity, CodeCopies::Rows)?;
                let b = quantized(&x[1], DType::E4M3, of_weights, CodeCopies::Rows)?;
                let (a, b) = (Operand::Rows(&a), Operand::Rows(&b));
                let y = gemm_nt(a, b, DType::BF16, Accumulation::Exact)?;
                let plus = gemm_nt_plus(a, b, &x[2], Accumulation::Exact)?;
                let [dy, x] = [&x[3], &x[4]].map(|x| quantized(x, DType::E4M3, granularity, CodeCopies::Columns));
                let mut sum = crate::ops::cast(&y, DType::F32)?;
                let (dy, x) = (dy?, x?);
                gemm_nt_add(Operand::Columns(&dy), Operand::Columns(&x), &mut sum, Accumulation::Exact)?;
                Ok(vec![y, plus, crate::ops::cast(&sum, DType::BF16)?])
            });
        }
    }
}

/// The product of codes is the product of dequantized values. For columns, the Hadamard transforms of both operands cancel.
#[test]
fn products_are_those_of_dequantized_values() {
    let (m, n, k) = (37, 21, 83);
    let of = |name, shape: [usize; 2]| normals(name, &shape, DType::BF16);
    let exact = Accumulation::Exact;
    for granularity in FORMATS {
        for (a, b, is_columns) in [(of("a", [m, k]), of("b", [n, k]), false), (of("a", [k, m]), of("b", [k, n]), true)]
        {
            let copies = if is_columns { CodeCopies::Columns } else { CodeCopies::Rows };
            let [a, b] = [a, b].map(|x| quantized(&x, DType::E4M3, granularity, copies).unwrap());
            let [a, b] = [&a, &b].map(|q| if is_columns { Operand::Columns(q) } else { Operand::Rows(q) });
            let product = gemm_nt(a, b, DType::F32, exact).unwrap();
            let [a, b] = [a, b].map(|x| dequantize(x, 1, DType::F32).unwrap());
            let expected = gemm_nt(Operand::plain(&a), Operand::plain(&b), DType::F32, exact).unwrap();
            let error = relative_error(&values(&product), &values(&expected));
            assert!(error < 1e-6, "{granularity}, columns {is_columns}: {error:e}");
        }
    }
}

/// Dequantized values of both copies are near the matrix, and weights have the same values in both copies.
#[test]
fn both_copies_are_near_the_matrix() {
    let x = normals("x", &[50, 70], DType::BF16);
    for (granularity, most) in FORMATS.into_iter().zip([0.03, 0.11, 0.12, 0.15, 0.11]) {
        let q = quantized(&x, DType::E4M3, granularity, CodeCopies::Both).unwrap();
        let rows = dequantize(Operand::Rows(&q), 1, DType::F32).unwrap();
        let columns = transpose(&dequantize(Operand::Columns(&q), 1, DType::F32).unwrap()).unwrap();
        for (what, copy, operand) in [("rows", &rows, Operand::Rows(&q)), ("columns", &columns, Operand::Columns(&q))] {
            let error = relative_error(&values(copy), &values(&x));
            assert!(error > most / 2.0 && error < most, "{granularity}, {what}: {error}");
            let mut sums = Tensor::zeros(&Device::Cpu, &[1, SUMS], DType::F64).unwrap();
            compare_codes(operand, &x, &mut sums, 0).unwrap();
            let sums = values(&sums);
            assert!(((sums[3] / sums[1]).sqrt() - error).abs() < 0.01 * error, "{granularity}, {what}");
        }
        if granularity == Granularity::Nvfp4Squares {
            assert_eq!(values(&rows), values(&columns));
        }
    }
}

#[test]
fn the_transform_keeps_lengths_and_has_an_inverse() {
    let x = normals("x", &[3, 37], DType::F64);
    let y = hadamard(&x, Hadamard::Forward).unwrap();
    assert!(relative_error(&values(&hadamard(&y, Hadamard::Inverse).unwrap()), &values(&x)) < 1e-14);
    let squares = |x: &Tensor| values(&x.rows(0, 1).unwrap())[..16].iter().map(|x| x * x).sum::<f64>();
    assert!((squares(&y) / squares(&x) - 1.0).abs() < 1e-14 && values(&y)[0] != values(&x)[0]);
    // The last columns are not a whole transform.
    assert_eq!(values(&y)[32..37], values(&x)[32..37]);
}

/// The means of many casts are the values: the errors of stochastic rounding average out, and the errors of rounding to nearest do not.
#[test]
fn stochastic_rounding_averages_to_the_values() {
    // A block has one value of interest, an amax that determines the scale, and values that only change the random numbers.
    let rows = 4096;
    let noise = normals("noise", &[rows, 16], DType::F32);
    let mut x: Vec<f32> = noise.host::<f32>().iter().map(|x| x.clamp(-2.0, 2.0)).collect();
    x.chunks_mut(16).for_each(|row| (row[0], row[1]) = (6.0, 0.3));
    let x = Tensor::from_slice(&Device::Cpu, &[rows, 16], &x).unwrap();
    let mean = |granularity| {
        let q = quantized(&x, DType::E4M3, granularity, CodeCopies::Rows).unwrap();
        let y = values(&dequantize(Operand::Rows(&q), 1, DType::F32).unwrap());
        y.iter().skip(1).step_by(16).sum::<f64>() / rows as f64
    };
    // The standard deviation of the mean is 0.245 / 64.
    assert!((mean(Granularity::Nvfp4Stochastic) - 0.3).abs() < 0.012, "{}", mean(Granularity::Nvfp4Stochastic));
    assert!((mean(Granularity::Nvfp4) - 0.5).abs() < 1e-3, "{}", mean(Granularity::Nvfp4));
    assert_eq!(mean(Granularity::Nvfp4Stochastic), mean(Granularity::Nvfp4Stochastic));
}

/// Stochastic rounding of a row does not depend on the other rows, as long as the tensor has the same amax.
#[test]
fn random_numbers_belong_to_blocks() {
    let x = normals("x", &[40, 48], DType::BF16);
    let mut some = x.rows(7, 19).unwrap().to_vec::<half::bf16>().unwrap();
    let largest = values(&amax(&x).unwrap())[0];
    some[5] = half::bf16::from_f64(largest);
    let part = Tensor::from_slice(&Device::Cpu, &[12, 48], &some).unwrap();
    let [whole, part] = [&x, &part].map(|x| {
        let q = quantized(x, DType::E4M3, Granularity::Nvfp4Stochastic, CodeCopies::Rows).unwrap();
        values(&dequantize(Operand::Rows(&q), 1, DType::F32).unwrap())
    });
    assert_eq!(whole[8 * 48..19 * 48], part[48..]);
}

/// With one scale per row, a row does not depend on other rows, and a single row has the codes and scales of one scale per tensor.
#[test]
fn scales_of_rows_do_not_depend_on_other_rows() {
    let x = normals("x", &[20, 40], DType::BF16);
    let cast_rows = |x: &Tensor, granularity| {
        let q = quantized(x, DType::E4M3, granularity, CodeCopies::Rows).unwrap();
        values(&dequantize(Operand::Rows(&q), 1, DType::F32).unwrap())
    };
    let all = cast_rows(&x, Granularity::Nvfp4Rows);
    assert_ne!(all, cast_rows(&x, Granularity::Nvfp4));
    for row in 0..20 {
        let one = x.rows(row, row + 1).unwrap();
        assert_eq!(all[row * 40..(row + 1) * 40], cast_rows(&one, Granularity::Nvfp4), "row {row}");
    }
}

#[test]
fn nvfp4_has_no_settings_of_scales() {
    let x = normals("x", &[16, 16], DType::BF16);
    for (format, how) in
        [(DType::E5M2, PLAIN), (DType::E4M3, CurrentScaling { power_of_two: true, ..CurrentScaling::default() })]
    {
        let mut seen = CastStatistics::new(&Device::Cpu, 1).unwrap();
        let scale = CastScale::Own(Granularity::Nvfp4, how);
        let to = Fp8Output { format, scale, copies: CodeCopies::Rows, statistics: &mut seen, slot: 0 };
        let error = to.cast(&x).unwrap_err().to_string();
        assert!(error.contains("nvfp4 stores E2M1 values as E4M3 codes"), "{error}");
    }
}
