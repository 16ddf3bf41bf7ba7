//! Preference tuning: losses and rewards compared with TRL, gradients, the reference model, ranks, and runs that stop and resume.

use crate::models::recorded::Recorded;
use crate::runs::resume::{config, metrics, train, write_inputs};
use crate::setup::{Seeded, fp8_names_on, on_ranks, recipe, tiny_llama};
use ottava_data::{Batch, Packing, PreferenceBatch};
use ottava_models::{Decoder, DecoderConfig};
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer};
use ottava_parallel::{Partition, Ranks, ReduceFormat, Schedule, Zero};
use ottava_recipe::layer_ranks::ShardPlace;
use ottava_recipe::lora::{Lora, Targets};
use ottava_recipe::mode::{Pass, StepPrecision};
use ottava_recipe::param::{MemoryPolicy, Purpose};
use ottava_recipe::{Fp8Format, Recipe, RecipeName};
use ottava_settings::{DataConfig, LoraConfig, LossType, PreferenceConfig, RunConfig, TrainingConfig};
use ottava_tensor::Device;
use ottava_tensor::comm::{Group, MeshShape};
use ottava_tensor::ops::{IGNORE_INDEX, PreferenceLoss};
use ottava_tensor::testing::integers;
use ottava_train::objective::preference::{MicroBatchPreference, Preference, PreferenceSums, row_log_probs};
use ottava_train::step::TrainStep;
use ottava_train::trainer::Start;
use serde_json::json;
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;

pub const STEPS: usize = 20;
pub const PAIRS: usize = 4;
/// The number of tokens of a row. Prompt and completion have at most 12.
pub const TOKENS: usize = 16;

/// Opens the results that `scripts/make_preference_referee.py` recorded.
pub fn recorded() -> Recorded {
    Recorded::open("referee_preference", "")
}

/// Appends a row of `prompt` and `completion`.
pub fn row(prompt: &[i32], completion: &[i32], batch: &mut Batch) {
    let end = batch.inputs.len() + TOKENS;
    let ids = [prompt, completion].concat();
    batch.inputs.extend(&ids[..ids.len() - 1]);
    batch.padding.push(end - batch.inputs.len());
    batch.inputs.resize(end, 0);
    batch.targets.extend(vec![IGNORE_INDEX; prompt.len() - 1]);
    batch.targets.extend(completion);
    batch.targets.resize(end, IGNORE_INDEX);
    batch.rows += 1;
}

/// Returns the settings of DPO.
pub fn dpo(beta: f64) -> Preference {
    Preference::of(PreferenceLoss::Sigmoid { label_smoothing: 0.0 }, beta)
}

pub fn empty() -> Batch {
    Batch { inputs: vec![], targets: vec![], rows: 0, seq_len: TOKENS, documents: None, padding: vec![] }
}

/// Returns the recorded batch of a step: pairs, or completions with labels.
pub fn recorded_batch(step: usize, labels: bool) -> PreferenceBatch {
    recorded_records(step * PAIRS..(step + 1) * PAIRS, labels)
}

/// Returns recorded pairs, or completions with labels.
pub fn recorded_records(pairs: Range<usize>, labels: bool) -> PreferenceBatch {
    let all = recorded().ids("ids");
    let ids = |pair: usize, key: usize| {
        let list = &all[(3 * pair + key) * 16..];
        list[1..1 + list[0] as usize].to_vec()
    };
    let (mut batch, mut mismatched, mut chosen) = (empty(), empty(), vec![]);
    let pairs: Vec<usize> = pairs.collect();
    let label = |pair: usize| pair % 3 != 1;
    let completion = |pair: usize| ids(pair, if label(pair) { 1 } else { 2 });
    for (i, &pair) in pairs.iter().enumerate() {
        if labels {
            row(&ids(pair, 0), &completion(pair), &mut batch);
            row(&ids(pair, 0), &completion(pairs[(i + pairs.len() - 1) % pairs.len()]), &mut mismatched);
            chosen.push(label(pair));
        } else {
            row(&ids(pair, 0), &ids(pair, 1), &mut batch);
            row(&ids(pair, 0), &ids(pair, 2), &mut batch);
            chosen.extend([true, false]);
        }
    }
    PreferenceBatch { documents: vec![0; batch.rows], batch, chosen, mismatched: labels.then_some(mismatched) }
}

