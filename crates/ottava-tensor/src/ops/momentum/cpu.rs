use super::{Direction, Momentum, MomentumParameter, Scalars};
use crate::ops::chunks::{self, Chunk, Rounding};
use crate::ops::parallel_rows::ParallelRows;
use crate::ops::scaled;
use crate::{DType, Tensor};
use half::bf16;
use rayon::prelude::*;

/// The number of elements per task.
const CHUNK: usize = 1 << 14;

/// Writes the direction. If `stores` is true, also writes the momentum; otherwise raises its amax.
pub(super) fn momentum(parameter: MomentumParameter, rule: Direction, norm: &Tensor, how: &Scalars, stores: bool) {
    let Some(clip) = chunks::clip_factor(norm, how.max_norm, how.unscale) else { return };
    let MomentumParameter { momentum, grad, direction, seed, offset, amaxes } = parameter;
    let is_scaled = matches!(momentum, Momentum::Scaled(_));
    let amaxes = amaxes.filter(|_| is_scaled).map(|amaxes| amaxes.host_mut::<f32>());
    let [power, back] = match &amaxes {
        Some(amaxes) => scaled::cpu::power_for(amaxes[1], DType::E4M3.max_finite().expect("a narrow type")),
        None => [1.0; 2],
    };
    let size = match &*momentum {
        Momentum::Expanded(m) => m.codes.shape()[1].max(1),
        _ => CHUNK,
    };
    let pieces = match &mut *momentum {
        Momentum::Plain(m) => Chunk::plain(m, size),
        Momentum::Scaled(m) => Chunk::scaled(m, size),
        Momentum::Expanded(m) => Chunk::expanded(m),
    };
    let seed = chunks::step_seed(seed, how.step);
    let pieces = pieces.into_par_iter().zip(direction.host_mut::<bf16>().par_rows_mut(size)).enumerate();
    let largest = pieces.map(|(i, (mut piece, direction))| {
        let start = i * size;
        let [mut m, mut g] = [(); 2].map(|()| vec![0f32; direction.len()]);
        piece.load(&mut m);
        chunks::load_gradient(grad, start, &mut g);
        for ((m, g), direction) in m.iter_mut().zip(g).zip(direction) {
            *direction = bf16::from_f32(element(m, g * clip, rule, how));
        }
        if stores {
            piece.store(&m, Rounding { power, seed, kind: 1, start: offset + start });
        }
        m.iter().fold(0f32, |largest, m| largest.max(m.abs()))
    });
    let largest = largest.reduce(|| 0.0, f32::max);
    match (momentum, amaxes) {
        (Momentum::Scaled(m), _) if stores => m.scale_inv.host_mut()[0] = back,
        (_, Some(amaxes)) => amaxes[1] = amaxes[1].max(largest),
        _ => {}
    }
}

/// Updates `m` and returns the direction.
fn element(m: &mut f32, g: f32, rule: Direction, how: &Scalars) -> f32 {
    let old = *m;
    *m = old + (g - old) * how.take2;
    match rule {
        Direction::Nesterov => *m + (g - *m) * how.take1,
        Direction::Sign => match old + (g - old) * how.take1 {
            0.0 => 0.0,
            mean => 1f32.copysign(mean),
        },
    }
}
