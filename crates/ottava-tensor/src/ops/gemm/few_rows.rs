//! The reference product if `a` has few rows, as in generation. `b` is read in place, because packing it would take longer than the
//! product. Sums have the same order and therefore the same bits as in `cpu.rs`.
//!
//! Sixteen rows of `b` are summed at once, one per lane. Vectors of 16 neighbours along `K` are transposed in registers.

use super::packed::{BLOCK, Scales, pack};
use crate::element::Float;
use crate::fp8::{E4M3, E5M2};
use crate::ops::operand::Operand;
use crate::ops::parallel_rows::rows_per_task;
use crate::{DType, Result, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;
use std::ops::Range;

/// The number of rows of `b` that are summed at once.
const LANES: usize = 16;

/// The maximum number of rows of `a`. With more rows, panels of `b` are read so often that packing them pays.
const FEW: usize = 32;

/// The sums of `M` rows of `a` with [`LANES`] rows of `b`.
type Sums<const M: usize> = [[f32; LANES]; M];

/// A range along `K` of [`LANES`] rows of `b`, converted to F32.
type Widened = [[f32; BLOCK]; LANES];

/// Returns whether this file computes the product of these operands.
pub(super) fn reads_in_place(a: Operand, b: Operand) -> Result<bool> {
    let (y, transposed) = b.matrix("gemm: b")?;
    // These loops have no scale of the whole tensor.
    let has_tensor_scale = b.scale_inv().is_some_and(|(_, granularity)| granularity.has_tensor_scale());
    Ok(a.size("gemm: a")?.0 <= FEW && !transposed && y.dtype() != DType::F64 && !has_tensor_scale)
}

/// Returns the scratch bytes: the packed `a`, the sums, and the converted rows of each thread.
pub(super) fn scratch(m: usize, n: usize, k: usize) -> usize {
    let rows = m.next_multiple_of(panel_rows(m));
    let floats = rows * k + rows * n.next_multiple_of(LANES);
    floats * size_of::<f32>() + rayon::current_num_threads() * size_of::<Widened>()
}

/// Returns the number of rows of `a` that share a pass over `b`.
fn panel_rows(m: usize) -> usize {
    m.next_power_of_two().min(8)
}

pub(super) fn gemm(a: Operand, b: Operand, out: &mut Tensor, add: bool) -> Result<()> {
    match panel_rows(a.size("gemm: a")?.0) {
        1 => by_panels::<1>(a, b, out, add),
        2 => by_panels::<2>(a, b, out, add),
        4 => by_panels::<4>(a, b, out, add),
        _ => by_panels::<8>(a, b, out, add),
    }
}

fn by_panels<const M: usize>(a: Operand, b: Operand, out: &mut Tensor, add: bool) -> Result<()> {
    let ((m, k), (n, _)) = (a.size("gemm: a")?, b.size("gemm: b")?);
    let x = pack::<f32, M>(a.matrix("gemm: a")?, m, k);
    let y = b.matrix("gemm: b")?.0;
    let (read, exact): (Read, bool) = match y.dtype() {
        DType::F32 => (read::<f32>, false),
        DType::F16 => (read::<f16>, true),
        DType::BF16 => (read::<bf16>, true),
        DType::E4M3 => (read::<E4M3>, true),
        _ => (read::<E5M2>, true),
    };
    let (of_a, of_b) = (Scales::of(a), Scales::of(b));
    let cut = of_a.and_then(|scales| scales.granularity.block());
    let length = cut.unwrap_or(BLOCK);
    let panels = m.div_ceil(M);
    let mut sums = vec![[[0f32; LANES]; M]; panels * n.div_ceil(LANES)];
    sums.par_chunks_mut(panels).with_min_len(rows_per_task(panels * LANES * k)).enumerate().for_each_init(
        || [[0f32; BLOCK]; LANES],
        |widened, (group, totals)| {
            for (block, start) in (0..k).step_by(length).enumerate() {
                let end = k.min(start + length);
                // Lanes beyond the last row repeat it. Their sums are not stored.
                let numbers = std::array::from_fn(|lane| (group * LANES + lane).min(n - 1));
                let rows = read(y, numbers, start..end, panels == 1, widened);
                for (panel, total) in totals.iter_mut().enumerate() {
                    let x = &x[panel * M * k..][start * M..end * M];
                    let mut sums = rows.partial_sums::<M>(x, exact);
                    if let (Some(_), Some(a), Some(b)) = (cut, of_a, of_b) {
                        // Adds zero, because the separate product of this block would start its sum from zero.
                        sums.as_flattened_mut().iter_mut().for_each(|sum| *sum += 0.0);
                        scale(&mut sums, &a.panel(panel, block), &b.panel(group, block));
                    }
                    total.as_flattened_mut().iter_mut().zip(sums.as_flattened()).for_each(|(total, sum)| *total += sum);
                }
            }
            if let (None, Some(a), Some(b)) = (cut, of_a, of_b) {
                for (panel, total) in totals.iter_mut().enumerate() {
                    scale(total, &a.panel(panel, 0), &b.panel(group, 0));
                }
            }
        },
    );
    match out.dtype() {
        DType::F32 => store::<f32, M>(&sums, out, add),
        DType::F16 => store::<f16, M>(&sums, out, add),
        _ => store::<bf16, M>(&sums, out, add),
    }
    Ok(())
}

fn scale<const M: usize>(sums: &mut Sums<M>, a: &[f32; M], b: &[f32; LANES]) {
    for (sums, a) in sums.iter_mut().zip(a) {
        sums.iter_mut().zip(b).for_each(|(sum, b)| *sum *= a * b);
    }
}

fn store<D: Float<Real = f32>, const M: usize>(sums: &[Sums<M>], out: &mut Tensor, add: bool) {
    let [m, n] = [out.shape()[0], out.shape()[1]];
    let panels = m.div_ceil(M);
    for (i, out) in out.host_mut::<D>().chunks_exact_mut(n).enumerate() {
        for (group, out) in out.chunks_mut(LANES).enumerate() {
            for (out, &sum) in out.iter_mut().zip(&sums[group * panels + i / M][i % M]) {
                *out = D::store(if add { sum + out.load() } else { sum });
            }
        }
    }
}

/// A function that reads a range of the given rows; see [`read`].
type Read = for<'a> fn(&'a Tensor, [usize; LANES], Range<usize>, bool, &'a mut Widened) -> Rows<'a>;

/// Some rows of `b`, in the form that kernels read.
enum Rows<'a> {
    Wide([&'a [f32]; LANES]),
    /// Rows that are converted to F32 in registers.
    Bf16([&'a [bf16]; LANES]),
}

impl Rows<'_> {
    /// Sums `a` `[length, M]` with rows of this length, in order from zero. `exact` means that products are exact.
    fn partial_sums<const M: usize>(&self, a: &[f32], exact: bool) -> Sums<M> {
        match *self {
            Rows::Wide(rows) => partial_sums(a, rows, exact),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `read` returns such rows only if it has detected the feature.
            Rows::Bf16(rows) => unsafe { x86::avx512_bf16(a, rows) },
            #[cfg(not(target_arch = "x86_64"))]
            Rows::Bf16(_) => unreachable!("rows are widened in memory"),
        }
    }
}

/// Returns a range of the given rows of `y`, in place or converted to F32 in `widened`. Rows that are read only `once` may be converted in registers.
fn read<'a, S: Source>(
    y: &'a Tensor,
    rows: [usize; LANES],
    range: Range<usize>,
    once: bool,
    widened: &'a mut Widened,
) -> Rows<'a> {
    let (width, y): (usize, &[S]) = (y.shape()[1], y.host());
    let rows = rows.map(|row| &y[row * width..][range.clone()]);
    prefetch(rows, LANES * width);
    S::read(rows, once, widened)
}

/// An element type of `b`.
trait Source: Float {
    /// Returns the rows in F32. Rows of another type are converted in `widened` or in registers.
    fn read<'a>(rows: [&'a [Self]; LANES], once: bool, widened: &'a mut Widened) -> Rows<'a>;
}

