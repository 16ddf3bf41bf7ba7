//! The reference product. Each output element is a sum over `K` in F32 (F64 for F64). Blocks of 128 terms are summed in order from zero, and the sums
//! of the blocks are added in order. The total is multiplied by the scales, the addend is added, and the result is rounded once. With block scales,
//! each partial sum is multiplied by its two scales before it is added. With scales of the tensors, the total is multiplied by their product.
//!
//! F32 products are multiplied and added with one rounding, by FMA. Products of FP8 or 16-bit values are exact in F32, so machines without
//! FMA compute the same bits with separate operations.

use super::few_rows;
use super::packed::{BLOCK, Scales, pack, panel};
use crate::element::{Float, Real};
use crate::ops::operand::Operand;
use crate::ops::real_type;
use crate::wide::wide;
use crate::{DType, Result, Tensor};
use rayon::prelude::*;

/// The number of rows, and the number of columns, of the register tile.
const MR: usize = 8;
const NR: usize = 32;

/// Returns the scratch bytes: the packed operands.
pub(super) fn scratch(a: Operand, b: Operand) -> Result<usize> {
    let ((m, k), (n, _)) = (a.size("gemm: a")?, b.size("gemm: b")?);
    if few_rows::reads_in_place(a, b)? {
        return Ok(few_rows::scratch(m, n, k));
    }
    let size = real_type(a.matrix("gemm: a")?.0.dtype()).size();
    Ok((m.next_multiple_of(MR) + n.next_multiple_of(NR)) * k * size)
}

pub(in crate::ops) fn gemm(a: Operand, b: Operand, out: &mut Tensor, add: bool) -> Result<()> {
    let ((m, k), (n, _)) = (a.size("gemm: a")?, b.size("gemm: b")?);
    let (x, y) = (a.matrix("gemm: a")?, b.matrix("gemm: b")?);
    if x.0.dtype() == DType::F64 {
        let (x, y) = (pack::<f64, MR>(x, m, k), pack::<f64, NR>(y, n, k));
        tiles(out.host_mut::<f64>(), n, add, |i, j| {
            portable::<f64, false>(panel::<_, MR>(&x, k, i), panel::<_, NR>(&y, k, j))
        });
        return Ok(());
    }
    if few_rows::reads_in_place(a, b)? {
        few_rows::gemm(a, b, out, add)?;
        return Ok(());
    }
    let exact = x.0.dtype() != DType::F32;
    let (x, y) = (pack::<f32, MR>(x, m, k), pack::<f32, NR>(y, n, k));
    let panels = |i, j| (panel::<_, MR>(&x, k, i), panel::<_, NR>(&y, k, j));
    match (Scales::of(a), Scales::of(b)) {
        (Some(a), Some(b)) if a.granularity.is_blocks() => {
            let length = a.granularity.block().expect("blocks have a length");
            store(out, n, add, |i, j| blocks(panels(i, j), length, a, b, i, j));
        }
        (Some(a), Some(b)) => store(out, n, add, |i, j| {
            let (x, y) = panels(i, j);
            let (a, b, mut sums) = (a.panel::<MR>(i, 0), b.panel::<NR>(j, 0), tile(x, y, true));
            scale(&mut sums, &a, &b);
            sums
        }),
        _ => store(out, n, add, |i, j| {
            let (x, y) = panels(i, j);
            tile(x, y, exact)
        }),
    }
    Ok(())
}

fn scale(sums: &mut Sums<f32>, a: &[f32; MR], b: &[f32; NR]) {
    for (sums, a) in sums.iter_mut().zip(a) {
        sums.iter_mut().zip(b).for_each(|(sum, b)| *sum *= a * b);
    }
}

