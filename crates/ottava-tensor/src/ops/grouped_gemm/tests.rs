use super::*;
use crate::ops::gemm::wgmma::{EXACT_WIDTHS, Product, Shape, WIDTHS};
use crate::ops::{CastStatistics, CodeCopies, clear_unused_rows, dequantize, gemm_nt, quantize, transpose};
use crate::testing::{Tolerance, assert_close, gpu, normals, parity, quantized, values};
use crate::{DType, Device, Granularity, QuantizedTensor};

const EXACT: Accumulation = Accumulation::Exact;

/// Sizes of groups: no row, one row, around a multiple of 128, and all rows in one group.
const COUNTS: [&[usize]; 4] = [&[3], &[1, 0, 127, 2], &[128, 0, 0, 129, 5], &[0, 0, 300]];

/// Returns normal values `[P, width]`, with zeros in the rows of no group, and with unused rows at the end.
fn rows(name: &str, counts: &[usize], width: usize, dtype: DType) -> Tensor {
    let total = Groups::capacity(counts.iter().sum(), counts.len());
    let mut x = normals(name, &[total, width], DType::F32).to_vec::<f32>().unwrap();
    let mut first = 0;
    for count in counts {
        let end = first + count.next_multiple_of(Groups::ALIGNMENT);
        x[(first + count) * width..end * width].fill(0.0);
        first = end;
    }
    x[first * width..].fill(0.0);
    let x = Tensor::from_slice(&Device::Cpu, &[total, width], &x).unwrap();
    crate::ops::cast(&x, dtype).unwrap()
}

fn cast_of(x: &Tensor, granularity: Granularity, format: DType) -> Result<QuantizedTensor> {
    match granularity {
        Granularity::PerTensor => {
            let (scale, mut seen) =
                (Tensor::from_slice(x.device(), &[1], &[48f32])?, CastStatistics::new(x.device(), 1)?);
            quantize(x, format, &scale, CodeCopies::Both, &mut seen, 0)
        }
        _ => quantized(x, format, granularity, CodeCopies::Both),
    }
}

/// Computes a product, and sets its unused rows to zero: they are undefined on a GPU.
fn product_of(a: Operand, b: Operand, groups: &Groups, out: DType, accumulation: Accumulation) -> Result<Tensor> {
    let mut y = grouped_gemm_nt(a, b, groups, out, accumulation)?;
    clear_unused_rows(&mut y, groups)?;
    Ok(y)
}

/// Returns the starts and the sizes of groups.
fn spans(counts: &[usize]) -> Vec<(usize, usize)> {
    let starts = counts.iter().scan(0, |at, count| {
        let start = *at;
        *at += count.next_multiple_of(Groups::ALIGNMENT);
        Some(start)
    });
    starts.zip(counts.iter().copied()).collect()
}

#[test]
fn plain_products_are_a_loop_of_single_products() {
    for counts in COUNTS {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let (g, n, k) = (counts.len(), 9, 21);
            let (a, w) = (rows("a", counts, k, dtype), normals("w", &[g * n, k], dtype));
            let dy = rows("dy", counts, n, dtype);
            let groups = Groups::new(&Device::Cpu, counts).unwrap();
            let y = grouped_gemm_nt(Operand::plain(&a), Operand::plain(&w), &groups, dtype, EXACT).unwrap();
            let dx =
                grouped_gemm_nt(Operand::plain(&dy), Operand::plain_transposed(&w), &groups, dtype, EXACT).unwrap();
            let mut dw = normals("dw", &[g * n, k], dtype);
            let (before, transposed) =
                (dw.duplicate().unwrap(), [Operand::plain_transposed(&dy), Operand::plain_transposed(&a)]);
            grouped_wgrad_add(transposed[0], transposed[1], &groups, &mut dw, EXACT).unwrap();
            let mut alone = before.duplicate().unwrap();
            grouped_wgrad_into(transposed[0], transposed[1], &groups, &mut alone, EXACT).unwrap();
            let (mut covered, total) = (vec![false; a.shape()[0]], a.shape()[0]);
            for (i, (start, count)) in spans(counts).into_iter().enumerate() {
                let part = |x: &Tensor| x.rows(start, start + count).unwrap();
                let own = w.rows(i * n, (i + 1) * n).unwrap();
                let expected = gemm_nt(Operand::plain(&part(&a)), Operand::plain(&own), dtype, EXACT).unwrap();
                assert_close("fprop", &expected, &part(&y), Tolerance::Exact);
                let expected = gemm_nt(Operand::plain(&part(&dy)), Operand::plain_transposed(&own), dtype, EXACT);
                assert_close("dgrad", &expected.unwrap(), &part(&dx), Tolerance::Exact);
                let mut expected = before.rows(i * n, (i + 1) * n).unwrap().duplicate().unwrap();
                let (dy, a) = (part(&dy), part(&a));
                let (dy, a) = (Operand::plain_transposed(&dy), Operand::plain_transposed(&a));
                if count > 0 {
                    crate::ops::gemm_nt_add(dy, a, &mut expected, EXACT).unwrap();
                }
                assert_close("wgrad", &expected, &dw.rows(i * n, (i + 1) * n).unwrap(), Tolerance::Exact);
                let alone = alone.rows(i * n, (i + 1) * n).unwrap();
                match count {
                    0 => assert!(values(&alone).iter().all(|&v| v == 0.0), "a group without rows"),
                    _ => assert_close("wgrad", &gemm_nt(dy, a, dtype, EXACT).unwrap(), &alone, Tolerance::Exact),
                }
                covered[start..start + count].fill(true);
            }
            for row in (0..total).filter(|&row| !covered[row]) {
                let zero = |y: &Tensor| values(&y.rows(row, row + 1).unwrap()).iter().all(|&v| v == 0.0);
                assert!(zero(&y) && zero(&dx), "row {row} belongs to no group");
            }
        }
    }
}

