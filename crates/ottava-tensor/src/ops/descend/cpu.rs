use super::DescendParameter;
use crate::ops::chunks::{self, Rounding};
use crate::ops::momentum::Scalars;
use crate::ops::parameter::{UpdatedWeight, WeightCopy};
use crate::ops::scaled;
use crate::{DType, Tensor};
use half::bf16;
use rayon::prelude::*;

/// The number of elements per task.
const CHUNK: usize = 1 << 14;

/// Writes the weights if `stores` is true; otherwise raises their amax.
pub(super) fn descend(mut parameter: DescendParameter, norm: &Tensor, how: &Scalars, stores: bool) {
    if chunks::clip_factor(norm, how.max_norm, how.unscale).is_none() {
        return;
    }
    let is_scaled = super::is_scaled(&parameter);
    let DescendParameter { weight, direction, weight_decay, seed, offset, amaxes } = &mut parameter;
    let amaxes = amaxes.as_mut().filter(|_| is_scaled).map(|amaxes| amaxes.host_mut::<f32>());
    let [power, back] = match &amaxes {
        Some(amaxes) => scaled::cpu::power_for(amaxes[0], DType::F16.max_finite().expect("a narrow type")),
        None => [1.0; 2],
    };
    let (rate, keep) = (how.learning_rate as f32, (1.0 - how.learning_rate * *weight_decay) as f32);
    let (seed, first) = (chunks::step_seed(*seed, how.step), *offset);
    let pieces = chunks::of_weight(weight, CHUNK).into_par_iter().zip(direction.host::<bf16>().par_chunks(CHUNK));
    let largest = pieces.enumerate().map(|(i, (mut piece, direction))| {
        let mut w = vec![0f32; direction.len()];
        piece.load(&mut w);
        for (w, d) in w.iter_mut().zip(direction) {
            *w = *w * keep - rate * d.to_f32();
        }
        if stores {
            piece.store(&w, Rounding { power, seed, kind: 0, start: first + i * CHUNK });
        }
        w.iter().fold(0f32, |largest, w| largest.max(w.abs()))
    });
    let largest = largest.reduce(|| 0.0, f32::max);
    match amaxes {
        _ if stores => chunks::finish_weight(weight, back),
        Some(amaxes) => amaxes[0] = amaxes[0].max(largest),
        None => {}
    }
}

/// Returns the scratch bytes: the weights in the type that layers read, for the copy.
pub(super) fn scratch(parameter: &DescendParameter) -> usize {
    match &parameter.weight {
        UpdatedWeight::Master { copy: WeightCopy::Stored(copy), .. } => copy.bytes(),
        _ => 0,
    }
}