impl Source for f32 {
    fn read<'a>(rows: [&'a [f32]; LANES], _: bool, _: &'a mut Widened) -> Rows<'a> {
        Rows::Wide(rows)
    }
}

impl Source for bf16 {
    fn read<'a>(rows: [&'a [bf16]; LANES], once: bool, widened: &'a mut Widened) -> Rows<'a> {
        #[cfg(target_arch = "x86_64")]
        if once && is_x86_feature_detected!("avx512f") {
            return Rows::Bf16(rows);
        }
        widen(rows, widened, widen_bf16)
    }
}

/// Converts each row with `of_row`.
fn widen<'a, S>(rows: [&[S]; LANES], widened: &'a mut Widened, of_row: fn(&[S], &mut [f32])) -> Rows<'a> {
    let length = rows[0].len();
    for (row, wide) in rows.iter().zip(widened.iter_mut()) {
        of_row(row, &mut wide[..length]);
    }
    Rows::Wide(widened.each_ref().map(|wide| &wide[..length]))
}

macro_rules! widened {
    ($($t:ty: $of_row:expr),*) => { $(impl Source for $t {
        fn read<'a>(rows: [&'a [$t]; LANES], _: bool, widened: &'a mut Widened) -> Rows<'a> {
            widen(rows, widened, $of_row)
        }
    })* };
}
widened!(f16: |row, wide| row.convert_to_f32_slice(wide), E4M3: load, E5M2: load);

