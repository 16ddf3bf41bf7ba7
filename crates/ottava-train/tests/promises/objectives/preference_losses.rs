//! Each preference loss: its values compared with TRL, its gradient, and the tensors that it reads of a micro-batch.

use crate::objectives::preference::{
    PAIRS, STEPS, TOKENS, checkpoint, load_preferences, log_probs, recorded, recorded_batch, recorded_records,
    run_config, train_on, with_preference, write_records,
};
use crate::runs::resume::{metrics, train};
use crate::setup::{Seeded, double, gradients, loss_scale, on_ranks, recipe, sequences};
use ottava_data::{Batch, PreferenceBatch};
use ottava_models::Decoder;
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer};
use ottava_parallel::{Partition, Schedule, Zero};
use ottava_recipe::mode::{Pass, StepPrecision};
use ottava_recipe::param::{FolderTensor, Init, MemoryPolicy, Purpose, WeightSource};
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_settings::{LossType, PreferenceConfig, RunConfig};
use ottava_tensor::comm::Group;
use ottava_tensor::ops::{PreferenceLoss, PreferenceTerm, cast};
use ottava_tensor::testing::values;
use ottava_tensor::{DType, Device, Tensor};
use ottava_train::objective::preference::{MicroBatchPreference, Preference, PreferenceSums};
use ottava_train::step::{MicroBatch, Program, ProgramInputs, TrainStep};
use ottava_train::trainer::Start;
use std::ops::Range;

/// Returns the recorded runs, by name.
fn losses(beta: f64) -> Vec<(&'static str, Preference)> {
    let one = |(name, loss)| (name, Preference::of(loss, beta));
    let (desirable_weight, undesirable_weight) = (1.5, 0.5);
    let sum = [
        (PreferenceLoss::Sigmoid { label_smoothing: 0.0 }, 0.8),
        (PreferenceLoss::BcoPair, 0.2),
        (PreferenceLoss::Sft, 0.5),
    ];
    let terms = sum.map(|(loss, weight)| PreferenceTerm { loss, weight }).to_vec();
    [
        ("sigmoid", PreferenceLoss::Sigmoid { label_smoothing: 0.0 }),
        ("robust", PreferenceLoss::Robust { label_smoothing: 0.2 }),
        ("hinge", PreferenceLoss::Hinge),
        ("ipo", PreferenceLoss::Ipo),
        ("sigmoid_norm", PreferenceLoss::SigmoidNorm),
        ("exo_pair", PreferenceLoss::ExoPair { label_smoothing: 0.01 }),
        ("nca_pair", PreferenceLoss::NcaPair),
        ("bco_pair", PreferenceLoss::BcoPair),
        ("sppo_hard", PreferenceLoss::SppoHard),
        ("aot", PreferenceLoss::Aot { label_smoothing: 0.1 }),
        ("aot_unpaired", PreferenceLoss::AotUnpaired { label_smoothing: 0.0 }),
        ("apo_zero", PreferenceLoss::ApoZero),
        ("apo_down", PreferenceLoss::ApoDown),
        ("discopop", PreferenceLoss::Discopop { tau: 0.2 }),
        ("sft", PreferenceLoss::Sft),
        ("kto", PreferenceLoss::Kto { desirable_weight, undesirable_weight }),
        ("apo_zero_unpaired", PreferenceLoss::ApoZeroUnpaired { desirable_weight, undesirable_weight }),
    ]
    .into_iter()
    .map(one)
    .chain([("sum", Preference { terms, beta })])
    .collect()
}

/// The losses that compare all pairs of a micro-batch.
const OF_BATCHES: [&str; 3] = ["aot", "aot_unpaired", "sft"];

fn named(name: &str) -> Preference {
    losses(0.5).into_iter().find(|(other, _)| *other == name).expect("a recorded loss").1
}

