use super::{AmaxReducer, DelayedScales, DelayedScaling, NonFinite};
use crate::Tensor;

pub(super) fn delayed_scaling(amax: &mut Tensor, state: &mut DelayedScales, how: DelayedScaling) {
    let n = amax.len();
    let history = state.history.host_mut::<f32>();
    let headroom = how.headroom();
    for i in 0..n {
        let newest = std::mem::take(&mut amax.host_mut::<f32>()[i]);
        let wait = &mut state.wait.host_mut::<i64>()[i];
        let due = *wait == 0;
        if !due {
            *wait -= 1;
        }
        if !newest.is_finite() {
            state.non_finite.host_mut::<i64>()[i] += 1;
        }
        if newest == 0.0 || (!newest.is_finite() && how.non_finite == NonFinite::Quarantine) {
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
        if due && reduced.is_finite() && reduced > 0.0 {
            state.scale.host_mut::<f32>()[i] = (state.largest.host::<f32>()[i] * headroom / reduced).min(f32::MAX);
            *wait = i64::from(how.interval) - 1;
        }
    }
}
