//! The definition of the product: per output element, sums over `K` in blocks of 128, each block from zero and in order, the blocks
//! added in order, in binary32 (F64 for F64); then the scales, then what is accumulated into, then one rounding.
//!
//! Products of FP8 or 16-bit values are exact in binary32, so fused and separate multiply-add give the same bits there and the
//! fastest instruction of the machine may be used. F32 operands are always multiplied and added in two roundings, on every machine.

use super::Operand;
use crate::element::{Float, Real, with_float};
use crate::{DType, Result, Tensor};
use rayon::prelude::*;

/// Rows and columns of the register tile.
const MR: usize = 8;
const NR: usize = 32;
/// Products per partial sum.
const BLOCK: usize = 128;

pub(super) fn gemm(a: Operand, b: Operand, out: &mut Tensor, add: bool) -> Result<()> {
    let ((m, k), (n, _)) = (a.size("gemm: a")?, b.size("gemm: b")?);
    let scale = [a, b].into_iter().filter_map(Operand::scale_inv).map(|s| s.host::<f32>()[0]).product::<f32>();
    let (a, b) = (a.matrix("gemm: a")?, b.matrix("gemm: b")?);
    if a.0.dtype() == DType::F64 {
        let (a, b) = (pack::<f64, MR>(a, m, k), pack::<f64, NR>(b, n, k));
        tiles::<f64, f64, false>(&a, &b, [n, k], 1.0, out.host_mut(), add);
        return Ok(());
    }
    let exact = a.0.dtype() != DType::F32;
    let (a, b) = (pack::<f32, MR>(a, m, k), pack::<f32, NR>(b, n, k));
    match (out.dtype(), exact) {
        (DType::F32, true) => tiles::<f32, f32, true>(&a, &b, [n, k], scale, out.host_mut(), add),
        (DType::F32, false) => tiles::<f32, f32, false>(&a, &b, [n, k], scale, out.host_mut(), add),
        (DType::F16, _) => tiles::<f32, half::f16, true>(&a, &b, [n, k], scale, out.host_mut(), add),
        (_, _) => tiles::<f32, half::bf16, true>(&a, &b, [n, k], scale, out.host_mut(), add),
    }
    Ok(())
}

/// Panels of `P` rows, each `[K, P]`, in the arithmetic type; missing rows are zero.
fn pack<R: Real, const P: usize>((x, transposed): (&Tensor, bool), rows: usize, k: usize) -> Vec<R> {
    let mut panels = vec![R::default(); rows.div_ceil(P) * P * k];
    let width = x.shape()[1];
    with_float!(x.dtype(), S => {
        let x: &[S] = x.host();
        panels.par_chunks_mut((P * k).max(1)).enumerate().for_each(|(panel, out)| {
            let first = panel * P;
            let count = P.min(rows - first);
            if transposed {
                for (p, out) in out.chunks_exact_mut(P).enumerate() {
                    for (out, x) in out.iter_mut().zip(&x[p * width + first..][..count]) {
                        *out = widen(*x);
                    }
                }
            } else {
                for i in 0..count {
                    for (p, x) in x[(first + i) * width..][..k].iter().enumerate() {
                        out[p * P + i] = widen(*x);
                    }
                }
            }
        });
    });
    panels
}

#[inline(always)]
fn widen<S: Float, R: Real>(x: S) -> R {
    R::of(x.load().to_f64())
}

/// Multiplies all pairs of panels. Tasks own whole rows of tiles, so the result does not depend on the number of threads.
fn tiles<R: Real, D: Float<Real = R>, const FUSED: bool>(
    a: &[R],
    b: &[R],
    [n, k]: [usize; 2],
    scale: R,
    out: &mut [D],
    add: bool,
) {
    // The panels of b that fit the second-level cache beside one panel of a are reused over all rows of a task.
    const ROW_TILES: usize = 8;
    out.par_chunks_mut(MR * ROW_TILES * n).enumerate().for_each(|(task, out)| {
        for j in 0..n.div_ceil(NR) {
            for (i, out) in out.chunks_mut(MR * n).enumerate() {
                let panel = task * ROW_TILES + i;
                let sums = tile::<R, FUSED>(&a[panel * MR * k..][..MR * k], &b[j * NR * k..][..NR * k]);
                for (out, sums) in out.chunks_mut(n).zip(&sums) {
                    for (out, &sum) in out[j * NR..].iter_mut().zip(sums) {
                        let value = sum * scale;
                        *out = D::store(if add { value + out.load() } else { value });
                    }
                }
            }
        }
    });
}

/// One register tile over all of `K`, with the widest instructions this machine has.
fn tile<R: Real, const FUSED: bool>(a: &[R], b: &[R]) -> [[R; NR]; MR] {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature was detected on this machine just above.
            return unsafe { tile_avx512::<R, FUSED>(a, b) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: both features were detected on this machine just above.
            return unsafe { tile_avx2::<R, FUSED>(a, b) };
        }
        // Without a fused instruction the same bits come from two: see the head of this file.
        tile_with::<R, false>(a, b)
    }
    #[cfg(not(target_arch = "x86_64"))]
    tile_with::<R, FUSED>(a, b)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn tile_avx512<R: Real, const FUSED: bool>(a: &[R], b: &[R]) -> [[R; NR]; MR] {
    tile_with::<R, FUSED>(a, b)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn tile_avx2<R: Real, const FUSED: bool>(a: &[R], b: &[R]) -> [[R; NR]; MR] {
    tile_with::<R, FUSED>(a, b)
}

#[inline(always)]
fn tile_with<R: Real, const FUSED: bool>(a: &[R], b: &[R]) -> [[R; NR]; MR] {
    let mut total = [[R::default(); NR]; MR];
    for (a, b) in a.chunks(MR * BLOCK).zip(b.chunks(NR * BLOCK)) {
        let mut sums = [[R::default(); NR]; MR];
        for (a, b) in a.chunks_exact(MR).zip(b.chunks_exact(NR)) {
            let a: &[R; MR] = a.try_into().expect("chunks of MR");
            let b: &[R; NR] = b.try_into().expect("chunks of NR");
            for i in 0..MR {
                for j in 0..NR {
                    sums[i][j] = a[i].mul_add::<FUSED>(b[j], sums[i][j]);
                }
            }
        }
        for (total, sums) in total.iter_mut().zip(&sums) {
            for (total, &sum) in total.iter_mut().zip(sums) {
                *total += sum;
            }
        }
    }
    total
}