/// Computes a tile for operands with scales for blocks of `length` terms, at most [`BLOCK`].
fn blocks((x, y): (&[f32], &[f32]), length: usize, a: Scales, b: Scales, i: usize, j: usize) -> Sums<f32> {
    let mut total = [[0.0; NR]; MR];
    for (block, (x, y)) in x.chunks(MR * length).zip(y.chunks(NR * length)).enumerate() {
        let mut sums = tile(x, y, true);
        scale(&mut sums, &a.panel(i, block), &b.panel(j, block));
        total.as_flattened_mut().iter_mut().zip(sums.as_flattened()).for_each(|(total, sum)| *total += sum);
    }
    if let (Some(of_a), Some(of_b)) = (a.tensor_scale(), b.tensor_scale()) {
        scale(&mut total, &a.panel(i, of_a), &b.panel(j, of_b));
    }
    total
}

fn store(out: &mut Tensor, n: usize, add: bool, tile: impl Fn(usize, usize) -> Sums<f32> + Sync) {
    match out.dtype() {
        DType::F32 => tiles(out.host_mut::<f32>(), n, add, tile),
        DType::F16 => tiles(out.host_mut::<half::f16>(), n, add, tile),
        _ => tiles(out.host_mut::<half::bf16>(), n, add, tile),
    }
}

/// Computes and stores all tiles. A task computes whole rows of tiles, so results do not depend on the number of threads.
fn tiles<D: Float>(out: &mut [D], n: usize, add: bool, tile: impl Fn(usize, usize) -> Sums<D::Real> + Sync) {
    // The rows of a task reuse panels of b, which fit in L2 together with one panel of a.
    const ROW_TILES: usize = 8;
    out.par_chunks_mut(MR * ROW_TILES * n).enumerate().for_each(|(task, out)| {
        for j in 0..n.div_ceil(NR) {
            for (i, out) in out.chunks_mut(MR * n).enumerate() {
                let sums = tile(task * ROW_TILES + i, j);
                for (out, sums) in out.chunks_mut(n).zip(&sums) {
                    store_row(&mut out[j * NR..], sums, add);
                }
            }
        }
    });
}

wide! {
    fn store_row[D: Float](out: &mut [D], sums: &[D::Real; NR], add: bool) {
        for (out, &sum) in out.iter_mut().zip(sums) {
            *out = D::store(if add { sum + out.load() } else { sum });
        }
    }
}

/// A register tile `[MR, NR]`.
type Sums<R> = [[R; NR]; MR];

/// Computes a register tile over all of `K` from a panel of each operand, with the widest vector instructions available. `exact` means that products
/// are exact.
fn tile(a: &[f32], b: &[f32], exact: bool) -> Sums<f32> {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature was detected on this machine just above.
            return unsafe { x86::avx512(a, b) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: both features were detected on this machine just above.
            return unsafe { x86::avx2(a, b) };
        }
    }
    // Without FMA instructions, only exact products are fast.
    if exact && cfg!(target_arch = "x86_64") { portable::<f32, false>(a, b) } else { portable::<f32, true>(a, b) }
}

/// The portable loops, which define the bits.
fn portable<R: Real, const FUSED: bool>(a: &[R], b: &[R]) -> Sums<R> {
    let mut total = [[R::default(); NR]; MR];
    for (a, b) in a.chunks(MR * BLOCK).zip(b.chunks(NR * BLOCK)) {
        let mut sums = [[R::default(); NR]; MR];
        for (a, b) in a.chunks_exact(MR).zip(b.chunks_exact(NR)) {
            for (sums, &a) in sums.iter_mut().zip(a) {
                for (sum, &b) in sums.iter_mut().zip(b) {
                    *sum = a.mul_add::<FUSED>(b, *sum);
                }
            }
        }
        for (total, &sum) in total.as_flattened_mut().iter_mut().zip(sums.as_flattened()) {
            *total += sum;
        }
    }
    total
}