const NAMES: [&str; 7] =
    ["loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "kl"];

/// Returns the largest differences from TRL's losses and rewards, and from its log-probabilities, in `steps` steps.
fn apart(name: &str, how: &Preference, micro_batches: usize, steps: usize) -> [f64; 3] {
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let (labels, records) = (how.sequences() == 1, PAIRS / micro_batches);
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let mut model = Decoder::new(&recorded().sizes(), &recipe, &Device::Cpu, purpose, TOKENS, &mut recorded()).unwrap();
    model.quantize_weights().unwrap();
    let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };
    let mut optimizer = AdamWOptimizer::new(adamw, &model.parameters()).unwrap();
    let work = TrainStep::new(&model, micro_batches, records * how.sequences(), TOKENS).unwrap();
    let mut work = with_preference(work, how);
    let first = (0..steps * micro_batches).map(|batch| batch * records);
    let batches: Vec<_> = first.map(|first| recorded_records(first..first + records, labels)).collect();
    let log_probs = |model: &mut Decoder, batch: &Batch| log_probs(model, batch, Pass::Evaluation);
    // The reference is computed before the first step.
    let reference: Vec<_> = batches.iter().map(|batch| log_probs(&mut model, &batch.batch)).collect();
    let of_others: Vec<_> =
        batches.iter().map(|batch| batch.mismatched.as_ref().map(|rows| log_probs(&mut model, rows))).collect();
    let names = &NAMES[..if labels { 7 } else { 6 }];
    let expected: Vec<_> = names.iter().map(|metric| recorded().values(&format!("{name}/{metric}"))).collect();
    let mut apart = [0.0; 3];
    for step in 0..steps {
        for micro_batch in 0..micro_batches {
            let at = step * micro_batches + micro_batch;
            load_preferences(&mut work, micro_batch, &batches[at], Some(&reference[at]));
            if let (true, Some(rows), Some(reference)) =
                (how.needs_divergence(), &batches[at].mismatched, &of_others[at])
            {
                let policy = log_probs(&mut model, rows);
                let kl: f64 = policy.iter().zip(reference).map(|(a, b)| a - b).sum::<f64>() / rows.rows as f64;
                work.loss_mut::<MicroBatchPreference>(micro_batch).set_kl(kl.max(0.0)).unwrap();
            }
        }
        let done = work.run(&mut model, &mut optimizer, 1e-3, StepPrecision::Recipe).unwrap();
        let sums = PreferenceSums::from_numbers(&done.sums);
        // This is the same sum in F64, divided by the same count. Another order of its terms would change it by some units of 2⁻⁵³.
        assert!((sums.loss() - done.loss).abs() < 1e-9);
        let found = sums.metrics().named;
        for (metric, expected) in names.iter().zip(&expected) {
            let found = match *metric {
                "loss" => Some(done.loss),
                name => found.iter().find(|(other, _)| *other == name).map(|(_, value)| *value),
            };
            let Some(found) = found else { panic!("{metric} of step {step} is missing") };
            let kind = if *metric == "loss" { 0 } else { 1 + usize::from(metric.starts_with("logps")) };
            apart[kind] = f64::max(apart[kind], (found - expected[step]).abs());
        }
    }
    apart
}

#[test]
fn losses_and_rewards_are_those_of_trl() {
    // All losses run six steps: by then, log-probabilities have changed, and each gradient has updated weights.
    let whole = losses(0.5).into_iter().map(|(name, how)| (name.to_string(), how, 1));
    let accumulated = OF_BATCHES.map(|name| (format!("{name}/accumulated"), named(name), 2));
    for (name, how, micro_batches) in whole.chain(accumulated) {
        let steps = if ["sigmoid", "kto"].contains(&&*name) { STEPS } else { 6 };
        let [losses, rewards, log_probs] = apart(&name, &how, micro_batches, steps);
        eprintln!(
            "{name}: losses are at most {losses:.1e}, rewards {rewards:.1e}, log-probabilities {log_probs:.1e} apart from TRL's"
        );
        // Sums in F32 have another order than in TRL, and log-probabilities near -20 are rounded by 1e-6. Measured on the CPU, differences are at
        // most 3.3e-6, 6.9e-6 and 1.3e-5.
        assert!(losses < 2e-5 && rewards < 2e-5 && log_probs < 1e-4, "{name}: {losses:e}, {rewards:e}, {log_probs:e}");
    }
    let wrong = Preference { beta: 0.55, ..named("sigmoid") };
    let [losses, ..] = apart("sigmoid", &wrong, 1, 6);
    assert!(losses > 1e-3, "a beta that is a tenth too large goes unnoticed: {losses:e}");
}

/// Seeded weights. One of them is moved. The weights are rounded so that moving a weight is exact in F32.
pub struct Moved {
    pub tensor: String,
    pub element: usize,
    pub by: f64,
}

impl WeightSource for Moved {
    fn read(&mut self, tensor: &FolderTensor, elements: Range<usize>, init: Init) -> ottava_common::Result<Tensor> {
        let drawn = values(&Seeded { std: 0.3 }.read(tensor, elements.clone(), init)?);
        let mut rounded: Vec<f64> = drawn.into_iter().map(|value| (value * 4096.0).round() / 4096.0).collect();
        if tensor.name == self.tensor && elements.contains(&self.element) {
            rounded[self.element - elements.start] += self.by;
        }
        let rounded = Tensor::from_slice(&Device::Cpu, &[rounded.len()], &rounded)?;
        Ok(cast(&rounded, DType::F32)?)
    }
}

