use super::*;
use crate::cuda::GpuModel;
use crate::ops::{CastStatistics, CodeCopies, quantize, transpose};
use crate::testing::{Tolerance, assert_close, gpu, normals, parity, quantized, values};
use crate::{Device, Granularity, QuantizedTensor};

const SHAPES: [[usize; 3]; 5] = [[1, 1, 1], [3, 5, 7], [16, 32, 48], [65, 33, 129], [130, 96, 300]];

fn reference(a: &Tensor, b: &Tensor) -> Vec<f64> {
    let (k, x, y) = (a.shape()[1], values(a), values(b));
    let row = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum();
    x.chunks_exact(k).flat_map(|x| y.chunks_exact(k).map(move |y| row(x, y))).collect()
}

pub(super) fn product(a: Operand, b: Operand, out: DType) -> Result<Tensor> {
    gemm_nt(a, b, out, Accumulation::Exact)
}

pub(super) fn fp8(x: &Tensor, format: DType, scale: f32, copies: CodeCopies) -> Result<QuantizedTensor> {
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
            // The result is rounded once. F32 sums are rounded K times, which is negligible for 16-bit types.
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
            let (qa, qb) = (fp8(&a, fa, 64.0, CodeCopies::Both).unwrap(), fp8(&b, fb, 16.0, CodeCopies::Both).unwrap());
            let y = product(Operand::Rows(&qa), Operand::Rows(&qb), DType::F32).unwrap();
            // The result equals the plain product of the decoded values bit for bit, because every term is exact.
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
            // A product that contracts the other dimension reads the transposed copy.
            let (at, bt) = (transpose(&a).unwrap(), transpose(&b).unwrap());
            let (qat, qbt) =
                (fp8(&at, fa, 64.0, CodeCopies::Columns).unwrap(), fp8(&bt, fb, 16.0, CodeCopies::Columns).unwrap());
            let other = product(Operand::Columns(&qat), Operand::Columns(&qbt), DType::F32).unwrap();
            assert_close("transposed copies", &y, &other, Tolerance::Exact);
        }
    }
}