fn load<S: Float<Real = f32>>(row: &[S], wide: &mut [f32]) {
    wide.iter_mut().zip(row).for_each(|(wide, x)| *wide = x.load());
}

fn widen_bf16(row: &[bf16], wide: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the feature was detected on this machine just above.
        return unsafe { x86::widen_bf16(row, wide) };
    }
    shift_bf16(row, wide);
}

/// Converts BF16 to F32 by a move and a shift. Unlike `bf16::to_f32`, it does not test for NaN, because sums do not keep the payload of a NaN.
#[inline(always)]
fn shift_bf16(row: &[bf16], wide: &mut [f32]) {
    wide.iter_mut().zip(row).for_each(|(wide, x)| *wide = f32::from_bits(u32::from(x.to_bits()) << 16));
}

/// Prefetches the same range of later rows into the cache. Sixteen streams of a few kilobytes are too many and too short for the hardware to
/// detect in time.
fn prefetch<S>(rows: [&[S]; LANES], distance: usize) {
    #[cfg(target_arch = "x86_64")]
    for row in rows {
        for line in (0..size_of_val(row)).step_by(64) {
            let later = row.as_ptr().wrapping_add(distance).wrapping_byte_add(line);
            // SAFETY: a prefetch reads nothing, and ignores addresses without memory.
            unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(later.cast()) };
        }
    }
}

/// Sums `a` `[length, M]` with rows of `b` of this length, in order from zero, with one rounding per term. `exact` means that products are exact.
fn partial_sums<const M: usize>(a: &[f32], rows: [&[f32]; LANES], exact: bool) -> Sums<M> {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature was detected on this machine just above.
            return unsafe { x86::avx512::<M>(a, rows) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: both features were detected on this machine just above.
            return unsafe { x86::avx2::<M>(a, rows) };
        }
    }
    // Without FMA instructions, only exact products are fast.
    if exact && cfg!(target_arch = "x86_64") { portable::<M, false>(a, rows) } else { portable::<M, true>(a, rows) }
}

/// The portable loops, which define the bits.
fn portable<const M: usize, const FUSED: bool>(a: &[f32], rows: [&[f32]; LANES]) -> Sums<M> {
    let mut sums = [[0f32; LANES]; M];
    for (k, a) in a.chunks_exact(M).enumerate() {
        for (sums, &a) in sums.iter_mut().zip(a) {
            for (sum, row) in sums.iter_mut().zip(rows) {
                *sum = if FUSED { a.mul_add(row[k], *sum) } else { a * row[k] + *sum };
            }
        }
    }
    sums
}

