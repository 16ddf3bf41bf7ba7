//! Losses of preferences without a reference model (CPO, SimPO, ORPO) beside TRL's values, their gradients, and ranks.

use crate::models::recorded::Recorded;
use crate::objectives::preference::{
    PAIRS, STEPS, TOKENS, empty, load_preferences, recorded, recorded_batch, row, train_on, with_preference,
};
use crate::objectives::preference_losses::{Moved, scaled_loss};
use crate::setup::{double, gradients, on_ranks, recipe};
use ottava_data::PreferenceBatch;
use ottava_models::Decoder;
use ottava_parallel::Zero;
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{MemoryPolicy, Purpose, WeightSource};
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_settings::PreferenceConfig;
use ottava_tensor::comm::Group;
use ottava_tensor::{DType, Device, Tensor};
use ottava_train::objective::preference::{MicroBatchPreference, Preference, PreferenceSums};
use ottava_train::step::TrainStep;

/// The recorded runs, by name, and their settings.
const RUNS: [(&str, &str); 6] = [
    ("cpo", "loss_type = \"cpo\"\nbeta = 0.5\ncpo_alpha = 0.7\nlabel_smoothing = 0.1"),
    ("cpo_hinge", "loss_type = [\"hinge\", \"sft\"]\nbeta = 0.5\nloss_weights = [1.0, 0.7]\nreference_free = true"),
    ("cpo_ipo", "loss_type = [\"ipo\", \"sft\"]\nbeta = 0.5\nloss_weights = [1.0, 0.7]\nreference_free = true"),
    ("simpo", "loss_type = \"simpo\"\nbeta = 2.0\nsimpo_gamma = 1.0"),
    ("simpo_sft", "loss_type = [\"simpo\", \"sft\"]\nbeta = 2.0\nlabel_smoothing = 0.1"),
    ("orpo", "loss_type = \"orpo\"\nbeta = 0.5"),
];

fn of(keys: &str) -> Preference {
    let config: PreferenceConfig = toml::from_str(keys).unwrap();
    assert!(!config.has_reference(), "{keys}");
    Preference { terms: config.terms(), beta: config.beta }
}

/// The recorded batch of a step. TRL's likelihood of ORPO includes the prompt, so its recorded prompts have one token.
fn batch_of(name: &str, step: usize) -> PreferenceBatch {
    if name != "orpo" {
        return recorded_batch(step, false);
    }
    let all = recorded().ids("ids");
    let ids = |pair: usize, key: usize| {
        let list = &all[(3 * pair + key) * 16..];
        list[1..1 + list[0] as usize].to_vec()
    };
    let mut batch = empty();
    for pair in step * PAIRS..(step + 1) * PAIRS {
        let prompt = ids(pair, 0);
        for completion in [1, 2] {
            row(&prompt[..1], &[&prompt[1..], &ids(pair, completion)].concat(), &mut batch);
        }
    }
    let chosen = (0..batch.rows).map(|row| row % 2 == 0).collect();
    PreferenceBatch { documents: vec![0; batch.rows], batch, chosen, mismatched: None }
}

/// The metrics of twenty steps beside TRL's: the largest difference of each kind.
fn apart(name: &str, how: &Preference) -> Vec<(String, f64)> {
    let expected = Recorded::open("referee_free", "");
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let mut model = Decoder::new(&recorded().sizes(), &recipe, &Device::Cpu, purpose, TOKENS, &mut recorded()).unwrap();
    model.quantize_weights().unwrap();
    let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };
    let mut optimizer = AdamWOptimizer::new(adamw, &model.parameters()).unwrap();
    let mut work = with_preference(TrainStep::new(&model, 1, 2 * PAIRS, TOKENS).unwrap(), how);
    let mut all: Vec<(String, f64)> = Vec::new();
    for step in 0..STEPS {
        load_preferences(&mut work, 0, &batch_of(name, step), None);
        let done = work.run(&mut model, &mut optimizer, 1e-3, StepPrecision::Recipe).unwrap();
        let metrics = PreferenceSums::from_numbers(&done.sums).metrics();
        let found = [("loss", done.loss), ("grad_norm", done.grad_norm)].map(|(name, value)| (name.to_string(), value));
        let named = metrics.named.iter().map(|(name, value)| (name.to_string(), *value));
        for (metric, value) in found.into_iter().chain(named) {
            // TRL's IPO of CPO has rewards of means, and its DPO, like the list of losses here, has rewards of sums.
            if name == "cpo_ipo" && (metric.starts_with("rewards") || metric.starts_with("logps")) {
                continue;
            }
            let error = (value - expected.values(&format!("{name}/{metric}"))[step]).abs() / value.abs().max(1.0);
            match all.iter_mut().find(|(other, _)| *other == metric) {
                Some((_, largest)) => *largest = largest.max(error),
                None => all.push((metric, error)),
            }
        }
    }
    all
}

