use super::*;
use crate::testing::{Tolerance, normals, parity, values};
use crate::{Device, ops};

const ALL: [LabelLoss; 3] = [LabelLoss::SingleLabel, LabelLoss::MultiLabel, LabelLoss::Regression];

fn like(tensor: &Tensor, shape: &[usize], values: &[f64]) -> Tensor {
    let values = Tensor::from_slice(&Device::Cpu, shape, values).unwrap();
    ops::cast(&values, tensor.dtype()).unwrap().to_device(tensor.device()).unwrap()
}

/// The losses and the gradient of `scores` `[T, L]`. Every third token is ignored, and the other tokens share three rows of labels.
fn of(loss: LabelLoss, scores: &Tensor) -> Result<[Tensor; 2]> {
    let [tokens, count] = scores.dims("scores")?;
    let label = |row: usize, l: usize| match loss {
        LabelLoss::SingleLabel => f64::from(u8::from(l == (row * 7 + 1) % count)),
        LabelLoss::MultiLabel => [0.0, 1.0, 0.25][(row + l) % 3],
        LabelLoss::Regression => (row + l) as f64 * 0.5 - 1.0,
    };
    let labels: Vec<f64> = (0..3 * count).map(|at| label(at / count, at % count)).collect();
    let ids: Vec<i32> = (0..tokens).map(|t| if t % 3 == 2 { IGNORE_INDEX } else { (t % 4 % 3) as i32 }).collect();
    let targets = Tensor::from_slice(scores.device(), &[tokens], &ids)?;
    let mut gradient = scores.duplicate()?;
    let (labels, scale) = (like(scores, &[3, count], &labels), like(scores, &[1], &[0.7]));
    let losses = label_loss(loss, &mut gradient, &targets, &labels, &scale)?;
    Ok([losses, gradient])
}

#[test]
fn label_loss_agrees_across_devices() {
    for loss in ALL {
        for (tokens, count) in [(1, 1), (7, 3), (65, 64), (33, 257)] {
            // All arithmetic runs in F64 on both. The exponential of each may differ in its last bits.
            parity(&[normals("scores", &[tokens, count], DType::F32)], Tolerance::Steps(DType::F32, 2.0), |x| {
                Ok(of(loss, &x[0])?.to_vec())
            });
        }
    }
}

#[test]
fn the_gradient_is_that_of_the_losses() {
    let start = values(&normals("scores", &[8, 3], DType::F64));
    for loss in ALL {
        let at = |x: &[f64]| {
            let [losses, gradient] = of(loss, &Tensor::from_slice(&Device::Cpu, &[8, 3], x).unwrap()).unwrap();
            (values(&losses), values(&gradient))
        };
        let (losses, gradient) = at(&start);
        assert_eq!([losses[2], losses[5]], [0.0; 2], "ignored");
        for at_score in 0..start.len() {
            let moved = |by: f64| {
                let mut x = start.clone();
                x[at_score] += by;
                at(&x).0.iter().sum::<f64>()
            };
            let difference = 0.7 * (moved(1e-6) - moved(-1e-6)) / 2e-6;
            // A step of 1e-6 leaves 2^-53 / 1e-6 of a sum of a few units.
            assert!((gradient[at_score] - difference).abs() < 1e-8, "{loss:?}: {} {difference}", gradient[at_score]);
        }
    }
}

/// By hand: two labels with equal scores, a score of 0, and an error of 2 beside an error of 0.
#[test]
fn losses_are_those_of_the_formula() {
    let loss = |loss, scores: &[f64], labels: &[f64]| {
        let tensor = |values: &[f64]| Tensor::from_slice(&Device::Cpu, &[1, values.len()], values).unwrap();
        let (mut scores, targets) = (tensor(scores), Tensor::from_slice(&Device::Cpu, &[1], &[0]).unwrap());
        let scale = Tensor::from_slice(&Device::Cpu, &[1], &[1.0]).unwrap();
        values(&label_loss(loss, &mut scores, &targets, &tensor(labels), &scale).unwrap())[0]
    };
    assert!((loss(LabelLoss::SingleLabel, &[3.0, 3.0], &[0.0, 1.0]) - 2f64.ln()).abs() < 1e-15);
    assert_eq!(loss(LabelLoss::SingleLabel, &[1.0, f64::NEG_INFINITY], &[1.0, 0.0]), 0.0);
    assert!((loss(LabelLoss::MultiLabel, &[0.0], &[1.0]) - 2f64.ln()).abs() < 1e-15);
    assert_eq!(loss(LabelLoss::MultiLabel, &[-1000.0], &[0.0]), 0.0);
    assert_eq!(loss(LabelLoss::Regression, &[3.0, 1.0], &[1.0, 1.0]), 2.0);
}
