use super::*;
use crate::ops::{CastStatistics, Copies, quantize, transpose};
use crate::testing::{Tolerance, assert_close, normals, parity, values};

const SHAPES: [[usize; 3]; 5] = [[1, 1, 1], [3, 5, 7], [16, 32, 48], [65, 33, 129], [130, 96, 300]];

fn reference(a: &Tensor, b: &Tensor) -> Vec<f64> {
    let (k, x, y) = (a.shape()[1], values(a), values(b));
    let row = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum();
    x.chunks_exact(k).flat_map(|x| y.chunks_exact(k).map(move |y| row(x, y))).collect()
}

fn product(a: Operand, b: Operand, out: DType) -> Result<Tensor> {
    gemm_nt(a, b, out, Accumulation::Exact)
}

fn fp8(x: &Tensor, format: DType, scale: f32, copies: Copies) -> Result<QuantizedTensor> {
    let scale = Tensor::from_slice(&Device::Cpu, &[1], &[scale])?.to_device(x.device())?;
    quantize(x, format, &scale, copies, &mut CastStatistics::new(x.device(), 1)?, 0)
}

#[test]
fn plain_products_agree_with_f64_in_every_layout() {
    for [m, n, k] in SHAPES {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let (a, b) = (normals("a", &[m, k], dtype), normals("b", &[n, k], dtype));
            let (at, bt) = (transpose(&a).unwrap(), transpose(&b).unwrap());
            let expected = Tensor::from_slice(&Device::Cpu, &[m, n], &reference(&a, &b)).unwrap();
            let layouts = [
                (Operand::plain(&a), Operand::plain(&b)),
                (Operand::plain_transposed(&at), Operand::plain(&b)),
                (Operand::plain(&a), Operand::plain_transposed(&bt)),
                (Operand::plain_transposed(&at), Operand::plain_transposed(&bt)),
            ];
            let first = product(layouts[0].0, layouts[0].1, dtype).unwrap();
            // One rounding of the result, and K roundings of F32 sums, far below it for 16-bit types.
            let wide = crate::ops::cast(&first, DType::F64).unwrap();
            assert_close(
                "product",
                &expected,
                &wide,
                Tolerance::Steps(dtype, if dtype.size() < 4 { 1.0 } else { 40.0 }),
            );
            for (a, b) in layouts {
                assert_close("layouts", &first, &product(a, b, dtype).unwrap(), Tolerance::Exact);
            }
        }
    }
}

#[test]
fn fp8_products_agree_with_f64_in_both_copies() {
    for [m, n, k] in SHAPES {
        for (fa, fb) in [(DType::E4M3, DType::E4M3), (DType::E5M2, DType::E4M3), (DType::E4M3, DType::E5M2)] {
            let (a, b) = (normals("a", &[m, k], DType::BF16), normals("b", &[n, k], DType::BF16));
            let (qa, qb) = (fp8(&a, fa, 64.0, Copies::Both).unwrap(), fp8(&b, fb, 16.0, Copies::Both).unwrap());
            let y = product(Operand::Rows(&qa), Operand::Rows(&qb), DType::F32).unwrap();
            // The same numbers, decoded, through the plain product: bit for bit, because every product is exact.
            let decode = |q: &QuantizedTensor| {
                let width = QuantizedTensor::padded(k);
                let codes = values(q.codes.as_ref().unwrap());
                let rows =
                    codes.chunks(width).take(q.rows).flat_map(|r| r[..k].iter().map(|&v| half::f16::from_f64(v)));
                Tensor::from_slice(&Device::Cpu, &[q.rows, k], &rows.collect::<Vec<_>>()).unwrap()
            };
            let plain = product(Operand::plain(&decode(&qa)), Operand::plain(&decode(&qb)), DType::F32).unwrap();
            let scaled: Vec<f32> = plain.to_vec::<f32>().unwrap().iter().map(|y| y * (1.0 / 64.0 / 16.0)).collect();
            assert_eq!(y.to_vec::<f32>().unwrap(), scaled, "{fa} · {fb}, {m} x {n} x {k}");
            // Contracting the other dimension reads the transposed copy.
            let (at, bt) = (transpose(&a).unwrap(), transpose(&b).unwrap());
            let (qat, qbt) =
                (fp8(&at, fa, 64.0, Copies::Columns).unwrap(), fp8(&bt, fb, 16.0, Copies::Columns).unwrap());
            let other = product(Operand::Columns(&qat), Operand::Columns(&qbt), DType::F32).unwrap();
            assert_close("transposed copies", &y, &other, Tolerance::Exact);
        }
    }
}

#[test]
fn accumulation_adds_once_to_what_was_there() {
    let (a, b) = (normals("a", &[5, 7], DType::BF16), normals("b", &[3, 7], DType::BF16));
    let mut sum = normals("sum", &[5, 3], DType::F32);
    let before = sum.to_vec::<f32>().unwrap();
    let alone = product(Operand::plain(&a), Operand::plain(&b), DType::F32).unwrap().to_vec::<f32>().unwrap();
    gemm_nt_add(Operand::plain(&a), Operand::plain(&b), &mut sum, Accumulation::Exact).unwrap();
    let expected: Vec<f32> = before.iter().zip(&alone).map(|(a, b)| a + b).collect();
    assert_eq!(sum.to_vec::<f32>().unwrap(), expected);
    gemm_nt_into(Operand::plain(&a), Operand::plain(&b), &mut sum, Accumulation::Exact).unwrap();
    assert_eq!(sum.to_vec::<f32>().unwrap(), alone);
}