#[test]
fn accumulation_adds_to_the_previous_value() {
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
fn residual_addition_rounds_once() {
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
            // The library may round the product and the sum separately.
            let steps = if dtype == DType::F32 { 20.0 } else { 2.0 };
            parity(&inputs, Tolerance::Steps(dtype, steps), |t| {
                let sum = gemm_nt_plus(Operand::plain(&t[0]), Operand::plain(&t[1]), &t[2], Accumulation::Exact)?;
                if dtype == DType::F32 {
                    return Ok(vec![sum]);
                }
                let (qa, qb) = (
                    fp8(&t[0], DType::E4M3, 64.0, CodeCopies::Rows)?,
                    fp8(&t[1], DType::E4M3, 16.0, CodeCopies::Rows)?,
                );
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
            // Sums run in another order, which causes a few roundings in F32, or one rounding in a narrower type.
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
            // Tensor cores keep about 14 bits of each partial sum; the measured error at K = 11,008 is 1e-4.
            parity(&inputs, Tolerance::Steps(DType::BF16, 1.0), |t| {
                let (qa, qb) = (fp8(&t[0], fa, 64.0, CodeCopies::Both)?, fp8(&t[1], fb, 16.0, CodeCopies::Both)?);
                let mut sum = t[2].duplicate()?;
                gemm_nt_add(Operand::Rows(&qa), Operand::Rows(&qb), &mut sum, Accumulation::Exact)?;
                let exact = product(Operand::Rows(&qa), Operand::Rows(&qb), DType::BF16)?;
                let fast = gemm_nt(Operand::Rows(&qa), Operand::Rows(&qb), DType::F32, Accumulation::Fast)?;
                Ok(vec![exact, fast, sum])
            });
        }
    }
}

/// The supported pairs of granularities, except per-tensor scales.
const FINER: [[Granularity; 2]; 4] = [
    [Granularity::PerRow, Granularity::PerRow],
    [Granularity::Blocks1x128, Granularity::Blocks1x128],
    [Granularity::Blocks1x128, Granularity::Blocks128x128],
    [Granularity::Blocks128x128, Granularity::Blocks1x128],
];

/// Returns a matrix whose rows and columns differ in magnitude.
fn uneven(name: &str, [rows, columns]: [usize; 2]) -> Tensor {
    let x = values(&normals(name, &[rows, columns], DType::F32));
    let size = |i: usize| 2f64.powi((i % 7) as i32 - 3) * 8f64.powi((i / 128) as i32);
    let x: Vec<f32> =
        x.into_iter().enumerate().map(|(i, x)| (x * size(i / columns) * size(i % columns)) as f32).collect();
    Tensor::from_slice(&Device::Cpu, &[rows, columns], &x).unwrap()
}

/// Returns the dequantized values.
fn decode(q: &QuantizedTensor) -> Tensor {
    let codes = q.codes.as_ref().unwrap();
    let (pitch, codes, scale_inv) = (codes.shape()[1], values(codes), values(&q.scale_inv));
    let at = |row, column: usize| {
        codes[row * pitch + column] * scale_inv[q.granularity.scale_index(q.scale_inv.shape(), row, column / 128)]
    };
    let x: Vec<f64> = (0..q.rows).flat_map(|r| (0..q.columns).map(move |c| (r, c))).map(|(r, c)| at(r, c)).collect();
    Tensor::from_slice(&Device::Cpu, &[q.rows, q.columns], &x).unwrap()
}

#[test]
fn products_of_rows_and_blocks_agree_with_f64_in_both_copies() {
    for [m, n, k] in SHAPES {
        for [ga, gb] in FINER {
            let (a, b) = (uneven("a", [m, k]), uneven("b", [n, k]));
            let (qa, qb) = (
                quantized(&a, DType::E5M2, ga, CodeCopies::Rows).unwrap(),
                quantized(&b, DType::E4M3, gb, CodeCopies::Rows).unwrap(),
            );
            let expected = reference(&decode(&qa), &decode(&qb));
            let expected = Tensor::from_slice(&Device::Cpu, &[m, n], &expected).unwrap();
            let y = product(Operand::Rows(&qa), Operand::Rows(&qb), DType::F32).unwrap();
            let wide = crate::ops::cast(&y, DType::F64).unwrap();
            // F32 sums are rounded K times.
            assert_close(
                &format!("{ga} · {gb}, {m} x {n} x {k}"),
                &expected,
                &wide,
                Tolerance::Steps(DType::F32, 40.0),
            );
            // A product that contracts the other dimension reads the transposed copy and its scales.
            let (at, bt) = (transpose(&a).unwrap(), transpose(&b).unwrap());
            for copies in [CodeCopies::Columns, CodeCopies::Both] {
                let qat = quantized(&at, DType::E5M2, ga, copies).unwrap();
                let qbt = quantized(&bt, DType::E4M3, gb, copies).unwrap();
                let other = product(Operand::Columns(&qat), Operand::Columns(&qbt), DType::F32).unwrap();
                assert_close("transposed copies", &y, &other, Tolerance::Exact);
                if ga == Granularity::Blocks128x128 {
                    let mixed = quantized(&at, DType::E5M2, Granularity::MixedBlocks, copies).unwrap();
                    let other = product(Operand::Columns(&mixed), Operand::Columns(&qbt), DType::F32).unwrap();
                    assert_close("transposed squares", &y, &other, Tolerance::Exact);
                }
            }
        }
    }
}

/// The product of each block of 128 along K is scaled before it is added, bit for bit.
#[test]
fn partial_sums_are_scaled_before_they_are_added() {
    let (a, b) = (uneven("a", [3, 300]), uneven("b", [5, 300]));
    let part = |x: &Tensor, block: usize| {
        let (rows, x) = (x.shape()[0], x.to_vec::<f32>().unwrap());
        let x: Vec<f32> = x.chunks(300).flat_map(|row| row.chunks(128).nth(block).unwrap().to_vec()).collect();
        Tensor::from_slice(&Device::Cpu, &[rows, x.len() / rows], &x).unwrap()
    };
    let [ga, gb] = [Granularity::Blocks1x128, Granularity::Blocks128x128];
    let y = |a: &Tensor, b: &Tensor| {
        let (a, b) = (
            quantized(a, DType::E4M3, ga, CodeCopies::Rows).unwrap(),
            quantized(b, DType::E4M3, gb, CodeCopies::Rows).unwrap(),
        );
        product(Operand::Rows(&a), Operand::Rows(&b), DType::F32).unwrap().to_vec::<f32>().unwrap()
    };
    let mut sum = vec![0f32; 15];
    for block in 0..3 {
        sum.iter_mut().zip(y(&part(&a, block), &part(&b, block))).for_each(|(sum, y)| *sum += y);
    }
    assert_eq!(y(&a, &b), sum);
}

/// Tests every product that Hopper supports. One message lists all failures.
#[test]
fn products_of_rows_and_blocks_agree_across_devices() {
    let Some(gpu) = gpu() else { return };
    let (mut failures, mut worst, mut count) = (Vec::new(), 0f64, 0);
    let formats = [(DType::E4M3, DType::E4M3), (DType::E5M2, DType::E4M3), (DType::E4M3, DType::E5M2)];
    for [m, n, k] in [[1, 1, 1], [3, 5, 7], [65, 33, 129], [130, 96, 300], [257, 384, 512]] {
        let (a, b, c) = (uneven("a", [m, k]), uneven("b", [n, k]), normals("c", &[m, n], DType::F32));
        for [ga, gb] in FINER {
            for (fa, fb) in formats {
                for out in [DType::BF16, DType::F32] {
                    for (add, accumulation) in
                        [(false, Accumulation::Exact), (true, Accumulation::Exact), (false, Accumulation::Fast)]
                    {
                        if ga.is_blocks() && accumulation == Accumulation::Fast {
                            continue;
                        }
                        let run = |device: &Device| {
                            let [a, b] = [&a, &b].map(|x| x.to_device(device));
                            let (a, b) =
                                (quantized(&a?, fa, ga, CodeCopies::Rows)?, quantized(&b?, fb, gb, CodeCopies::Rows)?);
                            let (a, b) = (Operand::Rows(&a), Operand::Rows(&b));
                            if !add {
                                return gemm_nt(a, b, out, accumulation);
                            }
                            let mut sum = crate::ops::cast(&c.to_device(device)?, out)?;
                            gemm_nt_add(a, b, &mut sum, accumulation)?;
                            Ok(sum)
                        };
                        count += 1;
                        let what =
                            format!("{ga} {fa} · {gb} {fb} to {out}, {m} x {n} x {k}, {accumulation:?}, add {add}");
                        match run(&gpu) {
                            Ok(y) => {
                                let (x, y) = (values(&run(&Device::Cpu).unwrap()), values(&y));
                                let rms = (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64).sqrt();
                                let apart = x.iter().zip(&y).map(|(x, y)| (x - y).abs() / x.abs().max(rms));
                                let apart = apart.fold(0.0, |a: f64, b| if b > a || b.is_nan() { b } else { a });
                                worst = worst.max(apart);
                                // One step of BF16, or two if product and sum are rounded separately. Tensor cores keep about 14 bits of a partial
                                // sum.
                                let allowed = DType::BF16.epsilon() * if add { 2.0 } else { 1.0 };
                                if apart.is_nan() || apart > allowed {
                                    failures.push(format!("{what}: {apart:e} apart"));
                                }
                            }
                            Err(error) => failures.push(format!("{what}: {error}")),
                        }
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} of {count} products:\n{}", failures.len(), failures.join("\n"));
    eprintln!("{count} products of rows and blocks, at most {worst:e} apart");
}

/// With constant weights, a product of up to 128 rows has a separate kernel. A product of few tiles with row scales is scaled after the product.
#[test]
fn products_of_few_rows_agree_across_devices() {
    for m in [1, 8, 9, 16, 17, 40, 64, 70, 128, 130, 200] {
        // Tiles are divided into one, two, three and six parts. Rows of 203 and 1030 results are not aligned.
        for [n, k] in [[8, 16], [203, 128], [384, 1104], [1000, 6224], [1030, 4112], [4104, 2048]] {
            let inputs = [
                normals("a", &[m, k], DType::BF16),
                normals("b", &[n, k], DType::BF16),
                normals("c", &[m, n], DType::BF16),
            ];
            // The result is rounded once; product and residual may be rounded separately.
            parity(&inputs, Tolerance::Steps(DType::BF16, 2.0), |t| {
                let by_rows = |x| quantized(x, DType::E4M3, Granularity::PerRow, CodeCopies::Rows);
                let by_tensor = |x| fp8(x, DType::E4M3, 64.0, CodeCopies::Rows);
                let cast = [[by_rows(&t[0])?, by_rows(&t[1])?], [by_tensor(&t[0])?, by_tensor(&t[1])?]];
                let products = || {
                    let (a, b) = (Operand::plain(&t[0]), Operand::plain(&t[1]));
                    let mut all = vec![product(a, b, DType::BF16)?, product(a, b, DType::F32)?];
                    all.push(gemm_nt_plus(a, b, &t[2], Accumulation::Exact)?);
                    for [a, b] in &cast {
                        let (a, b) = (Operand::Rows(a), Operand::Rows(b));
                        all.push(product(a, b, DType::BF16)?);
                        all.push(gemm_nt_plus(a, b, &t[2], Accumulation::Exact)?);
                        // Up to 128 rows, the kernel always accumulates exactly. With fast accumulation, sums of cuBLASLt differ more.
                        if m <= 128 {
                            all.push(gemm_nt_plus(a, b, &t[2], Accumulation::Fast)?);
                        }
                    }
                    Ok(all)
                };
                match t[0].device() {
                    Device::Cuda(gpu) => {
                        gpu.synchronize()?;
                        gpu.with_constant_weights(products)
                    }
                    _ => products(),
                }
            });
        }
    }
}

/// Returns the rows of `x` with the indices `rows`.
fn rows_of(x: &Tensor, rows: &[usize]) -> Tensor {
    let mut all = Tensor::zeros(x.device(), &[rows.len(), x.shape()[1]], x.dtype()).unwrap();
    for (at, &row) in rows.iter().enumerate() {
        all.copy_from(at, &x.rows(row, row + 1).unwrap()).unwrap();
    }
    all
}

/// In products of 64 rows, the bits of each row do not depend on its place or on the other rows. Tests the kernels for few rows, and kernels of the
/// library for types, scales and sizes that the kernels for few rows do not support.
#[test]
fn rows_do_not_depend_on_other_rows() {
    let Some(device) = gpu() else { return };
    let Device::Cuda(gpu) = &device else { unreachable!("it is a GPU") };
    let shuffled: Vec<usize> = (0..64).map(|at| (at * 29 + 5) % 64).collect();
    let repeated: Vec<usize> = (0..64).map(|at| [7, 40][at % 2]).collect();
    let mut failures = Vec::new();
    for [n, k] in [[8, 16], [37, 129], [200, 128], [384, 1104], [1000, 528], [1030, 4112], [4104, 2048], [512, 14336]] {
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            let of = |name, shape: &[usize]| normals(name, shape, dtype).to_device(&device).unwrap();
            let (a, b, c) = (of("a", &[64, k]), of("b", &[n, k]), of("c", &[64, n]));
            let products = |rows: &[usize]| {
                let (a, c) = (rows_of(&a, rows), rows_of(&c, rows));
                let (x, y) = (Operand::plain(&a), Operand::plain(&b));
                let mut all = vec![
                    ("plain".to_string(), product(x, y, DType::F32)?),
                    ("plus".to_string(), gemm_nt_plus(x, y, &c, Accumulation::Exact)?),
                ];
                if dtype == DType::BF16 {
                    let cast = |x: &Tensor| fp8(x, DType::E4M3, 64.0, CodeCopies::Rows);
                    let mut pairs = vec![("one scale".to_string(), cast(&a)?, cast(&b)?)];
                    for [of_a, of_b] in FINER.into_iter().filter(|[of_a, _]| *of_a != Granularity::Blocks128x128) {
                        let cast = |x, granularity| quantized(x, DType::E4M3, granularity, CodeCopies::Rows);
                        pairs.push((format!("{of_a} · {of_b}"), cast(&a, of_a)?, cast(&b, of_b)?));
                    }
                    for (what, a, b) in &pairs {
                        all.push((
                            what.clone(),
                            gemm_nt_plus(Operand::Rows(a), Operand::Rows(b), &c, Accumulation::Exact)?,
                        ));
                    }
                }
                Ok(all)
            };
            let run = |rows: &[usize]| -> Vec<(String, Tensor)> {
                gpu.synchronize().unwrap();
                let found: Result<_> = gpu.with_batch_invariance(|| gpu.with_constant_weights(|| products(rows)));
                found.unwrap()
            };
            let in_order = run(&(0..64).collect::<Vec<_>>());
            for rows in [&shuffled, &repeated] {
                for ((what, expected), (_, found)) in in_order.iter().zip(run(rows)) {
                    let (expected, found) = (values(&rows_of(expected, rows)), values(&found));
                    let apart = expected.iter().zip(&found).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                    if apart > 0 {
                        failures.push(format!("{what} of {dtype}, {n} x {k}: {apart} of {} values", expected.len()));
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "depend on other rows:\n{}", failures.join("\n"));
}

#[test]
fn unsupported_products_are_errors() {
    let (a, b) = (normals("a", &[4, 8], DType::F32), normals("b", &[4, 9], DType::F32));
    let message = product(Operand::plain(&a), Operand::plain(&b), DType::F32).unwrap_err().to_string();
    assert_eq!(message, "gemm: b has shape [4, 9], expected [4, 8], to be contracted with a [4, 8]");
    let q = fp8(&a, DType::E5M2, 1.0, CodeCopies::Rows).unwrap();
    assert!(product(Operand::Rows(&q), Operand::Rows(&q), DType::F32).is_err(), "E5M2 · E5M2");
    assert!(product(Operand::Columns(&q), Operand::plain(&a), DType::F32).is_err(), "codes that were not made");
    let tensor = fp8(&a, DType::E4M3, 1.0, CodeCopies::Rows).unwrap();
    let [row, along, square] = [Granularity::PerRow, Granularity::Blocks1x128, Granularity::Blocks128x128]
        .map(|granularity| quantized(&a, DType::E4M3, granularity, CodeCopies::Rows).unwrap());
    for [a, b] in [[&tensor, &row], [&row, &along], [&along, &tensor], [&square, &square]] {
        let message = product(Operand::Rows(a), Operand::Rows(b), DType::F32).unwrap_err().to_string();
        assert_eq!(
            message,
            format!("gemm: the hardware has no product of {} · {} scales", a.granularity, b.granularity)
        );
    }
    let fast = gemm_nt(Operand::Rows(&along), Operand::Rows(&square), DType::F32, Accumulation::Fast);
    assert_eq!(fast.unwrap_err().to_string(), "gemm: 1x128 scales have no fast accumulation");
    let other = QuantizedTensor { scale_inv: tensor.scale_inv.clone(), ..along.clone() };
    assert!(product(Operand::Rows(&other), Operand::Rows(&along), DType::F32).is_err(), "scales of another kind");
}

#[test]
fn dry_products_are_checked_and_counted() {
    const MIB: usize = 1 << 20;
    let product = |a: &Tensor, b: &Tensor| product(Operand::plain(a), Operand::plain(b), DType::F32);
    // The pool rounds 4 MB to multiples of 2 MiB, and small sizes to 512 bytes. The CPU packs both operands in panels of 8 and 32 rows.
    let small = 10usize * 999 * 4;
    let on_gpu = 2 * 4 * MIB + small.next_multiple_of(512);
    let on_cpu = 2 * 4_000_000 + (1000 + 1024) * 1000 * 4;
    for (device, bytes) in [(Device::dry_gpu(GpuModel::h200()), on_gpu), (Device::Cpu.dry(), on_cpu)] {
        let x = Tensor::from_slice(&device, &[1000, 1000], &vec![1f32; 1_000_000]).unwrap();
        let y = product(&x, &x).unwrap();
        assert_eq!(y.rows(0, 1).unwrap().to_vec::<f32>().unwrap(), vec![0.0; 1000]);
        let narrow = Tensor::zeros(&device, &[10, 999], DType::F32).unwrap();
        assert!(product(&x, &narrow).is_err(), "arguments are checked as always");
        drop((x, y, narrow));
        assert_eq!(device.tracker().unwrap().take_peak().bytes, bytes, "{device}");
        assert_eq!(device.tracker().unwrap().take_peak().bytes, 0, "{device}");
    }
}

/// A row of `a` gives the same bits in a small and in a large product. If `a` has few rows, `b` is read in place; otherwise a packed copy is read.
#[test]
fn products_of_few_rows_have_the_bits_of_packed_ones() {
    use crate::Granularity::{self, Blocks1x128, Blocks128x128, Mx, PerRow, PerTensor};
    let many = 40;
    for (n, k) in [(1, 1), (37, 129), (48, 300)] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let (a, b) = (normals("a", &[many, k], dtype), normals("b", &[n, k], dtype));
            let addend = normals("c", &[many, n], dtype);
            let of = |rows: usize| {
                let a = a.rows(0, rows).unwrap();
                let (a, b) = (Operand::plain(&a), Operand::plain(&b));
                let plus = gemm_nt_plus(a, b, &addend.rows(0, rows).unwrap(), Accumulation::Exact).unwrap();
                [product(a, b, DType::F32).unwrap(), plus]
            };
            let all = of(many);
            for rows in [1, 2, 3, 8, 13, 32] {
                for (few, all) in of(rows).iter().zip(&all) {
                    let what = format!("{rows} rows of {dtype}, {n} x {k}");
                    assert_close(&what, few, &all.rows(0, rows).unwrap(), Tolerance::Exact);
                }
            }
        }
        let pairs: [(Granularity, Granularity); 5] = [
            (PerTensor, PerTensor),
            (PerRow, PerRow),
            (Blocks1x128, Blocks1x128),
            (Blocks1x128, Blocks128x128),
            (Mx, Mx),
        ];
        for (of_a, of_b) in pairs {
            let cast = |x: &Tensor, granularity, format| match granularity {
                PerTensor => fp8(x, format, 64.0, CodeCopies::Rows).unwrap(),
                own => quantized(x, format, own, CodeCopies::Rows).unwrap(),
            };
            for format in [DType::E4M3, DType::E5M2] {
                let (a, b) = (normals("a", &[many, k], DType::BF16), normals("b", &[n, k], DType::BF16));
                let b = cast(&b, of_b, format);
                let of = |rows: usize| {
                    let a = cast(&a.rows(0, rows).unwrap(), of_a, DType::E4M3);
                    product(Operand::Rows(&a), Operand::Rows(&b), DType::BF16).unwrap()
                };
                let all = of(many).rows(0, 5).unwrap();
                let what = format!("{of_a} · {of_b}, {format}, {n} x {k}");
                assert_close(&what, &of(5), &all, Tolerance::Exact);
            }
        }
    }
}