/// Returns the preference loss of a model in F64, and the gradients of `1.7 · Σ losses`.
fn loss_and_gradients(how: &Preference, weights: &mut dyn WeightSource) -> (f64, Vec<(String, Vec<f64>)>) {
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let sizes = recorded().sizes();
    let mut model = Decoder::new(&sizes, &double(), &Device::Cpu, purpose, TOKENS, weights).unwrap();
    let PreferenceBatch { batch, chosen, .. } = recorded_batch(0, how.sequences() == 1);
    let mut preference = MicroBatchPreference::new(how.clone(), batch.rows, &Device::Cpu, DType::F64).unwrap();
    let tensor = |values: Vec<f64>| Tensor::from_slice(&Device::Cpu, &[values.len()], &values).unwrap();
    preference.targets.reference = tensor((0..batch.rows).map(|s| -30.0 - 0.7 * s as f64).collect());
    preference.targets.lengths = tensor((0..batch.rows).map(|s| 2.0 + s as f64).collect());
    preference.targets.labels = tensor(chosen.iter().map(|chosen| f64::from(u8::from(*chosen))).collect());
    preference.targets.kl = tensor(vec![0.2]);
    preference.chosen = chosen;
    (scaled_loss(&mut model, &batch, preference), gradients(&mut model))
}

/// Returns `1.7 · Σ losses` of a micro-batch of a `model` in F64, and leaves the gradients in the model.
pub fn scaled_loss(model: &mut Decoder, batch: &Batch, preference: MicroBatchPreference) -> f64 {
    const SCALE: f64 = 1.7;
    let sequences = sequences(&Device::Cpu, batch.rows, batch.inputs.len());
    let ids = |ids: &[i32]| Tensor::from_slice(&Device::Cpu, &[ids.len()], ids).unwrap();
    let (inputs, targets) = (ids(&batch.inputs), ids(&batch.targets));
    let micro_batches = &[MicroBatch { inputs, targets, sequences, loss: Box::new(preference) }];
    let scale = loss_scale(Tensor::from_slice(&Device::Cpu, &[1], &[SCALE]).unwrap());
    let (loss_scale, partition) = (Some(&scale), &Partition::solo());
    let inputs = ProgramInputs { micro_batches, loss_scale, precision: StepPrecision::Recipe, partition };
    let all = Program::gradients_of(&Schedule::of_one_rank(1), 0).run(model, &inputs, None).unwrap().remove(0);
    SCALE * values(&all)[..batch.rows].iter().sum::<f64>()
}

/// The gradients are compared with central differences of fourth order: for DPO and KTO, of weights all over the model, and for each other loss, of
/// one weight of a block.
#[test]
fn backward_is_the_gradient_of_the_loss() {
    let plain = || Moved { tensor: String::new(), element: 0, by: 0.0 };
    for (name, how) in losses(0.1) {
        let (_, all) = loss_and_gradients(&how, &mut plain());
        let mut compared = 0;
        let is_first = ["sigmoid", "kto"].contains(&name);
        let tensors = ["model.layers.1.mlp.down_proj", "lm_head", "model.norm", "model.layers.0.input_layernorm"];
        for tensor in &tensors[..if is_first { 4 } else { 1 }] {
            let tensor = format!("{tensor}.weight");
            let (_, gradient) = all.iter().find(|(name, _)| *name == tensor).unwrap_or_else(|| panic!("{tensor}"));
            for &element in &[gradient.len() / 2, 0, gradient.len() - 1][..if is_first { 3 } else { 1 }] {
                let at = |by| loss_and_gradients(&how, &mut Moved { tensor: tensor.clone(), element, by }).0;
                let step = 1.0 / 1024.0;
                let apart = |steps: f64| at(steps * step) - at(-steps * step);
                let difference = (8.0 * apart(1.0) - apart(2.0)) / (12.0 * step);
                let error = (difference - gradient[element]).abs();
                // In F64, the differences have an error of `step⁴ / 30`, 3e-14, of the fifth derivative, and roundings of 2⁻⁵³ of the loss over
                // `step`, 1e-13. Differences of up to 8e-10 are seen.
                assert!(
                    error < 1e-7 * difference.abs().max(1.0),
                    "{name}, {tensor}[{element}]: {difference} and {}",
                    gradient[element]
                );
                compared += usize::from(difference != 0.0);
            }
        }
        assert!(compared > if is_first { 8 } else { 0 }, "{name}: {compared} gradients are not zero");
    }
}