#[test]
fn a_residual_is_added_before_the_one_rounding() {
    for [m, n, k] in SHAPES {
        for dtype in [DType::F32, DType::BF16] {
            let (a, b, c) = (normals("a", &[m, k], dtype), normals("b", &[n, k], dtype), normals("c", &[m, n], dtype));
            let (a, b) = (Operand::plain(&a), Operand::plain(&b));
            let wide = product(a, b, DType::F32).unwrap().to_vec::<f32>().unwrap();
            let sum: Vec<f32> = wide.iter().zip(values(&c)).map(|(y, c)| y + c as f32).collect();
            let expected = crate::ops::cast(&Tensor::from_slice(&Device::Cpu, &[m, n], &sum).unwrap(), dtype).unwrap();
            let got = gemm_nt_plus(a, b, &c, Accumulation::Exact).unwrap();
            assert_close("product plus residual", &expected, &got, Tolerance::Exact);
        }
        for dtype in [DType::F32, DType::BF16] {
            let inputs = [normals("a", &[m, k], dtype), normals("b", &[n, k], dtype), normals("c", &[m, n], dtype)];
            // The library may round product and sum one after the other.
            let steps = if dtype == DType::F32 { 20.0 } else { 2.0 };
            parity(&inputs, Tolerance::Steps(dtype, steps), |t| {
                let sum = gemm_nt_plus(Operand::plain(&t[0]), Operand::plain(&t[1]), &t[2], Accumulation::Exact)?;
                if dtype == DType::F32 {
                    return Ok(vec![sum]);
                }
                let (qa, qb) =
                    (fp8(&t[0], DType::E4M3, 64.0, Copies::Rows)?, fp8(&t[1], DType::E4M3, 16.0, Copies::Rows)?);
                let fast = gemm_nt_plus(Operand::Rows(&qa), Operand::Rows(&qb), &t[2], Accumulation::Fast)?;
                Ok(vec![sum, fast])
            });
        }
    }
}

#[test]
fn products_agree_across_devices() {
    for [m, n, k] in SHAPES {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let inputs =
                [normals("a", &[m, k], dtype), normals("b", &[n, k], dtype), normals("c", &[m, n], DType::F32)];
            // Sums run in another order: a few roundings of F32, or one of the narrower result.
            let tolerance =
                if dtype == DType::F32 { Tolerance::Steps(DType::F32, 20.0) } else { Tolerance::Steps(dtype, 1.0) };
            parity(&inputs, tolerance, |t| {
                let (a, b) = (Operand::plain(&t[0]), Operand::plain(&t[1]));
                let (at, bt) = (transpose(&t[0])?, transpose(&t[1])?);
                let mut sum = t[2].duplicate()?;
                gemm_nt_add(
                    Operand::plain_transposed(&at),
                    Operand::plain_transposed(&bt),
                    &mut sum,
                    Accumulation::Exact,
                )?;
                Ok(vec![product(a, b, dtype)?, product(a, b, DType::F32)?, sum])
            });
        }
        for (fa, fb) in [(DType::E4M3, DType::E4M3), (DType::E5M2, DType::E4M3), (DType::E4M3, DType::E5M2)] {
            let inputs = [
                normals("a", &[m, k], DType::BF16),
                normals("b", &[n, k], DType::BF16),
                normals("c", &[m, n], DType::F32),
            ];
            // The tensor cores keep about 14 bits of each partial sum; measured 1e-4 at K = 11,008.
            parity(&inputs, Tolerance::Steps(DType::BF16, 1.0), |t| {
                let (qa, qb) = (fp8(&t[0], fa, 64.0, Copies::Both)?, fp8(&t[1], fb, 16.0, Copies::Both)?);
                let mut sum = t[2].duplicate()?;
                gemm_nt_add(Operand::Rows(&qa), Operand::Rows(&qb), &mut sum, Accumulation::Exact)?;
                let exact = product(Operand::Rows(&qa), Operand::Rows(&qb), DType::BF16)?;
                let fast = gemm_nt(Operand::Rows(&qa), Operand::Rows(&qb), DType::F32, Accumulation::Fast)?;
                Ok(vec![exact, fast, sum])
            });
        }
    }
}

#[test]
fn products_that_do_not_exist_are_errors() {
    let (a, b) = (normals("a", &[4, 8], DType::F32), normals("b", &[4, 9], DType::F32));
    let message = product(Operand::plain(&a), Operand::plain(&b), DType::F32).unwrap_err().to_string();
    assert_eq!(message, "gemm: b has shape [4, 9], expected [4, 8], to be contracted with a [4, 8]");
    let q = fp8(&a, DType::E5M2, 1.0, Copies::Rows).unwrap();
    assert!(product(Operand::Rows(&q), Operand::Rows(&q), DType::F32).is_err(), "E5M2 · E5M2");
    assert!(product(Operand::Columns(&q), Operand::plain(&a), DType::F32).is_err(), "codes that were not made");
}