/// The loops of [`portable`] in x86 vector intrinsics, because compilers do not keep the sums in registers.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{BLOCK, MR, NR, Sums};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f")]
    pub(super) fn avx512(a: &[f32], b: &[f32]) -> Sums<f32> {
        let mut total = [[_mm512_setzero_ps(); 2]; MR];
        for (a, b) in a.chunks(MR * BLOCK).zip(b.chunks(NR * BLOCK)) {
            let mut sums = [[_mm512_setzero_ps(); 2]; MR];
            for (a, b) in a.chunks_exact(MR).zip(b.chunks_exact(NR)) {
                // SAFETY: `b` has NR = 32 values.
                let b = unsafe { [_mm512_loadu_ps(b.as_ptr()), _mm512_loadu_ps(b.as_ptr().add(16))] };
                for i in 0..MR {
                    let a = _mm512_set1_ps(a[i]);
                    for j in 0..2 {
                        sums[i][j] = _mm512_fmadd_ps(a, b[j], sums[i][j]);
                    }
                }
            }
            for i in 0..MR {
                for j in 0..2 {
                    total[i][j] = _mm512_add_ps(total[i][j], sums[i][j]);
                }
            }
        }
        let mut out = [[0.0; NR]; MR];
        for (out, total) in out.iter_mut().zip(total) {
            // SAFETY: a row of `out` has NR = 32 values.
            unsafe {
                _mm512_storeu_ps(out.as_mut_ptr(), total[0]);
                _mm512_storeu_ps(out.as_mut_ptr().add(16), total[1]);
            }
        }
        out
    }

    /// Computes half of the rows and half of the columns at a time, because AVX2 has half as many registers of half the width.
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn avx2(a: &[f32], b: &[f32]) -> Sums<f32> {
        const ROWS: usize = MR / 2;
        let mut out = [[0.0; NR]; MR];
        for (row, column) in [(0, 0), (0, NR / 2), (ROWS, 0), (ROWS, NR / 2)] {
            let mut total = [[_mm256_setzero_ps(); 2]; ROWS];
            for (a, b) in a.chunks(MR * BLOCK).zip(b.chunks(NR * BLOCK)) {
                let mut sums = [[_mm256_setzero_ps(); 2]; ROWS];
                for (a, b) in a.chunks_exact(MR).zip(b.chunks_exact(NR)) {
                    let b = &b[column..column + 16];
                    // SAFETY: `b` has 16 values.
                    let b = unsafe { [_mm256_loadu_ps(b.as_ptr()), _mm256_loadu_ps(b.as_ptr().add(8))] };
                    for i in 0..ROWS {
                        let a = _mm256_set1_ps(a[row + i]);
                        for j in 0..2 {
                            sums[i][j] = _mm256_fmadd_ps(a, b[j], sums[i][j]);
                        }
                    }
                }
                for i in 0..ROWS {
                    for j in 0..2 {
                        total[i][j] = _mm256_add_ps(total[i][j], sums[i][j]);
                    }
                }
            }
            for (out, total) in out[row..].iter_mut().zip(total) {
                let out = &mut out[column..column + 16];
                // SAFETY: `out` has 16 values.
                unsafe {
                    _mm256_storeu_ps(out.as_mut_ptr(), total[0]);
                    _mm256_storeu_ps(out.as_mut_ptr().add(8), total[1]);
                }
            }
        }
        out
    }

    #[cfg(test)]
    mod tests {
        use super::super::{MR, NR, portable};

        /// Tests F32 products, and exact products, for which two roundings also give the same bits.
        #[test]
        fn vector_kernels_match_the_reference_bits() {
            for k in [1, 127, 128, 129, 300] {
                let value =
                    |i: usize, bits: u32| f32::from_bits((i as f32 * 0.37).sin().to_bits() & (u32::MAX << bits));
                let (exact, full) = (12, 0);
                let panel = |n: usize, bits| (0..n * k).map(|i| value(i, bits)).collect::<Vec<f32>>();
                let (a, b) = (panel(MR, exact), panel(NR, exact));
                let (x, y) = (panel(MR, full), panel(NR, full));
                if is_x86_feature_detected!("avx512f") {
                    // SAFETY: detected just above.
                    unsafe {
                        assert_eq!(super::avx512(&a, &b), portable::<f32, false>(&a, &b));
                        assert_eq!(super::avx512(&x, &y), portable::<f32, true>(&x, &y));
                    }
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: detected just above.
                    unsafe {
                        assert_eq!(super::avx2(&a, &b), portable::<f32, false>(&a, &b));
                        assert_eq!(super::avx2(&x, &y), portable::<f32, true>(&x, &y));
                    }
                }
            }
        }
    }
}