#[test]
fn losses_in_fp8_are_near_those_in_f32() {
    for name in [RecipeName::Bf16].into_iter().chain(fp8_names_on(&Device::Cpu)) {
        let how = dpo(0.1);
        let exact = final_losses(how.clone(), RecipeName::Fp32);
        let found = final_losses(how, name);
        let apart = exact.iter().zip(&found).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        eprintln!("{}: losses are at most {apart:.1e} apart from those in F32", name.as_str());
        // Measured on the CPU, differences are at most 8.4e-4 in BF16, and 5.4e-3 to 1.2e-2 in FP8.
        assert!(apart < 2e-2, "{}: {apart:e}", name.as_str());
    }
}

/// Returns `work` with the loss of preferences.
pub fn with_preference(work: TrainStep, how: &Preference) -> TrainStep {
    work.with_losses(|rows, device, dtype| how.of_micro_batch(rows, device, dtype)).unwrap()
}

/// Loads a micro-batch, with its reference log-probabilities if they are known.
pub fn load_preferences(work: &mut TrainStep, micro_batch: usize, batch: &PreferenceBatch, reference: Option<&[f64]>) {
    work.load(micro_batch, &batch.batch).unwrap();
    work.loss_mut::<MicroBatchPreference>(micro_batch).load(batch, reference, ShardPlace::ALONE).unwrap();
}

/// Returns the log-probabilities of rows on one rank.
pub fn log_probs(model: &mut Decoder, batch: &Batch, pass: Pass) -> Vec<f64> {
    row_log_probs(model, &Partition::solo(), &[batch], pass, StepPrecision::Recipe).unwrap().remove(0)
}

/// Returns the losses of twenty steps. The reference is the model before these steps.
fn final_losses(how: Preference, name: RecipeName) -> Vec<f64> {
    let recipe = recipe(name, Fp8Format::Auto);
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let mut model = Decoder::new(&recorded().sizes(), &recipe, &Device::Cpu, purpose, TOKENS, &mut recorded()).unwrap();
    model.quantize_weights().unwrap();
    let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };
    let mut optimizer = AdamWOptimizer::new(adamw, &model.parameters()).unwrap();
    let mut work = with_preference(TrainStep::new(&model, 1, 2 * PAIRS, TOKENS).unwrap(), &how);
    let batches: Vec<_> = (0..STEPS).map(|step| recorded_batch(step, false)).collect();
    let reference = batches.iter().map(|batch| log_probs(&mut model, &batch.batch, Pass::Evaluation));
    let reference: Vec<_> = reference.collect();
    let step = |(batch, reference): (&PreferenceBatch, &Vec<f64>)| {
        load_preferences(&mut work, 0, batch, Some(reference));
        work.run(&mut model, &mut optimizer, 1e-3, StepPrecision::Recipe).unwrap().loss
    };
    batches.iter().zip(&reference).map(step).collect()
}

fn seeded(sizes: &DecoderConfig, recipe: &Recipe) -> Decoder {
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let mut model = Decoder::new(sizes, recipe, &Device::Cpu, purpose, TOKENS, &mut Seeded { std: 0.1 }).unwrap();
    model.quantize_weights().unwrap();
    model
}

/// Returns pairs `first..first + count` of `step`, of arbitrary tokens.
fn pairs(step: usize, first: usize, count: usize) -> PreferenceBatch {
    let mut batch = empty();
    for pair in first..first + count {
        let ids = integers(&format!("pair {step} {pair}"), 20, 96).to_vec::<i32>().unwrap();
        row(&ids[..4], &ids[4..8 + pair % 3], &mut batch);
        row(&ids[..4], &ids[12..18], &mut batch);
    }
    let chosen = (0..2 * count).map(|row| row % 2 == 0).collect();
    PreferenceBatch { documents: vec![0; batch.rows], batch, chosen, mismatched: None }
}