/// Returns the product of dequantized values, in F64.
fn reference(a: &[f64], b: &[f64], k: usize) -> Vec<f64> {
    let row = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum();
    a.chunks_exact(k).flat_map(|x| b.chunks_exact(k).map(move |y| row(x, y))).collect()
}

#[test]
fn fp8_products_are_those_of_the_values_of_codes() {
    let (counts, n, k): (&[usize], _, _) = (&[130, 0, 1, 128], 128, 256);
    let (groups, count) = (Groups::new(&Device::Cpu, counts).unwrap(), counts.len());
    for (of_rows, of_weights, format) in [
        (Granularity::PerTensor, Granularity::PerTensor, DType::E5M2),
        (Granularity::PerRow, Granularity::PerRow, DType::E4M3),
        (Granularity::Blocks1x128, Granularity::Blocks128x128, DType::E4M3),
        (Granularity::Mx, Granularity::Mx, DType::E4M3),
    ] {
        let (x, dy) = (rows("x", counts, k, DType::BF16), rows("dy", counts, n, DType::BF16));
        let w = normals("w", &[count * n, k], DType::BF16);
        let x = cast_of(&x, of_rows, DType::E4M3).unwrap();
        let (w, dy) = (cast_of(&w, of_weights, DType::E4M3).unwrap(), cast_of(&dy, of_rows, format).unwrap());
        let y = grouped_gemm_nt(Operand::Rows(&x), Operand::Rows(&w), &groups, DType::F32, EXACT).unwrap();
        let dx = grouped_gemm_nt(Operand::Rows(&dy), Operand::Columns(&w), &groups, DType::F32, EXACT).unwrap();
        let mut dw = Tensor::zeros(&Device::Cpu, &[count * n, k], DType::F32).unwrap();
        grouped_wgrad_into(Operand::Columns(&dy), Operand::Columns(&x), &groups, &mut dw, EXACT).unwrap();
        let of_rows_of = |q: &QuantizedTensor| dequantize(Operand::Rows(q), 1, DType::F32).unwrap();
        let of_columns =
            |q: &QuantizedTensor| transpose(&dequantize(Operand::Columns(q), 1, DType::F32).unwrap()).unwrap();
        for (i, (start, rows)) in spans(counts).into_iter().enumerate().filter(|(_, (_, rows))| *rows > 0) {
            let part = |x: &Tensor, from: usize, n: usize| x.rows(from, from + n).unwrap();
            let turned = |x: Tensor| values(&transpose(&x.duplicate().unwrap()).unwrap());
            let close = |what: &str, expected: Vec<f64>, got: Tensor| {
                let expected = Tensor::from_slice(&Device::Cpu, got.shape(), &expected).unwrap();
                let got = crate::ops::cast(&got.duplicate().unwrap(), DType::F64).unwrap();
                // Sums are F32, with one rounding per partial sum and per block.
                assert_close(&format!("{what} {of_rows}"), &expected, &got, Tolerance::Steps(DType::F32, 40.0));
            };
            let a = values(&part(&of_rows_of(&x), start, rows));
            close("fprop", reference(&a, &values(&part(&of_rows_of(&w), i * n, n)), k), part(&y, start, rows));
            let a = values(&part(&of_rows_of(&dy), start, rows));
            close("dgrad", reference(&a, &turned(part(&of_columns(&w), i * n, n)), n), part(&dx, start, rows));
            let (a, b) = (turned(part(&of_columns(&dy), start, rows)), turned(part(&of_columns(&x), start, rows)));
            close("wgrad", reference(&a, &b, rows), part(&dw, i * n, n));
        }
    }
}

