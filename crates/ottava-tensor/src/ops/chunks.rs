//! Reads and writes stored weights, optimizer states and gradients on the CPU, in chunks. Values are converted from and to F32.

use super::parameter::{Gradient, UpdatedWeight, WeightCopy};
use crate::element::Float;
use crate::fp8::E4M3;
use crate::ops::expanded::{decode_row, encode_row, row_of};
use crate::ops::random::hash;
use crate::ops::scaled::cpu::split_f32;
use crate::ops::{cast, scaled};
use crate::stored::{ExpandedTensor, ScaledTensor};
use crate::{DType, Tensor};
use half::{bf16, f16};

/// A chunk of stored values.
pub(super) enum Chunk<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
    F16(&'a mut [f16], f32),
    E4m3(&'a mut [E4M3], f32),
    Split(&'a mut [bf16], &'a mut [i16]),
    /// Whole groups of one row: codes and levels.
    Expanded(&'a mut [u8], &'a mut [i32]),
}

/// How the values of a chunk are rounded when they are stored.
#[derive(Clone, Copy)]
pub(super) struct Rounding {
    /// The scale of scaled values.
    pub power: f32,
    /// The seed of stochastic rounding.
    pub seed: u64,
    pub kind: u64,
    /// The index of the first element of the chunk.
    pub start: usize,
}

impl<'a> Chunk<'a> {
    /// Splits an F32 or BF16 tensor into chunks of `size` elements.
    pub fn plain(x: &'a mut Tensor, size: usize) -> Vec<Chunk<'a>> {
        match x.dtype() {
            DType::F32 => x.host_mut().chunks_mut(size).map(Chunk::F32).collect(),
            _ => x.host_mut().chunks_mut(size).map(Chunk::Bf16).collect(),
        }
    }

    pub fn scaled(x: &'a mut ScaledTensor, size: usize) -> Vec<Chunk<'a>> {
        let scale = x.scale_inv.host::<f32>()[0];
        match x.values.dtype() {
            DType::F16 => x.values.host_mut().chunks_mut(size).map(|x| Chunk::F16(x, scale)).collect(),
            _ => x.values.host_mut().chunks_mut(size).map(|x| Chunk::E4m3(x, scale)).collect(),
        }
    }

    pub fn split(weight: &'a mut Tensor, rest: &'a mut Tensor, size: usize) -> Vec<Chunk<'a>> {
        let pairs = weight.host_mut().chunks_mut(size).zip(rest.host_mut().chunks_mut(size));
        pairs.map(|(weight, rest)| Chunk::Split(weight, rest)).collect()
    }

    /// Splits an expanded tensor into its rows.
    pub fn expanded(x: &'a mut ExpandedTensor) -> Vec<Chunk<'a>> {
        let [row, groups] = row_of(x);
        let groups = x.groups.host_mut().chunks_mut(groups);
        x.codes.host_mut().chunks_mut(row).zip(groups).map(|(codes, groups)| Chunk::Expanded(codes, groups)).collect()
    }

    pub fn load(&self, to: &mut [f32]) {
        match self {
            Chunk::F32(x) => to.copy_from_slice(x),
            Chunk::Bf16(x) => load(x, 1.0, to),
            Chunk::F16(x, scale) => load(x, *scale, to),
            Chunk::E4m3(x, scale) => load(x, *scale, to),
            Chunk::Split(weight, rest) => {
                for (to, (weight, rest)) in to.iter_mut().zip(weight.iter().zip(rest.iter())) {
                    let bits = u32::from(weight.to_bits()) << 16;
                    *to = f32::from_bits(bits.wrapping_add_signed(i32::from(*rest)));
                }
            }
            Chunk::Expanded(codes, groups) => decode_row(codes, groups, to),
        }
    }

    pub fn store(&mut self, from: &[f32], how: Rounding) {
        match self {
            Chunk::F32(x) => x.copy_from_slice(from),
            Chunk::Bf16(x) => {
                for (i, (x, &from)) in x.iter_mut().zip(from).enumerate() {
                    *x = round_stochastically(from, how.seed, (how.start + i) as u64, how.kind);
                }
            }
            Chunk::F16(x, _) => store(from, how.power, x),
            Chunk::E4m3(x, _) => store(from, how.power, x),
            Chunk::Split(weight, rest) => {
                for (&from, (weight, rest)) in from.iter().zip(weight.iter_mut().zip(rest.iter_mut())) {
                    (*weight, *rest) = split_f32(from);
                }
            }
            Chunk::Expanded(codes, groups) => encode_row(from, codes, groups),
        }
    }
}

fn load<X: Float<Real = f32>>(x: &[X], scale: f32, to: &mut [f32]) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to = x.load() * scale);
}

fn store<X: Float<Real = f32>>(from: &[f32], power: f32, x: &mut [X]) {
    x.iter_mut().zip(from).for_each(|(x, from)| *x = X::store(from * power));
}

/// Splits the stored weights into chunks of `size` elements.
pub(super) fn of_weight<'a>(weight: &'a mut UpdatedWeight, size: usize) -> Vec<Chunk<'a>> {
    match weight {
        UpdatedWeight::Master { master, .. } => Chunk::plain(master, size),
        UpdatedWeight::Scaled { master, .. } => Chunk::scaled(master, size),
        UpdatedWeight::Split { weight, rest } => Chunk::split(weight, rest, size),
        UpdatedWeight::Stochastic { weight } => Chunk::plain(weight, size),
    }
}