/// The base model without its adapters has the bits of a model that never had adapters, also after the adapters have been trained.
#[test]
fn the_model_without_adapters_is_the_reference() {
    let lora = Some(Lora {
        r: 3,
        alpha: 4.0,
        use_rslora: false,
        use_dora: false,
        targets: Targets::AllLinear,
        ..Lora::default()
    });
    let experts = crate::setup::config(crate::parallel::expert_ranks::routed(json!({})));
    for (name, sizes) in [
        (RecipeName::Fp32, tiny_llama()),
        (RecipeName::Bf16, tiny_llama()),
        (RecipeName::Fp8Current, tiny_llama()),
        (RecipeName::Fp32, experts.clone()),
        (RecipeName::Fp8Current, experts),
    ] {
        let recipe = recipe(name, Fp8Format::Auto);
        let how = dpo(0.1);
        let batch = pairs(0, 0, 3);
        let of = |model: &mut Decoder, pass| log_probs(model, &batch.batch, pass);
        let plain = of(&mut seeded(&sizes, &recipe), Pass::Evaluation);
        let mut model = seeded(&DecoderConfig { lora: lora.clone(), ..sizes }, &recipe);
        let adapted = of(&mut model, Pass::Evaluation);
        let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };
        let mut optimizer = AdamWOptimizer::new(adamw, &model.parameters()).unwrap();
        let mut work = with_preference(TrainStep::new(&model, 1, 6, TOKENS).unwrap(), &how);
        for step in 0..3 {
            load_preferences(&mut work, 0, &batch, None);
            let losses = work.loaded_token_losses(&mut model, Pass::Reference, StepPrecision::Recipe).unwrap();
            work.loss_mut::<MicroBatchPreference>(0).set_reference(&model, &losses[0]).unwrap();
            let done = work.run(&mut model, &mut optimizer, 1e-2, StepPrecision::Recipe).unwrap();
            // The reference is the base in every step. The adapters are not zero, so the rewards of the first step are not zero.
            let sums = PreferenceSums::from_numbers(&done.sums);
            let reference = sums.log_probs[0] - sums.rewards[0] / how.beta;
            let expected: f64 = plain.iter().step_by(2).sum();
            assert!((reference - expected).abs() < 1e-3, "step {step}: {reference} and {expected}");
        }
        assert_eq!(of(&mut model, Pass::Reference), plain, "{}", name.as_str());
        assert_ne!(adapted, plain, "{}: adapters have no effect", name.as_str());
    }
}

/// Returns losses, norms and metrics of three steps. The reference model gives each sequence the log-probability `reference`.
pub fn train_on(
    how: Preference,
    reference: f64,
    comm: Group,
    micro_batches: usize,
    zero: Zero,
) -> Vec<(String, Vec<f64>)> {
    const ALL: usize = 4;
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let mut model = Decoder::unloaded(&tiny_llama(), &recipe, &Device::Cpu, purpose, TOKENS).unwrap();
    let shape = MeshShape::of_data(comm.size());
    let ranks = Rc::new(Ranks::new(comm, shape, &Device::Cpu).unwrap());
    let partition = Partition::new(&mut model, ranks.clone(), zero, ReduceFormat::Stored, false).unwrap();
    partition.load(&mut model, &mut Seeded { std: 0.1 }).unwrap();
    partition.quantize_weights(&mut model).unwrap();
    let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-4, weight_decay: 0.1, max_grad_norm: 1.0 };
    let mut optimizer = AdamWOptimizer::new(adamw, &model.parameters()).unwrap();
    let count = ALL / ranks.size() / micro_batches;
    let work = TrainStep::shared(&model, Schedule::of_one_rank(micro_batches), 2 * count, TOKENS, partition).unwrap();
    let mut work = with_preference(work, &how);
    let mut seen = Vec::new();
    for step in 0..3 {
        for micro_batch in 0..micro_batches {
            let batch = pairs(step, (micro_batch * ranks.size() + ranks.rank()) * count, count);
            let reference = vec![reference; 2 * count];
            load_preferences(&mut work, micro_batch, &batch, Some(&reference));
        }
        let done = work.run(&mut model, &mut optimizer, 1e-2, StepPrecision::Recipe).unwrap();
        seen.push((format!("loss and norm of step {step}"), vec![done.loss, done.grad_norm]));
        let metrics = work.metrics(&done.sums).named.into_iter().map(|(_, value)| value).collect();
        seen.push((format!("metrics of step {step}"), metrics));
    }
    seen
}