#[test]
fn grouped_products_agree_across_devices() {
    for counts in COUNTS {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let (g, n, k) = (counts.len(), 72, 136);
            let inputs = [
                rows("a", counts, k, dtype),
                normals("w", &[g * n, k], dtype),
                rows("dy", counts, n, dtype),
                normals("dw", &[g * n, k], DType::F32),
            ];
            // F32 sums run in another order.
            let tolerance = Tolerance::Steps(dtype, if dtype == DType::F32 { 40.0 } else { 2.0 });
            parity(&inputs, tolerance, |t| {
                let groups = Groups::new(t[0].device(), counts)?;
                let mut sum = t[3].duplicate()?;
                grouped_wgrad_add(
                    Operand::plain_transposed(&t[2]),
                    Operand::plain_transposed(&t[0]),
                    &groups,
                    &mut sum,
                    EXACT,
                )?;
                Ok(vec![
                    product_of(Operand::plain(&t[0]), Operand::plain(&t[1]), &groups, dtype, EXACT)?,
                    product_of(Operand::plain(&t[2]), Operand::plain_transposed(&t[1]), &groups, dtype, EXACT)?,
                    sum,
                ])
            });
        }
        // Sizes `[outputs, inputs]`: multiples of 128, and sizes that are not. With block scales, only the inputs may end within a block.
        for (of_rows, of_weights, format, [n, k]) in [
            (Granularity::PerTensor, Granularity::PerTensor, DType::E5M2, [256, 128]),
            (Granularity::PerTensor, Granularity::PerTensor, DType::E5M2, [208, 144]),
            (Granularity::PerRow, Granularity::PerRow, DType::E4M3, [256, 128]),
            (Granularity::PerRow, Granularity::PerRow, DType::E4M3, [208, 144]),
            (Granularity::Blocks1x128, Granularity::Blocks128x128, DType::E4M3, [256, 128]),
            (Granularity::Blocks1x128, Granularity::Blocks128x128, DType::E4M3, [256, 208]),
        ] {
            let g = counts.len();
            let inputs = [
                rows("x", counts, k, DType::BF16),
                normals("w", &[g * n, k], DType::BF16),
                rows("dy", counts, n, DType::BF16),
            ];
            for accumulation in [EXACT, Accumulation::Fast] {
                if of_rows.is_blocks() && accumulation == Accumulation::Fast {
                    continue;
                }
                // Fast accumulation in tensor cores keeps 14 bits.
                let steps = if accumulation == EXACT { 2.0 } else { 8.0 };
                parity(&inputs, Tolerance::Steps(DType::BF16, steps), |t| {
                    let groups = Groups::new(t[0].device(), counts)?;
                    let (x, dy) = (cast_of(&t[0], of_rows, DType::E4M3)?, cast_of(&t[2], of_rows, format)?);
                    let w = cast_of(&t[1], of_weights, DType::E4M3)?;
                    let mut dw = Tensor::zeros(t[0].device(), &[g * n, k], DType::F32)?;
                    grouped_wgrad_into(Operand::Columns(&dy), Operand::Columns(&x), &groups, &mut dw, accumulation)?;
                    Ok(vec![
                        product_of(Operand::Rows(&x), Operand::Rows(&w), &groups, DType::BF16, accumulation)?,
                        product_of(Operand::Rows(&dy), Operand::Columns(&w), &groups, DType::BF16, accumulation)?,
                        dw,
                    ])
                });
            }
        }
    }
}

