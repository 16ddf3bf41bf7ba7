use super::*;
use crate::Device;
use crate::testing::{Tolerance, normals, parity, values};

fn like(tensor: &Tensor, values: &[f64]) -> Tensor {
    let values = Tensor::from_slice(&Device::Cpu, &[values.len()], values).unwrap();
    crate::ops::cast(&values, tensor.dtype()).unwrap().to_device(tensor.device()).unwrap()
}

const HOW: ValueLoss = ValueLoss { coefficient: 0.6, range: 0.25 };

/// The losses and the gradient of values `x` with old values and returns on both sides of them, ignored tokens and tokens without weight.
fn of(how: ValueLoss, start: &[f64], x: &Tensor) -> Result<(Tensor, Tensor)> {
    let each = |of: &dyn Fn(usize) -> f64| like(x, &(0..start.len()).map(of).collect::<Vec<_>>());
    let old = each(&|t| start[t] + [0.1, -0.4, 0.5, -0.05, 0.9][t % 5]);
    let returns = each(&|t| start[t] + [0.7, -0.6, 0.02][t % 3]);
    let weights = each(&|t| if t % 7 == 3 { 0.0 } else { 0.5 + (t % 2) as f64 });
    let ids: Vec<i32> = (0..start.len()).map(|t| if t % 8 == 4 { IGNORE_INDEX } else { 1 }).collect();
    let targets = Tensor::from_slice(x.device(), &[ids.len()], &ids)?;
    let known = ValueTargets { old: &old, returns: &returns, weights: &weights };
    value_loss(&how, x, &targets, known, &like(x, &[0.7]))
}

#[test]
fn value_loss_agrees_across_devices() {
    for tokens in [1, 7, 300] {
        // A unit of F32 for the rounding of constants and of the result: all else runs in F64 on both.
        parity(&[normals("values", &[tokens], DType::F32)], Tolerance::Steps(DType::F32, 4.0), |x| {
            let start = values(&normals("values", &[tokens], DType::F32));
            let (losses, gradient) = of(HOW, &start, &x[0])?;
            Ok(vec![losses, gradient])
        });
    }
}

#[test]
fn the_gradient_is_that_of_the_losses() {
    let start = values(&normals("values", &[40], DType::F64));
    for how in [HOW, ValueLoss { range: f64::INFINITY, ..HOW }] {
        let at = |x: &[f64]| {
            let x = Tensor::from_slice(&Device::Cpu, &[x.len()], x).unwrap();
            let (losses, gradient) = of(how, &start, &x).unwrap();
            (values(&losses), values(&gradient))
        };
        let (losses, gradient) = at(&start);
        let mut constant = 0;
        for t in 0..start.len() {
            let moved = |by: f64| {
                let mut x = start.clone();
                x[t] += by;
                at(&x).0.iter().sum::<f64>()
            };
            let difference = 0.6 * 0.7 * (moved(1e-6) - moved(-1e-6)) / 2e-6;
            // A step of 1e-6 leaves 2^-53 / 1e-6 of a sum of a few units.
            assert!((gradient[t] - difference).abs() < 1e-8, "{how:?}, {t}: {}, {difference}", gradient[t]);
            constant += usize::from(losses[t] > 0.0 && gradient[t] == 0.0);
        }
        assert_eq!(constant > 0, how.range.is_finite(), "beyond the range, a value has no gradient");
    }
}

/// By hand: the value moved 0.5 towards its return, of which 0.25 count, and 0.5 away from its return.
#[test]
fn losses_are_those_of_the_formula() {
    let tensor = |values: &[f64]| Tensor::from_slice(&Device::Cpu, &[values.len()], values).unwrap();
    let [x, old, returns, weights] = [[0.5, -0.5], [0.0, 0.0], [1.0, 1.0], [2.0, 1.0]].map(|values| tensor(&values));
    let targets = Tensor::from_slice(&Device::Cpu, &[2], &[1, 1]).unwrap();
    let known = ValueTargets { old: &old, returns: &returns, weights: &weights };
    let (losses, gradient) = value_loss(&HOW, &x, &targets, known, &tensor(&[1.0])).unwrap();
    assert_eq!(values(&losses), [2.0 * 0.5 * 0.75 * 0.75, 0.5 * 1.5 * 1.5]);
    assert_eq!(values(&gradient), [0.0, 0.6 * -1.5]);
    let error = value_loss(&ValueLoss { range: 0.0, ..HOW }, &x, &targets, known, &tensor(&[1.0])).unwrap_err();
    assert!(error.to_string().contains("the range 0"), "{error}");
}