/// A loss of whole batches compares the pairs of a micro-batch. So two micro-batches on one rank equal one micro-batch on each of two ranks.
#[test]
fn micro_batches_and_ranks_of_a_batch_loss_compare_the_same_pairs() {
    for name in OF_BATCHES {
        let halves = train_on(named(name), -20.0, Group::solo(), 2, Zero::Nothing);
        let ranks = on_ranks(2, move |comm| train_on(named(name), -20.0, comm, 1, Zero::Nothing)).remove(0);
        for ((what, expected), (_, got)) in halves.iter().zip(&ranks) {
            let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 5e-5 * a.abs().max(0.1);
            assert!(expected.iter().zip(got).all(near), "{name}, {what}: {expected:?} and {got:?}");
        }
    }
}

fn with_losses(config: RunConfig, losses: &str) -> RunConfig {
    let preference: PreferenceConfig = toml::from_str(losses).unwrap();
    RunConfig { preference: PreferenceConfig { beta: 0.5, ..preference }, ..config }
}

/// Each loss runs from files to metrics with two micro-batches.
#[test]
fn every_loss_trains_and_lowers_its_validation_loss() {
    let inputs = tempfile::tempdir().unwrap();
    write_records(inputs.path());
    let of_pairs = [
        "loss_type = \"sigmoid_norm\"",
        "loss_type = \"exo_pair\"\nlabel_smoothing = 1e-3",
        "loss_type = \"nca_pair\"",
        "loss_type = \"bco_pair\"",
        "loss_type = \"sppo_hard\"",
        "loss_type = \"aot\"",
        "loss_type = \"aot_unpaired\"",
        "loss_type = \"apo_zero\"",
        "loss_type = \"apo_down\"",
        "loss_type = \"discopop\"",
        "loss_type = \"sft\"",
        "loss_type = [\"sigmoid\", \"bco_pair\", \"sft\"]\nloss_weights = [0.8, 0.2, 1.0]",
        "loss_type = \"sigmoid\"\nreference_free = true",
        "loss_type = \"cpo\"",
        "loss_type = [\"simpo\", \"sft\"]\nloss_weights = [1.0, 0.5]",
        "loss_type = \"orpo\"",
    ];
    let all = of_pairs.map(|keys| (keys, "pairs.jsonl")).into_iter();
    for (keys, records) in all.chain([("loss_type = \"apo_zero_unpaired\"", "labels.jsonl")]) {
        let runs = tempfile::tempdir().unwrap();
        let mut run = with_losses(run_config(inputs.path(), &runs.path().join("run"), RecipeName::Fp32, records), keys);
        (run.training.gradient_accumulation_steps, run.optimizer.learning_rate) = (2, 3e-3);
        run.training.max_steps = Some(4);
        train(&run, &Device::Cpu, &Start::New, 4).unwrap();
        let losses: Vec<f64> = metrics(&run.output_dir).iter().filter_map(|line| line["eval_loss"].as_f64()).collect();
        assert!(losses.last() < losses.first(), "{keys}: {losses:?}");
        let has_none = ["reference_free", "cpo", "simpo", "orpo"].iter().any(|name| keys.contains(name));
        assert_eq!(run.output_dir.join("reference.json").exists(), !has_none, "{keys}");
    }
}

/// In a run without a reference model, the reference is 0, also with adapters. So rewards are multiples of log-probabilities.
#[test]
fn runs_without_a_reference_have_rewards_of_log_probabilities() {
    let inputs = tempfile::tempdir().unwrap();
    write_records(inputs.path());
    let runs = tempfile::tempdir().unwrap();
    let (free, cpo) = ("reference_free = true", "loss_type = \"cpo\"");
    let runs_of =
        [(0, "pairs.jsonl", free), (4, "pairs.jsonl", free), (0, "labels.jsonl", free), (4, "pairs.jsonl", cpo)];
    for (number, (rank, records, keys)) in runs_of.into_iter().enumerate() {
        let folder = runs.path().join(number.to_string());
        let run = run_config(inputs.path(), &folder, RecipeName::Fp32, records);
        let mut run = with_losses(run, keys);
        run.lora.r = rank;
        train(&run, &Device::Cpu, &Start::New, 3).unwrap_err();
        train(&run, &Device::Cpu, &Start::Resume, 8).unwrap();
        for line in metrics(&run.output_dir) {
            for prefix in ["", "eval_"] {
                let value = |key: &str| line[format!("{prefix}{key}")].as_f64();
                for side in ["chosen", "rejected"] {
                    let (reward, log_prob) = (value(&format!("rewards/{side}")), value(&format!("logps/{side}")));
                    if let (Some(reward), Some(log_prob)) = (reward, log_prob) {
                        // Halving is exact, so the two means of a few sequences in F64 differ by at most some units of 2⁻⁵³.
                        assert!((reward - 0.5 * log_prob).abs() < 1e-9 * log_prob.abs(), "{line}");
                    }
                }
            }
        }
        assert!(!run.output_dir.join("reference.json").exists());
    }
}

