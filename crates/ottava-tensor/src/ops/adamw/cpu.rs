use super::{AdamWParameter, AdamWWeight, CastStatistics, Scalars, WeightCast};
use crate::element::Float;
use crate::ops::random::hash;
use crate::ops::{CastScale, quantize};
use crate::{DType, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

const CHUNK: usize = 1 << 14;

pub(super) fn adamw(parameters: &mut [AdamWParameter], statistics: &mut CastStatistics, norm: &Tensor, how: &Scalars) {
    let norm = norm.host::<f32>()[0];
    if !norm.is_finite() {
        return;
    }
    let clip = clip_factor(norm * how.unscale, how.max_norm) * how.unscale;
    for parameter in parameters {
        match parameter.grad.dtype() {
            DType::F32 => with_gradient::<f32>(parameter, clip, how),
            _ => with_gradient::<bf16>(parameter, clip, how),
        }
        match &mut parameter.cast {
            None => {}
            Some(WeightCast::Amax(amax)) => quantize::cpu::amax(parameter.weight.read(), amax, 0),
            Some(WeightCast::Codes { scale: CastScale::Given(scale), slot, into }) => {
                quantize::cpu::quantize(parameter.weight.read(), scale, into, statistics, *slot);
            }
            Some(WeightCast::Codes { scale: CastScale::Own(_, how), slot, into }) => {
                quantize::blocks::cpu::quantize_blocks(parameter.weight.read(), *how, into, statistics, *slot);
            }
        }
    }
}

fn with_gradient<G: Float<Real = f32>>(parameter: &mut AdamWParameter, clip: f32, how: &Scalars) {
    match parameter.m.dtype() {
        DType::F32 => update::<f32, G>(parameter, clip, how),
        _ => update::<bf16, G>(parameter, clip, how),
    }
}

fn clip_factor(norm: f32, max_norm: f32) -> f32 {
    if max_norm == 0.0 { 1.0 } else { (max_norm / (norm + 1e-6)).min(1.0) }
}

fn update<S: Float<Real = f32>, G: Float<Real = f32>>(parameter: &mut AdamWParameter, clip: f32, how: &Scalars) {
    let keep = how.keep(parameter.weight_decay);
    let (m, v, grad) = (parameter.m.host_mut::<S>(), parameter.v.host_mut::<S>(), parameter.grad.host::<G>());
    let moments = m.par_chunks_mut(CHUNK).zip(v.par_chunks_mut(CHUNK)).zip(grad.par_chunks(CHUNK));
    match &mut parameter.weight {
        AdamWWeight::Master { master, copy } => {
            master.host_mut::<f32>().par_chunks_mut(CHUNK).zip(moments).for_each(|(w, ((m, v), grad))| {
                for (((w, m), v), g) in w.iter_mut().zip(m).zip(v).zip(grad) {
                    *w = element(*w, m, v, g.load() * clip, keep, how);
                }
            });
            match copy {
                Some(copy) if copy.dtype() == DType::F16 => round::<f16>(master.host(), copy.host_mut()),
                Some(copy) => round::<bf16>(master.host(), copy.host_mut()),
                None => {}
            }
        }
        AdamWWeight::Stochastic { weight, seed } => {
            let seed = how.stochastic_seed(*seed);
            let chunks = weight.host_mut::<bf16>().par_chunks_mut(CHUNK).zip(moments).enumerate();
            chunks.for_each(|(chunk, (w, ((m, v), grad)))| {
                for (i, (((w, m), v), g)) in w.iter_mut().zip(m).zip(v).zip(grad).enumerate() {
                    let new = element(w.to_f32(), m, v, g.load() * clip, keep, how);
                    *w = by_chance(new, seed, (chunk * CHUNK + i) as u64);
                }
            });
        }
    }
}

fn element<S: Float<Real = f32>>(w: f32, m: &mut S, v: &mut S, g: f32, keep: f32, how: &Scalars) -> f32 {
    let decayed = w * keep;
    let m1 = m.load() + (g - m.load()) * how.take1;
    let v1 = v.load() * how.beta2 + g * g * how.take2;
    (*m, *v) = (S::store(m1), S::store(v1));
    let denominator = v1.sqrt() / how.correction2 + how.epsilon;
    decayed - how.step_size * (m1 / denominator)
}

fn round<S: Float<Real = f32>>(from: &[f32], to: &mut [S]) {
    to.par_iter_mut().with_min_len(CHUNK).zip(from).for_each(|(to, &from)| *to = S::store(from));
}

/// Up with the probability of the dropped bits: as many random bits are added, and what they carry over stays. A hash has the bits
/// of four elements.
fn by_chance(x: f32, seed: u64, i: u64) -> bf16 {
    if !x.is_finite() {
        return bf16::from_f32(x);
    }
    let random = (hash(seed ^ (i / 4)) >> (16 * (i % 4))) as u16;
    bf16::from_bits((x.to_bits().wrapping_add(u32::from(random)) >> 16) as u16)
}
