//! A policy gradient on a bandit: the smallest objective whose rows the model generates.

use crate::setup::{Seeded, recipe, tiny_llama};
use ottava_common::Result;
use ottava_data::{Batch, DataState, LoaderState};
use ottava_models::Decoder;
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer};
use ottava_recipe::mode::{Pass, StepPrecision};
use ottava_recipe::param::{MemoryPolicy, Purpose, Units};
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::ops::IGNORE_INDEX;
use ottava_tensor::{Device, Tensor};
use ottava_train::objective::preference::row_log_probs;
use ottava_train::objective::{Evaluation, LoadedRows, Rows, Validation};
use ottava_train::step::host::{from_host, values, write};
use ottava_train::step::{Loss, Metrics, TrainStep};

/// The number of plays of a micro-batch. Each play is a row of two tokens: the question, whose target is the arm, and the arm.
const PLAYS: usize = 16;
const TOKENS: usize = 2;
const QUESTION: i32 = 1;

/// The arms, each with its reward.
const ARMS: [(i32, f64); 3] = [(11, 0.0), (12, 0.2), (13, 1.0)];

/// The loss `-advantage · log p(arm)` of each play: the model's loss of a token times the advantage of its play.
struct PolicyGradient {
    /// The advantage of each token, `[T]`.
    advantages: Tensor,
}

impl Loss for PolicyGradient {
    fn units(&self, tokens: usize) -> usize {
        tokens / TOKENS
    }

    fn counted(&self, targets: &[i32]) -> usize {
        self.units(targets.len())
    }

    fn losses_and_gradient(
        &self,
        model: &mut Decoder,
        normed: &Tensor,
        targets: &Tensor,
        scale: &Tensor,
        units: &mut dyn Units,
    ) -> Result<(Tensor, Tensor)> {
        let scale = values(scale)?[0];
        let factors: Vec<f64> = values(&self.advantages)?.into_iter().map(|advantage| scale * advantage).collect();
        let factors = from_host(&factors, normed.device(), self.advantages.dtype())?;
        model.losses_and_gradient(normed, targets, &factors, units)
    }

    fn add(&self, sums: Vec<f64>, of_tokens: &[f64]) -> Result<Vec<f64>> {
        let losses: f64 =
            of_tokens.iter().zip(values(&self.advantages)?).map(|(loss, advantage)| loss * advantage).sum();
        Ok(self.merge(sums, &[losses]))
    }
}

/// Plays that are drawn from the model's probabilities of the arms. Their reward is a metric of the rows, known before the step.
struct Plays {
    /// The state of a linear congruential generator.
    seed: u64,
    /// The plays of the next steps: arms and advantages.
    drawn: Vec<Vec<(usize, f64)>>,
}

impl Plays {
    fn random(&mut self) -> f64 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.seed >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Draws plays for two steps, like a rollout that serves several steps.
    fn draw(&mut self, chances: &[f64]) {
        for _ in 0..2 {
            let arm = |plays: &mut Plays| {
                let mut left = plays.random();
                chances
                    .iter()
                    .take(ARMS.len() - 1)
                    .take_while(|&&chance| {
                        left -= chance;
                        left >= 0.0
                    })
                    .count()
            };
            let arms: Vec<usize> = (0..PLAYS).map(|_| arm(self)).collect();
            let mean = arms.iter().map(|&arm| ARMS[arm].1).sum::<f64>() / PLAYS as f64;
            self.drawn.push(arms.into_iter().map(|arm| (arm, ARMS[arm].1 - mean)).collect());
        }
    }
}

/// Returns a row for each of `arms`.
fn rows(arms: impl Iterator<Item = usize>) -> Batch {
    let ids: Vec<i32> = arms.map(|arm| ARMS[arm].0).collect();
    let inputs = ids.iter().flat_map(|&id| [QUESTION, id]).collect();
    Batch::whole(inputs, ids.iter().flat_map(|&id| [id, IGNORE_INDEX]).collect(), ids.len())
}