#[test]
fn micro_batches_and_ranks_change_only_the_order_of_sums() {
    let whole = train_on(dpo(0.5), -20.0, Group::solo(), 1, Zero::Nothing);
    let mut others = vec![("2 micro-batches", train_on(dpo(0.5), -20.0, Group::solo(), 2, Zero::Nothing))];
    for (how, zero) in [("2 ranks", Zero::Nothing), ("2 ranks that divide weights", Zero::Weights)] {
        others.push((how, on_ranks(2, move |comm| train_on(dpo(0.5), -20.0, comm, 1, zero)).remove(0)));
    }
    for (how, seen) in others {
        for ((name, expected), (_, got)) in whole.iter().zip(&seen) {
            // After three steps with sums in F32 in another order, differences of up to 8e-7 of a number are seen.
            let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 5e-5 * a.abs().max(0.1);
            assert!(expected.iter().zip(got).all(near), "{name} with {how}: {expected:?} and {got:?}");
        }
    }
}

/// Returns a run on pairs, some of them for validation. A chosen text continues in lower case, a rejected text in capitals.
pub fn run_config(inputs: &Path, output: &Path, recipe: RecipeName, records: &str) -> RunConfig {
    let of_text = config(inputs, output, recipe);
    RunConfig {
        data: DataConfig { train_files: vec![inputs.join(records)], max_length: 32, ..of_text.data },
        preference: PreferenceConfig { beta: 0.5, ..PreferenceConfig::default() },
        training: TrainingConfig { max_steps: Some(8), per_device_train_batch_size: 2, ..of_text.training },
        ..of_text
    }
}

pub fn write_records(folder: &Path) {
    write_inputs(folder);
    let (mut pairs, mut labels) = (String::new(), String::new());
    for i in 0..20 {
        let (prompt, [good, bad]) = (format!("say {}:", i * 37 % 100), ["yes we do", "NO NEVER"]);
        pairs += &format!("{}\n", json!({"prompt": prompt, "chosen": good, "rejected": bad}));
        let completion = if i % 2 == 0 { good } else { bad };
        labels += &format!("{}\n", json!({"prompt": prompt, "completion": completion, "label": i % 2 == 0}));
    }
    std::fs::write(folder.join("pairs.jsonl"), pairs).unwrap();
    std::fs::write(folder.join("labels.jsonl"), labels).unwrap();
}

pub fn checkpoint(run: &Path) -> Vec<u8> {
    std::fs::read(run.join("checkpoints/checkpoint-8/model.safetensors")).unwrap()
}

#[test]
fn margins_rise_and_resuming_changes_nothing() {
    let inputs = tempfile::tempdir().unwrap();
    write_records(inputs.path());
    for (recipe, records) in
        [(RecipeName::Fp32, "pairs.jsonl"), (RecipeName::Fp8Delayed, "pairs.jsonl"), (RecipeName::Fp32, "labels.jsonl")]
    {
        let runs = tempfile::tempdir().unwrap();
        let whole = run_config(inputs.path(), &runs.path().join("whole"), recipe, records);
        train(&whole, &Device::Cpu, &Start::New, 8).unwrap();
        let seen = metrics(&whole.output_dir);
        let margin = |line: &serde_json::Value| line["eval_rewards/margins"].as_f64();
        let margins: Vec<f64> = seen.iter().filter_map(margin).collect();
        assert!(margins.len() >= 4 && margins.windows(2).all(|pair| pair[0] < pair[1]), "{records}: {margins:?}");
        assert!(seen.last().unwrap()["rewards/chosen"].is_number(), "{:?}", seen.last());
        let stopped = run_config(inputs.path(), &runs.path().join("stopped"), recipe, records);
        train(&stopped, &Device::Cpu, &Start::New, 3).unwrap_err();
        // If the stored log-probabilities are missing, the initial model computes them again.
        std::fs::remove_file(stopped.output_dir.join("reference.json")).unwrap();
        train(&stopped, &Device::Cpu, &Start::Resume, 5).unwrap_err();
        train(&stopped, &Device::Cpu, &Start::Resume, 8).unwrap();
        assert_eq!(metrics(&stopped.output_dir), seen, "{records}");
        assert_eq!(checkpoint(&stopped.output_dir), checkpoint(&whole.output_dir), "{records}");
    }
}

