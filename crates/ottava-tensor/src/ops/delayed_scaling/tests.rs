use super::*;
use crate::testing::{Tolerance, parity};

fn tensor(shape: &[usize], values: &[f32]) -> Tensor {
    Tensor::from_slice(&Device::Cpu, shape, values).unwrap()
}

#[test]
fn delayed_scaling_agrees_across_devices() {
    let amax = tensor(&[5], &[1.5, 0.0, f32::INFINITY, 1e-45, 3e38]);
    for window in [1, 2, 16] {
        let mut history = vec![0.0; window * 5];
        history[5.min(window * 5 - 5)..].iter_mut().enumerate().for_each(|(i, h)| *h = i as f32 * 0.3);
        let inputs = [amax.clone(), tensor(&[window, 5], &history), tensor(&[5], &[1.0; 5]), tensor(&[5], &[448.0; 5])];
        for reducer in [AmaxReducer::Max, AmaxReducer::MostRecent] {
            parity(&inputs, Tolerance::Exact, |t| {
                let (mut amax, mut history, mut scale) = (t[0].duplicate()?, t[1].duplicate()?, t[2].duplicate()?);
                for _ in 0..3 {
                    delayed_scaling(&mut amax, &mut history, &mut scale, &t[3], DelayedScaling { reducer, margin: 1 })?;
                    amax = t[0].duplicate()?;
                }
                Ok(vec![history, scale])
            });
        }
    }
}

#[test]
fn a_zero_changes_nothing_and_clears_nothing() {
    let (mut amax, mut history, mut scale) =
        (tensor(&[1], &[0.0]), tensor(&[3, 1], &[0.0, 2.0, 4.0]), tensor(&[1], &[7.0]));
    let how = DelayedScaling { reducer: AmaxReducer::Max, margin: 0 };
    delayed_scaling(&mut amax, &mut history, &mut scale, &tensor(&[1], &[448.0]), how).unwrap();
    assert_eq!((history.to_vec::<f32>().unwrap(), scale.to_vec::<f32>().unwrap()), (vec![0.0, 2.0, 4.0], vec![7.0]));
}

#[test]
fn the_value_about_to_leave_the_window_still_counts() {
    let (mut amax, mut history, mut scale) =
        (tensor(&[1], &[1.0]), tensor(&[3, 1], &[0.0, 8.0, 4.0]), tensor(&[1], &[1.0]));
    let how = DelayedScaling { reducer: AmaxReducer::Max, margin: 1 };
    delayed_scaling(&mut amax, &mut history, &mut scale, &tensor(&[1], &[448.0]), how).unwrap();
    assert_eq!((history.to_vec::<f32>().unwrap(), scale.to_vec::<f32>().unwrap()), (vec![0.0, 4.0, 1.0], vec![28.0]));
    assert_eq!(amax.to_vec::<f32>().unwrap(), [0.0]);
}
