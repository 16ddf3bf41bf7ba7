use super::*;
use crate::testing::{Tolerance, parity};

const EVERY: DelayedScaling =
    DelayedScaling { reducer: AmaxReducer::Max, margin: 0, interval: 1, non_finite: NonFinite::Quarantine };
const INF: f32 = f32::INFINITY;

fn tensor(shape: &[usize], values: &[f32]) -> Tensor {
    Tensor::from_slice(&Device::Cpu, shape, values).unwrap()
}

/// Returns the scales of one E4M3 entry after each of `amaxes`, and its final state.
fn script(window: usize, how: DelayedScaling, amaxes: &[f32]) -> (Vec<f32>, DelayedScales) {
    let mut state = DelayedScales::new(&Device::Cpu, window, &[448.0]).unwrap();
    let scales = amaxes.iter().map(|&a| {
        let mut amax = tensor(&[1], &[a]);
        delayed_scaling(&mut amax, &mut state, how).unwrap();
        assert_eq!(amax.to_vec::<f32>().unwrap(), [0.0]);
        state.scale.to_vec::<f32>().unwrap()[0]
    });
    (scales.collect(), state)
}

#[test]
fn delayed_scaling_agrees_across_devices() {
    let amax = tensor(&[7], &[1.5, 0.0, INF, 1e-45, 3e38, f32::NAN, f32::MAX]);
    let later = tensor(&[7], &[INF, 2.5, 1.0, f32::NAN, 0.0, 7.0, 1e-30]);
    for window in [1, 2, 16] {
        let mut history = vec![0.0; window * 7];
        history[7.min(window * 7 - 7)..].iter_mut().enumerate().for_each(|(i, h)| *h = i as f32 * 0.3);
        let inputs = [amax.clone(), later.clone(), tensor(&[window, 7], &history)];
        let hows = [AmaxReducer::Max, AmaxReducer::MostRecent]
            .into_iter()
            .flat_map(|reducer| [NonFinite::Quarantine, NonFinite::Keep].map(|n| (reducer, n)))
            .flat_map(|(reducer, n)| [1, 3].map(|interval| (reducer, n, interval)));
        for (reducer, non_finite, interval) in hows {
            parity(&inputs, Tolerance::Exact, |t| {
                let mut state = DelayedScales::new(t[0].device(), window, &[448.0; 7])?;
                state.history = t[2].duplicate()?;
                for step in 0..5 {
                    let how = DelayedScaling { reducer, margin: 1, interval, non_finite };
                    delayed_scaling(&mut t[step % 2].duplicate()?, &mut state, how)?;
                }
                let DelayedScales { history, scale, wait, non_finite, .. } = state;
                let counters = [wait, non_finite].map(|t| {
                    let values: Vec<f32> = t.to_vec::<i64>().unwrap().into_iter().map(|v| v as f32).collect();
                    tensor(&[7], &values)
                });
                Ok([history, scale].into_iter().chain(counters).collect())
            });
        }
    }
}

#[test]
fn a_zero_changes_nothing_and_clears_nothing() {
    let (scales, state) = script(3, EVERY, &[2.0, 4.0, 0.0]);
    assert_eq!(scales, [224.0, 112.0, 112.0]);
    assert_eq!(state.history.to_vec::<f32>().unwrap(), [0.0, 2.0, 4.0]);
    assert_eq!(state.non_finite.to_vec::<i64>().unwrap(), [0]);
}

#[test]
fn the_value_about_to_leave_the_window_still_counts() {
    let (scales, state) = script(3, DelayedScaling { margin: 1, ..EVERY }, &[8.0, 4.0, 1.0, 1.0, 1.0]);
    // One of the three rows is the staging row. So 8 leaves the history in the third update, whose scale it still determines.
    assert_eq!(scales, [28.0, 28.0, 28.0, 56.0, 224.0]);
    assert_eq!(state.history.to_vec::<f32>().unwrap(), [0.0, 1.0, 1.0]);
}

#[test]
fn a_window_of_one_uses_the_most_recent_amax() {
    let (scales, state) = script(1, EVERY, &[8.0, 2.0, 0.0, INF, 4.0]);
    assert_eq!(scales, [56.0, 224.0, 224.0, 224.0, 112.0]);
    assert_eq!(state.history.to_vec::<f32>().unwrap(), [0.0]);
}

#[test]
fn most_recent_ignores_older_amaxes() {
    let how = DelayedScaling { reducer: AmaxReducer::MostRecent, ..EVERY };
    assert_eq!(script(4, how, &[8.0, 2.0, 4.0]).0, [56.0, 224.0, 112.0]);
}

#[test]
fn a_tiny_amax_gives_the_largest_finite_scale() {
    assert_eq!(script(2, EVERY, &[1e-45, 1e-40]).0, [f32::MAX; 2]);
}

#[test]
fn quarantine_ignores_and_counts_non_finite_amaxes() {
    let (scales, state) = script(4, EVERY, &[2.0, INF, 1.0, f32::NAN, INF, 4.0]);
    assert_eq!(scales, [224.0, 224.0, 224.0, 224.0, 224.0, 112.0]);
    assert_eq!(state.history.to_vec::<f32>().unwrap(), [0.0, 2.0, 1.0, 4.0]);
    assert_eq!(state.non_finite.to_vec::<i64>().unwrap(), [3]);
}

#[test]
fn keep_holds_the_scale_while_an_infinity_is_in_the_window() {
    let how = DelayedScaling { non_finite: NonFinite::Keep, ..EVERY };
    let (scales, state) = script(3, how, &[2.0, INF, 1.0, 1.0, 1.0, 1.0]);
    assert_eq!(scales, [224.0, 224.0, 224.0, 224.0, 448.0, 448.0]);
    assert_eq!(state.non_finite.to_vec::<i64>().unwrap(), [1]);
    // NaN also enters the history; a maximum is never NaN.
    let (scales, state) = script(3, how, &[2.0, f32::NAN, 1.0]);
    assert_eq!(scales, [224.0; 3]);
    assert!(state.history.to_vec::<f32>().unwrap()[1].is_nan());
}

#[test]
fn scales_change_once_per_interval_and_histories_always_roll() {
    let how = DelayedScaling { interval: 3, reducer: AmaxReducer::MostRecent, ..EVERY };
    let (scales, state) = script(4, how, &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]);
    assert_eq!(scales, [448.0, 448.0, 448.0, 56.0, 56.0, 56.0, 7.0]);
    assert_eq!(state.history.to_vec::<f32>().unwrap(), [0.0, 16.0, 32.0, 64.0]);
    // Updates without a value count, and a due entry stays due.
    assert_eq!(
        script(4, how, &[1.0, 0.0, INF, 0.0, INF, 2.0, 4.0]).0,
        [448.0, 448.0, 448.0, 448.0, 448.0, 224.0, 224.0]
    );
}
