//! Products whose sums have the order that `mod.rs` states.

use super::tests::{fp8, product};
use super::*;
use crate::ops::CodeCopies;
use crate::testing::{Tolerance, gpu, normals, parity, quantized, values};
use std::ops::Range;

/// A row of a product has the same bits in products of any number of rows and at any place: in the kernels for few rows, and in the kernels for many
/// rows.
#[test]
fn rows_have_the_same_bits_in_products_of_all_sizes() {
    let Some(device) = gpu() else { return };
    let Device::Cuda(gpu) = &device else { unreachable!("it is a GPU") };
    const ROWS: usize = 700;
    let spans = [0..1, 5..12, 3..19, 40..70, 60..124, 100..228, 3..132, 200..457, 1..700];
    let mut failures = Vec::new();
    for [n, k] in [
        [8, 16],
        [104, 136],
        [384, 1104],
        [1000, 4224],
        [1002, 272],
        [1028, 4112],
        [6144, 2048],
        [512, 14336],
        [34000, 1040],
    ] {
        let of = |name, shape: &[usize]| normals(name, shape, DType::BF16).to_device(&device).unwrap();
        let (a, b, c) = (of("a", &[ROWS, k]), of("b", &[n, k]), of("c", &[ROWS, n]));
        let by_tensor = |x: &Tensor| fp8(x, DType::E4M3, 64.0, CodeCopies::Rows).unwrap();
        let finer = |x: &Tensor, granularity| quantized(x, DType::E4M3, granularity, CodeCopies::Rows).unwrap();
        let weights = [by_tensor(&b), finer(&b, Granularity::PerRow), finer(&b, Granularity::Blocks128x128)];
        let products = |rows: Range<usize>| -> Vec<(&str, Tensor)> {
            let (a, c) = (a.rows(rows.start, rows.end).unwrap(), c.rows(rows.start, rows.end).unwrap());
            let inputs = [by_tensor(&a), finer(&a, Granularity::PerRow), finer(&a, Granularity::Blocks1x128)];
            gpu.synchronize().unwrap();
            let (x, y) = (Operand::plain(&a), Operand::plain(&b));
            let found: Result<_> = gpu.with_batch_invariance(|| {
                let mut all = vec![
                    ("bf16", product(x, y, DType::BF16)?),
                    ("bf16 into f32", product(x, y, DType::F32)?),
                    ("bf16 plus", gemm_nt_plus(x, y, &c, Accumulation::Exact)?),
                ];
                for ((names, a), b) in [["tensor", "tensor plus"], ["row", "row plus"], ["block", "block plus"]]
                    .into_iter()
                    .zip(&inputs)
                    .zip(&weights)
                {
                    let (x, y) = (Operand::Rows(a), Operand::Rows(b));
                    all.push((names[0], product(x, y, DType::BF16)?));
                    all.push((names[1], gemm_nt_plus(x, y, &c, Accumulation::Exact)?));
                }
                Ok(all)
            });
            found.unwrap()
        };
        let whole = products(0..ROWS);
        for span in &spans {
            for ((what, expected), (_, found)) in whole.iter().zip(products(span.clone())) {
                let expected = values(&expected.rows(span.start, span.end).unwrap());
                let apart = expected.iter().zip(values(&found)).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                if apart > 0 {
                    failures.push(format!("{what}, {n} x {k}, rows {span:?}: {apart} of {} values", expected.len()));
                }
            }
        }
    }
    assert!(failures.is_empty(), "depend on the number of rows:\n{}", failures.join("\n"));
}

/// In the stated order, products of many rows equal the definition.
#[test]
fn ordered_products_of_many_rows_agree_across_devices() {
    for m in [129, 300] {
        for [n, k] in [[8, 16], [104, 136], [384, 1104], [1000, 6224], [1028, 4112], [4104, 2048]] {
            let inputs = [
                normals("a", &[m, k], DType::BF16),
                normals("b", &[n, k], DType::BF16),
                normals("c", &[m, n], DType::BF16),
            ];
            parity(&inputs, Tolerance::Steps(DType::BF16, 2.0), |t| {
                let finer = |x, granularity| quantized(x, DType::E4M3, granularity, CodeCopies::Rows);
                let by_tensor = |x| fp8(x, DType::E4M3, 64.0, CodeCopies::Rows);
                let cast = [
                    [by_tensor(&t[0])?, by_tensor(&t[1])?],
                    [finer(&t[0], Granularity::PerRow)?, finer(&t[1], Granularity::PerRow)?],
                    [finer(&t[0], Granularity::Blocks1x128)?, finer(&t[1], Granularity::Blocks128x128)?],
                ];
                let products = || {
                    let (a, b) = (Operand::plain(&t[0]), Operand::plain(&t[1]));
                    let mut all = vec![product(a, b, DType::BF16)?, product(a, b, DType::F32)?];
                    all.push(gemm_nt_plus(a, b, &t[2], Accumulation::Exact)?);
                    let mut sum = t[2].empty_like()?;
                    sum.copy_from(0, &t[2])?;
                    gemm_nt_add(a, b, &mut sum, Accumulation::Exact)?;
                    all.push(sum);
                    for [a, b] in &cast {
                        let (a, b) = (Operand::Rows(a), Operand::Rows(b));
                        all.push(product(a, b, DType::BF16)?);
                        all.push(gemm_nt_plus(a, b, &t[2], Accumulation::Exact)?);
                    }
                    Ok(all)
                };
                match t[0].device() {
                    Device::Cuda(gpu) => gpu.with_batch_invariance(products),
                    _ => products(),
                }
            });
        }
    }
}
