use super::{CastStatistics, Hadamard, SIGNS, TRANSFORMED};
use crate::element::{Float, Real, with_float};
use crate::fp4::{self, MAX_E2M1, SATURATED_E2M1};
use crate::fp8::{E4M3, E5M2, E8M0};
use crate::granularity::{Levels, Microscaling};
use crate::ops::destination::Seen;
use crate::ops::parallel_rows::ParallelRows;
use crate::ops::random::hash;
use crate::{DType, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

pub(super) fn hadamard(x: &Tensor, direction: Hadamard, y: &mut Tensor) {
    let width = x.shape()[1];
    with_float!(x.dtype(), S => {
        y.host_mut::<S>().par_rows_mut(width).zip(x.host::<S>().par_rows(width)).for_each(|(y, x)| {
            for (y, x) in y.chunks_mut(TRANSFORMED).zip(x.chunks(TRANSFORMED)) {
                match x.len() {
                    TRANSFORMED => transform(x, direction, y),
                    _ => y.copy_from_slice(x),
                }
            }
        });
    });
}

/// Transforms 16 values.
fn transform<S: Float>(x: &[S], direction: Hadamard, y: &mut [S]) {
    let negated = |i: usize, value: S::Real| if SIGNS >> i & 1 == 1 { -value } else { value };
    for (j, y) in y.iter_mut().enumerate() {
        let mut sum = S::Real::default();
        for (i, x) in x.iter().enumerate() {
            let value = if direction == Hadamard::Forward { negated(i, x.load()) } else { x.load() };
            sum += if (i & j).count_ones() % 2 == 1 { -value } else { value };
        }
        let value = sum * S::Real::of(0.25);
        *y = S::store(if direction == Hadamard::Inverse { negated(j, value) } else { value });
    }
}

pub(super) fn cast(
    x: &Tensor,
    how: Microscaling,
    amax: Option<&Tensor>,
    codes: &mut Tensor,
    scale_inv: &mut Tensor,
    statistics: Option<(&mut CastStatistics, usize)>,
) {
    let amax = amax.map(|amax| amax.host::<f32>()[0]);
    let rule = Rule::new(how, amax, codes.dtype().max_finite().expect("an FP8 format has a largest finite value"));
    let seen = match (x.dtype(), codes.dtype()) {
        (DType::F32, DType::E4M3) => rows::<f32, E4M3>(x, rule, codes, scale_inv),
        (DType::F32, _) => rows::<f32, E5M2>(x, rule, codes, scale_inv),
        (DType::F16, DType::E4M3) => rows::<f16, E4M3>(x, rule, codes, scale_inv),
        (DType::F16, _) => rows::<f16, E5M2>(x, rule, codes, scale_inv),
        (_, DType::E4M3) => rows::<bf16, E4M3>(x, rule, codes, scale_inv),
        (_, _) => rows::<bf16, E5M2>(x, rule, codes, scale_inv),
    };
    if let Some((statistics, slot)) = statistics {
        seen.add_to(statistics, slot, x.len());
    }
}

/// How the values of a tensor are scaled and rounded.
#[derive(Clone, Copy)]
struct Rule {
    how: Microscaling,
    /// The largest magnitude after scaling that does not count as saturated.
    largest: f32,
    /// The factor of the amaxes of blocks before the cast of their scales.
    of_amax: f32,
    /// The inverse scale of the tensor, or of the row.
    tensor: f32,
}

/// The factor before the cast, and the stored factor after it.
#[derive(Clone, Copy)]
struct BlockScale {
    encode: f32,
    decode: f32,
}

impl Rule {
    fn new(how: Microscaling, amax: Option<f32>, largest: f32) -> Rule {
        match (how.levels, amax) {
            (Levels::Two, Some(amax)) => {
                let scale = fp4::nvfp4_scale(amax);
                Rule { how, largest: SATURATED_E2M1, of_amax: scale * (1.0 / MAX_E2M1), tensor: 1.0 / scale }
            }
            _ => Rule { how, largest, of_amax: 1.0 / largest, tensor: 1.0 },
        }
    }

    /// Returns the scale of a block with this amax.
    fn scale(self, amax: f32) -> BlockScale {
        match self.how.levels {
            Levels::One => {
                let exponent = E8M0::rounded_up(amax * self.of_amax);
                BlockScale { encode: E8M0(254 - exponent.0).to_f32(), decode: exponent.to_f32() }
            }
            Levels::Two => {
                let decode = E4M3::from_f32((amax * self.of_amax).min(f32::MAX)).to_f32();
                BlockScale { encode: (1.0 / (decode * self.tensor)).min(f32::MAX), decode }
            }
        }
    }
}

/// Casts the rows of a matrix. `scale_inv` is `[blocks, rows]`, padded, and with two levels one more row for the tensor's scale.
fn rows<S: Float<Real = f32>, C: Float<Real = f32>>(
    x: &Tensor,
    rule: Rule,
    codes: &mut Tensor,
    scale_inv: &mut Tensor,
) -> Seen {
    let (padded, pitch, width) = (codes.shape()[0], codes.shape()[1], x.shape()[1]);
    let (length, together) = (rule.how.length(), rule.how.rows);
    codes.fill_zero().expect("host memory");
    // With scales of rows, a task has one row.
    let rule_of = |x: &[S]| match rule.how.scales_rows {
        true => Rule::new(rule.how, Some(x.iter().map(|x| x.load().abs()).fold(0.0, f32::max)), rule.largest),
        false => rule,
    };
    let (seen, scales): (Vec<_>, Vec<Vec<_>>) = codes
        .host_mut::<C>()
        .par_rows_mut(pitch * together)
        .zip(x.host::<S>().par_rows(width * together))
        .map(|(codes, x)| {
            let amaxes = (0..width.div_ceil(length)).map(|block| {
                let columns = block * length..width.min((block + 1) * length);
                let values = x.chunks(width).flat_map(|row| &row[columns.clone()]);
                values.map(|x| x.load().abs()).fold(0.0, f32::max)
            });
            let rule = rule_of(x);
            let scales: Vec<_> = amaxes.map(|amax| rule.scale(amax)).collect();
            let mut seen = Seen::default();
            for (codes, x) in codes.chunks_mut(pitch).zip(x.chunks(width)) {
                for ((codes, x), scale) in codes.chunks_mut(length).zip(x.chunks(length)).zip(&scales) {
                    seen = seen.merge(block(x, rule, *scale, codes));
                }
            }
            (seen, scales.into_iter().map(|scale| scale.decode).chain([rule.tensor]).collect())
        })
        .unzip();
    let (of_blocks, of_tensor) = scale_inv.host_mut::<f32>().split_at_mut(width.div_ceil(length) * padded);
    for (block, scale_inv) in of_blocks.chunks_mut(padded).enumerate() {
        for (row, scale_inv) in scale_inv.iter_mut().enumerate() {
            *scale_inv = scales.get(row / together).map_or(rule.scale(0.0).decode, |scales| scales[block]);
        }
    }
    let padding = rule_of(&[]).tensor;
    for (row, scale) in of_tensor.iter_mut().enumerate() {
        *scale = scales.get(row / together).map_or(padding, |scales| scales[scales.len() - 1]);
    }
    seen.into_iter().fold(Seen::default(), Seen::merge)
}

/// Returns the bits of a value. All NaNs have the same bits, because conversions to F32 differ in the bits of NaNs.
fn bits_of(x: f32) -> u64 {
    u64::from(if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() })
}

/// Casts the values of a row that share a scale.
fn block<S: Float<Real = f32>, C: Float<Real = f32>>(x: &[S], rule: Rule, scale: BlockScale, codes: &mut [C]) -> Seen {
    let key = match rule.how.stochastic {
        true => x.iter().fold(0, |key, x| hash(key ^ bits_of(x.load()))),
        false => 0,
    };
    let mut seen = Seen::default();
    for (i, (code, x)) in codes.iter_mut().zip(x).enumerate() {
        let (x, scaled) = (x.load(), x.load() * scale.encode);
        let value = match rule.how {
            Microscaling { levels: Levels::One, .. } => scaled,
            Microscaling { stochastic: true, .. } => fp4::stochastic(scaled, (hash(key ^ i as u64) >> 32) as u32),
            _ => fp4::nearest(scaled),
        };
        *code = C::store(value);
        seen.see(x, scaled.abs() > rule.largest, code.load() == 0.0);
    }
    seen
}
