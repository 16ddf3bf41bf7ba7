use super::{AdamWParameter, CastStatistics, Moments, Scalars, WeightCast};
use crate::ops::chunks::{self, Chunk, Rounding};
use crate::ops::parallel_rows::rows_per_task;
use crate::ops::parameter::{UpdatedWeight, WeightCopy};
use crate::ops::{CastScale, cast, quantize, scaled, unscaled};
use crate::{DType, Tensor};
use rayon::prelude::*;

/// The number of elements per task.
const CHUNK: usize = 1 << 14;

/// The types of scaled weights, first moments and second moments.
const SCALED_TYPES: [DType; 3] = [DType::F16, DType::E4M3, DType::F16];

pub(super) fn adamw_amaxes(parameters: &mut [AdamWParameter], norm: &Tensor, how: &Scalars) {
    let Some(clip) = chunks::clip_factor(norm, how.max_norm, how.unscale) else { return };
    for parameter in parameters.iter_mut().filter(|parameter| parameter.has_powers()) {
        let found = update(parameter, clip, how, None);
        let (weight, moments) = parameter.is_scaled();
        let amaxes = parameter.amaxes.as_deref_mut().expect(CHECKED).host_mut::<f32>();
        for ((amax, found), _) in amaxes.iter_mut().zip(found).zip([weight, moments, moments]).filter(|(_, kept)| *kept)
        {
            *amax = amax.max(found);
        }
    }
}

pub(super) fn adamw(parameters: &mut [AdamWParameter], statistics: &mut CastStatistics, norm: &Tensor, how: &Scalars) {
    let Some(clip) = chunks::clip_factor(norm, how.max_norm, how.unscale) else { return };
    for parameter in parameters {
        let mut powers = [[1.0; 2]; 3];
        if parameter.has_powers() {
            let amaxes = parameter.amaxes.as_deref().expect(CHECKED).host::<f32>();
            for (power, (amax, dtype)) in powers.iter_mut().zip(amaxes.iter().zip(SCALED_TYPES)) {
                let largest = dtype.max_finite().expect("a type that is scaled has one");
                *power = scaled::cpu::power_for(*amax, largest);
            }
        }
        update(parameter, clip, how, Some(powers.map(|[power, _]| power)));
        finish(parameter, powers.map(|[_, back]| back));
        let AdamWParameter { weight, cast, .. } = parameter;
        match cast {
            None => {}
            Some(WeightCast::Amax(amax)) => quantize::cpu::amax(&read(weight), amax, 0),
            Some(WeightCast::Codes { scale: CastScale::Given(scale), slot, into }) => {
                quantize::cpu::quantize(&read(weight), scale, into, statistics, *slot);
            }
            Some(WeightCast::Codes { scale: CastScale::Own(_, how), slot, into }) => {
                quantize::blocks::cpu::quantize_blocks(&read(weight), *how, into, statistics, *slot);
            }
        }
    }
}

/// Returns the scratch bytes for one parameter: its weights in the type that layers read, for the copy or the cast.
pub(super) fn scratch(parameters: &[AdamWParameter]) -> usize {
    let bytes = |parameter: &AdamWParameter| match &parameter.weight {
        UpdatedWeight::Master { copy: WeightCopy::Stored(copy), .. } => copy.bytes(),
        UpdatedWeight::Master { copy: WeightCopy::OnDemand(dtype), .. }
        | UpdatedWeight::Scaled { copy: WeightCopy::OnDemand(dtype), .. }
            if parameter.cast.is_some() =>
        {
            parameter.grad.values().len() * dtype.size()
        }
        _ => 0,
    };
    parameters.iter().map(bytes).max().unwrap_or(0)
}

/// Writes the inverse scales and the copy that layers read, after all values were written.
fn finish(parameter: &mut AdamWParameter, [weight, first, second]: [f32; 3]) {
    if let Moments::Scaled { m, v } = parameter.moments {
        m.scale_inv.host_mut()[0] = first;
        v.scale_inv.host_mut()[0] = second;
    }
    chunks::finish_weight(&mut parameter.weight, weight);
}

/// Returns the weights in the type that layers read.
fn read(weight: &UpdatedWeight) -> Tensor {
    match weight {
        UpdatedWeight::Master { copy: WeightCopy::Stored(copy), .. }
        | UpdatedWeight::Scaled { copy: WeightCopy::Stored(copy), .. } => (*copy).clone(),
        UpdatedWeight::Master { master, copy } => cast(master, copy.dtype()).expect(REFUSED),
        UpdatedWeight::Scaled { master, copy } => unscaled(master, copy.dtype()).expect(REFUSED),
        UpdatedWeight::Split { weight, .. } | UpdatedWeight::Stochastic { weight } => (*weight).clone(),
    }
}

const REFUSED: &str = "host memory is not refused";
const CHECKED: &str = "the op has checked that there are amaxes";

/// Computes the new weights and moments. With `powers`, writes them with these scales; without, returns their amaxes.
fn update(parameter: &mut AdamWParameter, clip: f32, how: &Scalars, powers: Option<[f32; 3]>) -> [f32; 3] {
    let keep = how.decay_factor(parameter.weight_decay);
    let seed = chunks::step_seed(parameter.seed, how.step);
    let size = match &parameter.moments {
        Moments::Expanded { m, .. } => m.codes.shape()[1].max(1),
        _ => CHUNK,
    };
    let (m, v) = match &mut *parameter.moments {
        Moments::Plain { m, v } => (Chunk::plain(m, size), Chunk::plain(v, size)),
        Moments::Scaled { m, v } => (Chunk::scaled(m, size), Chunk::scaled(v, size)),
        Moments::Expanded { m, v } => (Chunk::expanded(m), Chunk::expanded(v)),
    };
    let weight = chunks::of_weight(&mut parameter.weight, size);
    let (grad, first) = (parameter.grad, parameter.offset);
    let pieces = weight.into_par_iter().with_min_len(rows_per_task(size)).zip(m).zip(v).enumerate().map(
        |(i, ((weight, m), v))| {
            let start = i * size;
            let length = size.min(grad.values().len() - start);
            let mut pieces = [weight, m, v];
            let mut new = [(); 3].map(|()| vec![0f32; length]);
            pieces.iter().zip(&mut new).for_each(|(piece, new)| piece.load(new));
            let mut g = vec![0f32; length];
            chunks::load_gradient(grad, start, &mut g);
            let [w, m, v] = &mut new;
            for (((w, m), v), g) in w.iter_mut().zip(m).zip(v).zip(g) {
                *w = element(*w, m, v, g * clip, keep, how);
            }
            match powers {
                None => new.map(|new| new.iter().fold(0f32, |largest, x| largest.max(x.abs()))),
                Some(powers) => {
                    for (k, piece) in pieces.iter_mut().enumerate() {
                        piece.store(&new[k], Rounding { power: powers[k], seed, kind: k as u64, start: first + start });
                    }
                    [0.0; 3]
                }
            }
        },
    );
    pieces.reduce(|| [0.0; 3], |a, b| [a[0].max(b[0]), a[1].max(b[1]), a[2].max(b[2])])
}

fn element(w: f32, m: &mut f32, v: &mut f32, g: f32, keep: f32, how: &Scalars) -> f32 {
    let decayed = w * keep;
    *m += (g - *m) * how.take1;
    *v = *v * how.beta2 + g * g * how.take2;
    let denominator = v.sqrt() / how.correction2 + how.epsilon;
    decayed - how.step_size * (*m / denominator)
}