/// BCO and the losses of whole batches have no state besides the model, so a resumed run has the bits of an uninterrupted run.
#[test]
fn resuming_changes_nothing_with_losses_of_batches() {
    let inputs = tempfile::tempdir().unwrap();
    write_records(inputs.path());
    for keys in
        ["loss_type = \"bco_pair\"", "loss_type = [\"aot\", \"sft\"]", "loss_type = \"orpo\"", "loss_type = \"simpo\""]
    {
        let runs = tempfile::tempdir().unwrap();
        let of = |name: &str| {
            with_losses(run_config(inputs.path(), &runs.path().join(name), RecipeName::Fp32, "pairs.jsonl"), keys)
        };
        let [whole, stopped] = ["whole", "stopped"].map(of);
        train(&whole, &Device::Cpu, &Start::New, 8).unwrap();
        train(&stopped, &Device::Cpu, &Start::New, 3).unwrap_err();
        train(&stopped, &Device::Cpu, &Start::Resume, 8).unwrap();
        assert_eq!(metrics(&stopped.output_dir), metrics(&whole.output_dir), "{keys}");
        assert_eq!(checkpoint(&stopped.output_dir), checkpoint(&whole.output_dir), "{keys}");
    }
}

#[test]
fn settings_of_losses_that_contradict_each_other_are_errors() {
    let inputs = tempfile::tempdir().unwrap();
    write_records(inputs.path());
    let runs = tempfile::tempdir().unwrap();
    let error = |keys: &str, records: &str| {
        let plain = run_config(inputs.path(), &runs.path().join("run"), RecipeName::Fp32, records);
        let run = with_losses(plain.clone(), keys);
        let outcome = run.expect_no_more_problems_than(&plain);
        outcome.and_then(|()| train(&run, &Device::Cpu, &Start::New, 8)).unwrap_err().to_string()
    };
    for (keys, words) in [
        ("loss_type = \"exo_pair\"", "the loss exo_pair is infinite without it"),
        ("loss_type = [\"sigmoid\", \"kto\"]", "losses of pairs and losses of completions with labels"),
        ("loss_type = [\"bradley_terry\", \"sft\"]", "adds bradley_terry to other losses"),
        ("loss_type = [\"simpo\", \"ipo\"]", "adds losses with a reference model to cpo, simpo or orpo"),
        ("loss_type = \"simpo\"\nsimpo_gamma = -1.0", "`preference.simpo_gamma` must not be negative"),
        ("loss_type = [\"sigmoid\", \"sft\"]\nloss_weights = [1.0]", "has 1 numbers, and `loss_type` names 2 losses"),
        ("loss_type = \"discopop\"\ndiscopop_tau = 0.0", "`preference.discopop_tau` must be above 0"),
        ("loss_type = \"apo_zero_unpaired\"", "is \"apo_zero_unpaired\", and the data hold pairs"),
    ] {
        let text = error(keys, "pairs.jsonl");
        assert!(text.contains(words), "{keys}: {text}");
    }
    let text = error("loss_type = [\"sigmoid\", \"sft\"]", "labels.jsonl");
    assert!(text.contains("is \"sigmoid\", and the data hold completions with labels"), "{text}");
    let names = toml::from_str::<PreferenceConfig>("loss_type = [\"sigmoid\", \"dpo\"]").unwrap_err().to_string();
    assert!(names.contains("`dpo`") && names.contains("`sppo_hard`"), "{names}");
    let none = toml::from_str::<PreferenceConfig>("loss_type = []").unwrap_err().to_string();
    assert!(none.contains("names at least one"), "{none}");
    let one: PreferenceConfig = toml::from_str("loss_type = [\"ipo\"]").unwrap();
    assert_eq!(one.loss_type, Some(LossType::Ipo.into()));
    assert!(toml::to_string(&one).unwrap().contains("loss_type = \"ipo\""), "one loss is written as a name");
}
