use super::{AdamWState, Scalars};
use crate::element::Float;
use crate::{DType, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

const CHUNK: usize = 1 << 14;

pub(super) fn adamw(state: AdamWState, grad: &Tensor, norm: &Tensor, how: &Scalars) {
    let norm = norm.host::<f32>()[0];
    if !norm.is_finite() {
        return;
    }
    let clip = clip_factor(norm, how.max_norm);
    let chunks = state.master.host_mut::<f32>().par_chunks_mut(CHUNK).zip(grad.host::<f32>().par_chunks(CHUNK));
    chunks
        .zip(state.m.host_mut::<f32>().par_chunks_mut(CHUNK).zip(state.v.host_mut::<f32>().par_chunks_mut(CHUNK)))
        .for_each(|((master, grad), (m, v))| {
            for (((w, g), m), v) in master.iter_mut().zip(grad).zip(m).zip(v) {
                element(w, g * clip, m, v, how);
            }
        });
    if let Some(copy) = state.copy {
        match copy.dtype() {
            DType::BF16 => round::<bf16>(state.master.host(), copy.host_mut()),
            _ => round::<f16>(state.master.host(), copy.host_mut()),
        }
    }
}

fn clip_factor(norm: f32, max_norm: f32) -> f32 {
    if max_norm == 0.0 { 1.0 } else { (max_norm / (norm + 1e-6)).min(1.0) }
}

fn element(w: &mut f32, g: f32, m: &mut f32, v: &mut f32, how: &Scalars) {
    let decayed = *w * how.keep;
    *m += (g - *m) * how.take1;
    *v = *v * how.beta2 + g * g * how.take2;
    let denominator = v.sqrt() / how.correction2 + how.epsilon;
    *w = decayed - how.step_size * (*m / denominator);
}

fn round<S: Float<Real = f32>>(from: &[f32], to: &mut [S]) {
    to.par_iter_mut().with_min_len(CHUNK).zip(from).for_each(|(to, &from)| *to = S::store(from));
}