#[test]
fn losses_without_a_reference_model_are_those_of_trl() {
    for (name, keys) in RUNS {
        let all = apart(name, &of(keys));
        let names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names.contains(&"nll_loss"), name != "simpo", "{names:?}");
        assert_eq!(names.contains(&"log_odds_ratio"), name == "orpo", "{names:?}");
        eprintln!("{name}: {all:?}");
        for (metric, error) in all {
            // Sums in F32 have another order than in TRL, over twenty steps.
            assert!(error < 1e-5, "{name}, {metric}: {error:e}");
        }
    }
    let wrong = of("loss_type = \"simpo\"\nbeta = 2.0\nsimpo_gamma = 1.1");
    assert!(apart("simpo", &wrong)[0].1 > 1e-3, "a gamma that is a tenth too large goes unnoticed");
}

/// The loss of a model in F64, and the gradients of `1.7 · Σ losses`.
fn loss_and_gradients(how: &Preference, weights: &mut dyn WeightSource) -> (f64, Vec<(String, Vec<f64>)>) {
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let mut model = Decoder::new(&recorded().sizes(), &double(), &Device::Cpu, purpose, TOKENS, weights).unwrap();
    let PreferenceBatch { batch, .. } = recorded_batch(0, false);
    let mut preference = MicroBatchPreference::new(how.clone(), batch.rows, &Device::Cpu, DType::F64).unwrap();
    let lengths: Vec<f64> = (0..batch.rows).map(|s| 2.0 + s as f64).collect();
    preference.targets.lengths = Tensor::from_slice(&Device::Cpu, &[batch.rows], &lengths).unwrap();
    (scaled_loss(&mut model, &batch, preference), gradients(&mut model))
}

/// Central differences of fourth order.
#[test]
fn backward_without_a_reference_model_is_the_gradient_of_the_loss() {
    let plain = || Moved { tensor: String::new(), element: 0, by: 0.0 };
    for (name, keys) in RUNS {
        let how = of(keys);
        let (_, all) = loss_and_gradients(&how, &mut plain());
        for tensor in ["model.layers.1.mlp.down_proj.weight", "lm_head.weight"] {
            let (_, gradient) = all.iter().find(|(name, _)| name == tensor).unwrap();
            let element = gradient.len() / 2;
            let at = |by| loss_and_gradients(&how, &mut Moved { tensor: tensor.into(), element, by }).0;
            let step = 1.0 / 1024.0;
            let apart = |steps: f64| at(steps * step) - at(-steps * step);
            let difference = (8.0 * apart(1.0) - apart(2.0)) / (12.0 * step);
            let error = (difference - gradient[element]).abs();
            // As in `backward_is_the_gradient_of_the_loss`.
            assert!(
                error < 1e-7 * difference.abs().max(1.0) && difference != 0.0,
                "{name}, {tensor}: {difference} and {}",
                gradient[element]
            );
        }
    }
}

/// SimPO has a loss of each pair, and its sum does not depend on ranks or micro-batches. The likelihood of ORPO and CPO is a mean over a micro-batch.
#[test]
fn ranks_and_micro_batches_of_losses_without_a_reference_model_are_equal() {
    for (name, keys) in [RUNS[0], RUNS[3], RUNS[5]] {
        let mut others = vec![("2 micro-batches", train_on(of(keys), 0.0, Group::solo(), 2, Zero::Nothing))];
        let ranks = on_ranks(2, move |comm| train_on(of(keys), 0.0, comm, 1, Zero::Nothing)).remove(0);
        others.push(("2 ranks", ranks));
        if name == "simpo" {
            others.push(("whole", train_on(of(keys), 0.0, Group::solo(), 1, Zero::Nothing)));
        }
        let (_, first) = others.remove(0);
        for (how, seen) in others {
            for ((what, expected), (_, got)) in first.iter().zip(&seen) {
                // Three steps of sums in F32 in another order.
                let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 5e-5 * a.abs().max(0.1);
                assert!(expected.iter().zip(got).all(near), "{name}, {what} with {how}: {expected:?} and {got:?}");
            }
        }
    }
}