/// The size of the result determines the width of tiles.
#[test]
fn the_width_of_tiles_changes_no_bit() {
    let Some(device) = gpu() else { return };
    let Device::Cuda(gpu) = &device else { unreachable!("it is a GPU") };
    let counts = [200, 0, 57, 700];
    for [n, k] in [[208, 144], [768, 320], [1040, 1024]] {
        let g = counts.len();
        let x = rows("x", &counts, k, DType::BF16).to_device(&device).unwrap();
        let w = normals("w", &[g * n, k], DType::BF16).to_device(&device).unwrap();
        let dy = rows("dy", &counts, n, DType::BF16).to_device(&device).unwrap();
        let of = |x: &Tensor, granularity, format| cast_of(x, granularity, format).unwrap();
        let by_row = [&x, &w, &dy].map(|x| of(x, Granularity::PerRow, DType::E4M3));
        let [of_tensor, hybrid] =
            [(&x, DType::E4M3), (&dy, DType::E5M2)].map(|(x, format)| of(x, Granularity::PerTensor, format));
        let groups = Groups::new(&device, &counts).unwrap();
        let p = x.shape()[0];
        let of_width = |a: Operand, b: Operand, n: usize, terms: [usize; 3], width, is_exact| {
            let mut y = Tensor::zeros(&device, &[p, n], DType::BF16).unwrap();
            let shape = Shape::of_rows(p, n);
            let product = Product::of(a, b, DType::BF16, shape, width, is_exact, false).expect("a variant");
            product.enqueue(gpu, &groups, terms, &mut y).unwrap();
            y.read_bytes().unwrap()
        };
        let product =
            |a: Operand, b: Operand, n: usize, terms: [usize; 3], width| of_width(a, b, n, terms, width, false);
        let wgrad = |a: Operand, b: Operand, out, width| {
            let mut dw = Tensor::zeros(&device, &[g * n, k], out).unwrap();
            let product = Product::of(a, b, out, Shape::of_weights(g, n, k), width, false, false).expect("a variant");
            product.enqueue_wgrad(gpu, &groups, &mut dw, true).unwrap();
            dw.read_bytes().unwrap()
        };
        let all = WIDTHS.map(|width| {
            let mut all = vec![
                product(Operand::plain(&x), Operand::plain(&w), n, [k, n, 0], width),
                product(Operand::Rows(&by_row[0]), Operand::Rows(&by_row[1]), n, [k, n, 0], width),
                product(Operand::plain(&dy), Operand::plain_transposed(&w), k, [n, 0, n], width),
            ];
            for out in [DType::BF16, DType::F32] {
                all.push(wgrad(Operand::plain_transposed(&dy), Operand::plain_transposed(&x), out, width));
                all.push(wgrad(Operand::Columns(&by_row[2]), Operand::Columns(&by_row[0]), out, width));
                all.push(wgrad(Operand::Columns(&hybrid), Operand::Columns(&of_tensor), out, width));
            }
            all
        });
        let strips = of(&x, Granularity::Blocks1x128, DType::E4M3);
        let squares = of(&w, Granularity::Blocks128x128, DType::E4M3);
        let exact = EXACT_WIDTHS.map(|width| {
            let of_exact = |a, b| of_width(Operand::Rows(a), Operand::Rows(b), n, [k, n, 0], width, true);
            let mut exact = vec![of_exact(&by_row[0], &by_row[1])];
            if n % 128 == 0 {
                exact.push(of_exact(&strips, &squares));
            }
            exact
        });
        let pairs = all[0].iter().zip(&all[1]).chain(exact[0].iter().zip(&exact[1]));
        for (i, (wide, narrow)) in pairs.enumerate() {
            assert!(wide == narrow, "product {i} of {n} x {k}");
            assert!(wide.iter().any(|&byte| byte != 0));
        }
    }
}

#[test]
fn grouped_products_repeat_bit_for_bit() {
    for device in std::iter::once(Device::Cpu).chain(gpu()) {
        let counts = [200, 0, 57];
        let (x, w) = (rows("x", &counts, 128, DType::BF16), normals("w", &[3 * 128, 128], DType::BF16));
        let (x, w) = (x.to_device(&device).unwrap(), w.to_device(&device).unwrap());
        let (x, w) = (
            cast_of(&x, Granularity::Blocks1x128, DType::E4M3).unwrap(),
            cast_of(&w, Granularity::Blocks128x128, DType::E4M3).unwrap(),
        );
        let groups = Groups::new(&device, &counts).unwrap();
        let product = || {
            let y = product_of(Operand::Rows(&x), Operand::Rows(&w), &groups, DType::BF16, EXACT).unwrap();
            let mut dw = Tensor::zeros(&device, &[3 * 128, 128], DType::F32).unwrap();
            grouped_wgrad_into(Operand::Columns(&x), Operand::Columns(&x), &groups, &mut dw, EXACT).unwrap();
            [y.read_bytes().unwrap(), dw.read_bytes().unwrap()]
        };
        assert!(product() == product());
    }
}

#[test]
fn misfits_are_errors() {
    let x = |rows, columns| normals("x", &[rows, columns], DType::BF16);
    let groups = Groups::new(&Device::Cpu, &[3, 5]).unwrap();
    let (a, w) = (x(384, 16), x(7, 16));
    let message = |a: Operand, b: Operand| grouped_gemm_nt(a, b, &groups, DType::BF16, EXACT).unwrap_err().to_string();
    assert_eq!(
        message(Operand::plain(&a), Operand::plain(&w)),
        "grouped_gemm: b has shape [7, 16], expected a matrix [N, 16] for each of 2 groups"
    );
    let (a, w) = (x(384, 16), x(2 * 24, 16));
    let (a, w) = (
        cast_of(&a, Granularity::Blocks1x128, DType::E4M3).unwrap(),
        cast_of(&w, Granularity::Blocks128x128, DType::E4M3).unwrap(),
    );
    assert_eq!(
        message(Operand::Rows(&a), Operand::Rows(&w)),
        "grouped_gemm: 128x128 scales of b: the 24 rows of a group are not whole blocks of 128"
    );
}