/// The log-probabilities of another model on the same data differ from the log-probabilities of the reference.
#[test]
fn a_reference_that_the_run_has_not_written_is_computed_again() {
    let (inputs, runs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_records(inputs.path());
    let of = |name: &str, seed| RunConfig {
        seed,
        ..run_config(inputs.path(), &runs.path().join(name), RecipeName::Fp32, "pairs.jsonl")
    };
    let [whole, stopped, other] = [of("whole", 3), of("stopped", 3), of("other", 4)];
    train(&whole, &Device::Cpu, &Start::New, 8).unwrap();
    train(&other, &Device::Cpu, &Start::New, 8).unwrap();
    train(&stopped, &Device::Cpu, &Start::New, 3).unwrap_err();
    let reference = |run: &RunConfig| run.output_dir.join("reference.json");
    let [own, foreign] = [&whole, &other].map(|run| std::fs::read(reference(run)).unwrap());
    assert!(own != foreign);
    std::fs::write(reference(&stopped), &foreign).unwrap();
    train(&stopped, &Device::Cpu, &Start::Resume, 8).unwrap();
    assert_eq!(metrics(&stopped.output_dir), metrics(&whole.output_dir));
    assert!(std::fs::read(reference(&stopped)).unwrap() == own);
}

#[test]
fn settings_that_do_not_fit_the_data_are_errors() {
    let inputs = tempfile::tempdir().unwrap();
    write_records(inputs.path());
    let runs = tempfile::tempdir().unwrap();
    let error = |change: &dyn Fn(&mut RunConfig)| {
        let mut config = run_config(inputs.path(), &runs.path().join("run"), RecipeName::Fp32, "pairs.jsonl");
        change(&mut config);
        train(&config, &Device::Cpu, &Start::New, 8).unwrap_err().to_string()
    };
    let text = error(&|config| config.preference.loss_type = Some(LossType::Kto.into()));
    assert!(text.contains("`preference.loss_type` is \"kto\", and the data hold pairs"), "{text}");
    let text = error(&|config| {
        config.data.train_files = vec![inputs.path().join("labels.jsonl"), inputs.path().join("pairs.jsonl")]
    });
    assert!(
        text.contains("preferences and prompts are trained without other data, and pairs without labels"),
        "{text}"
    );
    let text = error(&|config| config.data.packing = Packing::Bfd);
    assert!(text.contains("each completion of which has a row of its own"), "{text}");
    let text = error(&|config| config.preference.precompute_ref_log_probs = Some(false));
    assert!(text.contains("no reference model is left after the first step"), "{text}");
    let text = error(&|config| {
        config.lora = LoraConfig { r: 2, modules_to_save: vec!["lm_head".into()], ..LoraConfig::default() };
        config.preference.precompute_ref_log_probs = Some(false);
    });
    assert!(text.contains("`lora.modules_to_save` is set: weights of the base are trained"), "{text}");
    let text = error(&|config| config.sentinel.sentinel_steps = 2);
    assert!(text.contains("the sentinel does not compare losses of preferences; set it to 0"), "{text}");
    let text = error(&|config| config.sentinel.repeat_steps = 2);
    assert!(text.contains("losses of preferences are not computed twice; set it to 0"), "{text}");
    let text = error(&|config| config.data.train_on_inputs = true);
    assert!(text.contains("`data.train_on_inputs` is true, and the data are preferences"), "{text}");
    let text = error(&|config| {
        config.data.train_files = vec![inputs.path().join("text.txt")];
        config.preference.loss_type = Some(LossType::Sigmoid.into());
    });
    assert!(text.contains("the data hold no preferences"), "{text}");
}