/// Finishes an update: writes the inverse scale of scaled weights, and the copy that layers read.
pub(super) fn finish_weight(weight: &mut UpdatedWeight, scale_inv: f32) {
    if let UpdatedWeight::Scaled { master, .. } = weight {
        master.scale_inv.host_mut()[0] = scale_inv;
    }
    match weight {
        UpdatedWeight::Master { master, copy: WeightCopy::Stored(copy) } => {
            let rounded = cast(master, copy.dtype()).expect("host memory is not refused");
            copy.copy_from(0, &rounded).expect("of the same type and size");
        }
        UpdatedWeight::Scaled { master, copy: WeightCopy::Stored(copy) } => scaled::cpu::unscaled(master, copy),
        _ => {}
    }
}

/// Loads elements of a gradient, beginning with element `start`.
pub(super) fn load_gradient(grad: Gradient, start: usize, to: &mut [f32]) {
    let range = start..start + to.len();
    match grad {
        Gradient::Plain(grad) if grad.dtype() == DType::F32 => load(&grad.host::<f32>()[range], 1.0, to),
        Gradient::Plain(grad) => load(&grad.host::<bf16>()[range], 1.0, to),
        Gradient::Scaled(grad) => load(&grad.values.host::<E4M3>()[range], grad.scale_inv.host::<f32>()[0], to),
    }
}

/// Returns the factor that clips gradients and removes the loss scale; `None` if `norm` is not finite.
///
/// `norm` is the norm of the stored gradients. They are clipped to `max_norm`; 0 means no clipping.
pub(super) fn clip_factor(norm: &Tensor, max_norm: f32, unscale: f32) -> Option<f32> {
    let norm = norm.host::<f32>()[0];
    let clip = match max_norm {
        0.0 => 1.0,
        max_norm => (max_norm / (norm * unscale + 1e-6)).min(1.0),
    };
    norm.is_finite().then_some(clip * unscale)
}

/// Returns the seed of stochastic rounding in a step, for a parameter with this `seed`.
pub(super) fn step_seed(seed: u64, step: u64) -> u64 {
    hash(seed ^ hash(step))
}

/// Rounds to BF16 stochastically: adds 16 random bits and truncates. One 64-bit hash serves four neighbouring elements. The weight and the two
/// moments of an element use different bits of the hash.
fn round_stochastically(x: f32, seed: u64, i: u64, kind: u64) -> bf16 {
    if !x.is_finite() {
        return bf16::from_f32(x);
    }
    let random = (hash(seed ^ (i / 4)) >> (16 * ((i + kind) % 4))) as u16;
    bf16::from_bits((x.to_bits().wrapping_add(u32::from(random)) >> 16) as u16)
}