/// The loops of [`portable`] in x86 vector intrinsics.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{LANES, Sums, shift_bf16};
    use half::bf16;
    use std::arch::x86_64::*;

    /// Converts eight values at a time.
    #[target_feature(enable = "avx2")]
    pub(super) fn widen_bf16(row: &[bf16], wide: &mut [f32]) {
        shift_bf16(row, wide);
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn avx512<const M: usize>(a: &[f32], rows: [&[f32]; LANES]) -> Sums<M> {
        let length = rows[0].len();
        assert!(a.len() == length * M && rows.iter().all(|row| row.len() == length), "rows of one length");
        let (a, _) = a.as_chunks::<M>();
        let mut sums = [_mm512_setzero_ps(); M];
        for start in (0..length).step_by(16) {
            let count = (length - start).min(16);
            let mask = ((1u32 << count) - 1) as u16;
            let mut tile = [_mm512_setzero_ps(); 16];
            for (tile, row) in tile.iter_mut().zip(rows) {
                // SAFETY: `start + count` is at most the length of the row. The mask has `count` lanes.
                *tile = unsafe { _mm512_maskz_loadu_ps(mask, row.as_ptr().add(start)) };
            }
            let tile = transpose16(tile);
            // The last tile is filled with zeros, which add nothing, so tiles stay in registers.
            let mut end = [[0f32; M]; 16];
            let a = match a[start..].first_chunk::<16>() {
                Some(whole) => whole,
                None => {
                    end[..count].copy_from_slice(&a[start..]);
                    &end
                }
            };
            for (a, tile) in a.iter().zip(tile) {
                for (sum, &a) in sums.iter_mut().zip(a) {
                    let a = _mm512_set1_ps(a);
                    *sum = _mm512_fmadd_ps(a, tile, *sum);
                }
            }
        }
        let mut out = [[0.0; LANES]; M];
        for (out, sums) in out.iter_mut().zip(sums) {
            // SAFETY: a row of `out` has LANES = 16 values.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sums) };
        }
        out
    }

    /// Computes the sums of [`avx512`] for rows in BF16. Words of two neighbours are transposed, and each word gives two terms.
    #[target_feature(enable = "avx512f")]
    pub(super) fn avx512_bf16<const M: usize>(a: &[f32], rows: [&[bf16]; LANES]) -> Sums<M> {
        let length = rows[0].len();
        assert!(a.len() == length * M && rows.iter().all(|row| row.len() == length), "rows of one length");
        let (a, _) = a.as_chunks::<M>();
        let odd = _mm512_set1_epi32(0xFFFF_0000u32 as i32);
        let mut sums = [_mm512_setzero_ps(); M];
        for start in (0..length).step_by(32) {
            let count = (length - start).min(32);
            let mut tile = [_mm512_setzero_ps(); 16];
            for (tile, row) in tile.iter_mut().zip(rows) {
                let mut end = [bf16::ZERO; 32];
                let from = match row[start..].first_chunk::<32>() {
                    Some(whole) => whole,
                    None => {
                        end[..count].copy_from_slice(&row[start..]);
                        &end
                    }
                };
                // SAFETY: `from` has 32 values of two bytes.
                *tile = unsafe { _mm512_loadu_ps(from.as_ptr().cast()) };
            }
            let mut end = [[0f32; M]; 32];
            let a = match a[start..].first_chunk::<32>() {
                Some(whole) => whole,
                None => {
                    end[..count].copy_from_slice(&a[start..]);
                    &end
                }
            };
            for (a, words) in a.as_chunks::<2>().0.iter().zip(transpose16(tile)) {
                let bits = _mm512_castps_si512(words);
                let low = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits));
                let high = _mm512_castsi512_ps(_mm512_and_si512(bits, odd));
                for (sum, &a) in sums.iter_mut().zip(&a[0]) {
                    *sum = _mm512_fmadd_ps(_mm512_set1_ps(a), low, *sum);
                }
                for (sum, &a) in sums.iter_mut().zip(&a[1]) {
                    *sum = _mm512_fmadd_ps(_mm512_set1_ps(a), high, *sum);
                }
            }
        }
        let mut out = [[0.0; LANES]; M];
        for (out, sums) in out.iter_mut().zip(sums) {
            // SAFETY: a row of `out` has LANES = 16 values.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sums) };
        }
        out
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn transpose16(mut r: [__m512; 16]) -> [__m512; 16] {
        let mut t = r;
        for i in 0..8 {
            t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
        }
        let pairs = |a, b| (_mm512_castps_pd(a), _mm512_castps_pd(b));
        for i in 0..4 {
            for j in 0..2 {
                let (a, b) = pairs(t[4 * i + j], t[4 * i + j + 2]);
                r[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                r[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
            }
        }
        // Here lane `l` (of 128 bits) of `r[4 * i + c]` has column `4 * l + c` of rows `4 * i .. 4 * i + 4`.
        for c in 0..4 {
            let [a, b, d, e] = [r[c], r[4 + c], r[8 + c], r[12 + c]];
            let even = [_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0x88>(d, e)];
            let odd = [_mm512_shuffle_f32x4::<0xDD>(a, b), _mm512_shuffle_f32x4::<0xDD>(d, e)];
            t[c] = _mm512_shuffle_f32x4::<0x88>(even[0], even[1]);
            t[4 + c] = _mm512_shuffle_f32x4::<0x88>(odd[0], odd[1]);
            t[8 + c] = _mm512_shuffle_f32x4::<0xDD>(even[0], even[1]);
            t[12 + c] = _mm512_shuffle_f32x4::<0xDD>(odd[0], odd[1]);
        }
        t
    }

    /// Computes half of the lanes at a time.
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn avx2<const M: usize>(a: &[f32], rows: [&[f32]; LANES]) -> Sums<M> {
        let length = rows[0].len();
        assert!(a.len() == length * M && rows.iter().all(|row| row.len() == length), "rows of one length");
        let mut out = [[0.0; LANES]; M];
        for half in (0..LANES).step_by(8) {
            let mut sums = [_mm256_setzero_ps(); M];
            for start in (0..length).step_by(8) {
                let count = (length - start).min(8);
                let mut tile = [_mm256_setzero_ps(); 8];
                for (tile, row) in tile.iter_mut().zip(&rows[half..]) {
                    let mut end = [0f32; 8];
                    let from = match count {
                        8 => row[start..].as_ptr(),
                        _ => {
                            end[..count].copy_from_slice(&row[start..]);
                            end.as_ptr()
                        }
                    };
                    // SAFETY: `from` points to 8 values, either in the row or in a copy of its end that is filled with zeros.
                    *tile = unsafe { _mm256_loadu_ps(from) };
                }
                let tile = transpose8(tile);
                for (tile, a) in tile.into_iter().zip(a[start * M..].chunks_exact(M).take(count)) {
                    for i in 0..M {
                        let a = _mm256_set1_ps(a[i]);
                        sums[i] = _mm256_fmadd_ps(a, tile, sums[i]);
                    }
                }
            }
            for (out, sums) in out.iter_mut().zip(sums) {
                // SAFETY: a row of `out` has LANES = 16 values, and `half + 8` is at most 16.
                unsafe { _mm256_storeu_ps(out.as_mut_ptr().add(half), sums) };
            }
        }
        out
    }

    #[target_feature(enable = "avx2")]
    fn transpose8(mut r: [__m256; 8]) -> [__m256; 8] {
        let mut t = r;
        for i in 0..4 {
            t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
        }
        for i in 0..2 {
            for j in 0..2 {
                let (a, b) = (_mm256_castps_pd(t[4 * i + j]), _mm256_castps_pd(t[4 * i + j + 2]));
                r[4 * i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
                r[4 * i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
            }
        }
        for c in 0..4 {
            t[c] = _mm256_permute2f128_ps::<0x20>(r[c], r[4 + c]);
            t[4 + c] = _mm256_permute2f128_ps::<0x31>(r[c], r[4 + c]);
        }
        t
    }

    #[cfg(test)]
    mod tests {
        use super::super::{LANES, portable};

        #[test]
        fn vector_kernels_match_the_reference_bits() {
            for length in [1, 7, 8, 9, 16, 17, 100, 128] {
                // Products of values with 12 bits less are exact, like products of 16-bit and FP8 values. Then two roundings give the same bits.
                let value =
                    |i: usize, bits: u32| f32::from_bits((i as f32 * 0.37).sin().to_bits() & (u32::MAX << bits));
                for bits in [0, 12] {
                    let a: Vec<f32> = (0..8 * length).map(|i| value(i, bits)).collect();
                    let b: Vec<f32> = (0..LANES * length).map(|i| value(i + 999, bits)).collect();
                    let rows: [&[f32]; LANES] = std::array::from_fn(|lane| &b[lane * length..][..length]);
                    let few = &a[..2 * length];
                    if is_x86_feature_detected!("avx512f") {
                        // SAFETY: the feature was detected just above.
                        unsafe {
                            assert_eq!(super::avx512::<8>(&a, rows), portable::<8, true>(&a, rows));
                            assert_eq!(super::avx512::<2>(few, rows), portable::<2, true>(few, rows));
                            assert!(bits == 0 || super::avx512::<8>(&a, rows) == portable::<8, false>(&a, rows));
                        }
                    }
                    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                        // SAFETY: the features were detected just above.
                        unsafe {
                            assert_eq!(super::avx2::<8>(&a, rows), portable::<8, true>(&a, rows));
                            assert_eq!(super::avx2::<2>(few, rows), portable::<2, true>(few, rows));
                            assert!(bits == 0 || super::avx2::<8>(&a, rows) == portable::<8, false>(&a, rows));
                        }
                    }
                }
            }
        }
    }
}
