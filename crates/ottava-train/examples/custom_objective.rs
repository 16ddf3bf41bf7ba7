//! A custom objective: the loss of the next token, in which a token that the model already knows counts less, `(1 - p)·-ln p`. This is the focal loss
//! of Lin et al. 2017, arXiv:1708.02002, with γ = 1, except that the gradient treats the factor as a constant.
//!
//! usage: cargo run --release --example custom_objective

mod setup;

use ottava_common::Result;
use ottava_models::Decoder;
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::Units;
use ottava_tensor::Tensor;
use ottava_train::step::host::{from_host, values};
use ottava_train::step::{Loss, Metrics, TrainStep};

/// The loss of a micro-batch. It reads only tokens and targets, so it has no tensors.
struct Focal;

impl Loss for Focal {
    fn units(&self, tokens: usize) -> usize {
        tokens
    }

    /// Computes the losses of all tokens first, then the gradient with the factor of each token.
    fn losses_and_gradient(
        &self,
        model: &mut Decoder,
        normed: &Tensor,
        targets: &Tensor,
        scale: &Tensor,
        units: &mut dyn Units,
    ) -> Result<(Tensor, Tensor)> {
        let losses = model.losses(normed, targets, units)?;
        let scale = values(scale)?[0];
        let factors: Vec<f64> = values(&losses)?.into_iter().map(|loss| scale * (1.0 - (-loss).exp())).collect();
        let factors = from_host(&factors, normed.device(), losses.dtype())?;
        model.losses_and_gradient(normed, targets, &factors, units)
    }

    /// Adds the focal losses, the plain losses, and the numbers of tokens.
    fn add(&self, sums: Vec<f64>, losses: &[f64]) -> Result<Vec<f64>> {
        let focal = losses.iter().map(|loss| (1.0 - (-loss).exp()) * loss).sum();
        Ok(self.merge(sums, &[focal, losses.iter().sum(), losses.len() as f64]))
    }

    fn metrics(&self, sums: &[f64]) -> Metrics {
        let plain = sums[1] / sums[2];
        Metrics::new([("cross_entropy", plain)], format!("cross entropy {plain:.3}"))
    }
}

fn main() -> Result<()> {
    let mut model = setup::model()?;
    let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.0, max_grad_norm: 1.0 };
    let mut optimizer = AdamWOptimizer::new(adamw, &model.parameters())?;
    let step = TrainStep::new(&model, 1, setup::ROWS, setup::TOKENS)?;
    let mut step = step.with_losses(|_, _, _| Ok(Box::new(Focal)))?;
    let mut entropies = Vec::new();
    for number in 1..=40 {
        step.load(0, &setup::counting(number))?;
        let done = step.run(&mut model, &mut optimizer, 3e-3, StepPrecision::Recipe)?;
        let metrics = step.metrics(&done.sums);
        println!("step {number:2}: focal loss {:.3}, {}", done.loss, metrics.words);
        entropies.extend(metrics.get("cross_entropy"));
    }
    assert!(entropies[39] < entropies[0] - 1.0, "the model learns to count");
    Ok(())
}

#[test]
fn the_example_runs() {
    main().expect("it runs to its end");
}