/// Returns the model's probability of each arm, relative to all arms.
fn chances(model: &mut Decoder, step: &TrainStep, precision: StepPrecision) -> Result<Vec<f64>> {
    let all = rows(0..ARMS.len());
    let of_rows = row_log_probs(model, step.partition(), &[&all], Pass::Evaluation, precision)?;
    let of_arms: Vec<f64> = of_rows[0].iter().map(|log_prob| log_prob.exp()).collect();
    let all: f64 = of_arms.iter().sum();
    Ok(of_arms.into_iter().map(|chance| chance / all).collect())
}

impl Rows for Plays {
    fn examples(&self) -> f64 {
        f64::INFINITY
    }

    fn state(&self) -> DataState {
        DataState::One(LoaderState::start(self.seed))
    }

    fn load(&mut self, model: &mut Decoder, step: &mut TrainStep, precision: StepPrecision) -> Result<LoadedRows> {
        if self.drawn.is_empty() {
            self.draw(&chances(model, step, precision)?);
        }
        let plays = self.drawn.remove(0);
        let batch = rows(plays.iter().map(|(arm, _)| *arm));
        step.load(0, &batch)?;
        let loss = step.loss_mut::<PolicyGradient>(0);
        let advantages: Vec<f64> = plays.iter().flat_map(|(_, advantage)| [*advantage, 0.0]).collect();
        write(&mut loss.advantages, &advantages)?;
        let paid = plays.iter().map(|(arm, _)| ARMS[*arm].1).sum::<f64>() / PLAYS as f64;
        let metrics = Metrics::new([("reward", paid)], format!("reward {paid:.3}"));
        Ok(LoadedRows { metrics, ..LoadedRows::default() })
    }

    /// Evaluates the loss of not always choosing the best arm.
    fn evaluate(&self, model: &mut Decoder, step: &TrainStep, precision: StepPrecision) -> Result<Option<Validation>> {
        let chances = chances(model, step, precision)?;
        let loss = 1.0 - ARMS.iter().zip(chances).map(|((_, pays), chance)| pays * chance).sum::<f64>();
        Ok(Some(Validation::of_one(Evaluation { loss, metrics: Metrics::default() })))
    }
}

#[test]
fn a_policy_gradient_learns_the_best_arm_of_a_bandit() {
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let mut model =
        Decoder::new(&tiny_llama(), &recipe, &Device::Cpu, purpose, TOKENS, &mut Seeded { std: 0.1 }).unwrap();
    model.quantize_weights().unwrap();
    let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.0, max_grad_norm: 1.0 };
    let mut optimizer = AdamWOptimizer::new(adamw, &model.parameters()).unwrap();
    let step = TrainStep::new(&model, 1, PLAYS, TOKENS).unwrap();
    let mut step = step
        .with_losses(|rows, device, dtype| {
            Ok(Box::new(PolicyGradient { advantages: from_host(&vec![0.0; rows * TOKENS], device, dtype)? }))
        })
        .unwrap();
    let mut plays: Box<dyn Rows> = Box::new(Plays { seed: 7, drawn: Vec::new() });
    let precision = StepPrecision::Recipe;
    let mut rewards = Vec::new();
    let lost = |plays: &dyn Rows, model: &mut Decoder, step: &TrainStep| {
        plays.evaluate(model, step, precision).unwrap().unwrap().finite_metric("objective", "eval_loss").unwrap().0
    };
    let before = lost(&*plays, &mut model, &step);
    for _ in 0..40 {
        let loaded = plays.load(&mut model, &mut step, precision).unwrap();
        step.run(&mut model, &mut optimizer, 1e-3, precision).unwrap();
        rewards.extend(loaded.metrics.get("reward"));
    }
    let after = lost(&*plays, &mut model, &step);
    let mean = |of: &[f64]| of.iter().sum::<f64>() / of.len() as f64;
    // A policy without knowledge gets the mean reward of the arms, 0.4, and loses 0.6. The arms other than the best have rewards of at most 0.2.
    assert!(mean(&rewards[30..]) > 0.9 && mean(&rewards[..4]) < 0.8, "{rewards:?}");
    assert!(after < 0.1 && before > 0.4, "{before} lost before, {after} after");
}
