use super::{AmaxReducer, DelayedScaling};
use crate::Tensor;

pub(super) fn delayed_scaling(
    amax: &mut Tensor,
    history: &mut Tensor,
    scale: &mut Tensor,
    largest: &Tensor,
    how: DelayedScaling,
) {
    let n = amax.len();
    let history = history.host_mut::<f32>();
    let headroom = how.headroom();
    for i in 0..n {
        let newest = std::mem::take(&mut amax.host_mut::<f32>()[i]);
        if newest == 0.0 {
            continue;
        }
        let mut reduced = newest;
        for row in 1..history.len() / n {
            let old = history[row * n + i];
            if how.reducer == AmaxReducer::Max {
                reduced = reduced.max(old);
            }
            history[(row - 1) * n + i] = old;
        }
        let last = history.len() - n + i;
        history[last] = newest;
        history[i] = 0.0;
        if reduced.is_finite() && reduced > 0.0 {
            scale.host_mut::<f32>()[i] = (largest.host::<f32>()[i] * headroom / reduced).min(f32::MAX);
        }
    }
}
