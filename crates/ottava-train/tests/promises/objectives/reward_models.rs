//! Reward models that score the completions of reinforcement learning.

use crate::objectives::rollouts::{config, values_of, write_inputs};
use crate::runs::resume::train;
use crate::setup::recipe;
use ottava_data::{Batch, Tokenizer};
use ottava_models::{ConfigFile, Decoder, decoder_config};
use ottava_parallel::Partition;
use ottava_recipe::mode::{Pass, StepPrecision};
use ottava_recipe::param::Purpose;
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_settings::{LossType, RecordsConfig, ReinforcementConfig, ResolvedConfig, RunConfig};
use ottava_tensor::Device;
use ottava_tensor::ops::IGNORE_INDEX;
use ottava_train::objective::preference::row_log_probs;
use ottava_train::plan::MemoryPlan;
use ottava_train::trainer::{Start, build};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Trains a reward model for one step on pairs, and returns its folder.
fn reward_model(inputs: &Path) -> PathBuf {
    write_inputs(inputs);
    let pair =
        |i: usize| serde_json::json!({"prompt": "of 3 7 is", "chosen": i.to_string(), "rejected": "a"}).to_string();
    std::fs::write(inputs.join("pairs.jsonl"), (0..10).map(|i| pair(i) + "\n").collect::<String>()).unwrap();
    let mut run = config(inputs, &inputs.join("reward"), RecipeName::Fp32, 1);
    (run.reinforcement, run.data.records) = (ReinforcementConfig::default(), RecordsConfig::default());
    (run.data.train_files, run.data.val_set_size) = (vec![inputs.join("pairs.jsonl")], 0.0);
    run.preference.loss_type = Some(LossType::BradleyTerry.into());
    (run.training.per_device_train_batch_size, run.training.gradient_accumulation_steps) = (4, 1);
    train(&run, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    run.output_dir.join("checkpoints/checkpoint-1")
}

fn with_reward_model(mut run: RunConfig, folder: &Path) -> RunConfig {
    let reward = toml::toml! { type = "model" };
    let mut reward: toml::Table = reward;
    reward.insert("path".into(), folder.to_str().unwrap().into());
    run.reinforcement.rewards = vec![reward.try_into().unwrap()];
    run
}

const LENGTH: usize = 16;

/// The reward model in `folder`.
fn opened(folder: &Path, name: RecipeName) -> Decoder {
    let sizes = decoder_config(&ConfigFile::read(folder).unwrap()).unwrap();
    let recipe = recipe(name, Fp8Format::Auto);
    let mut model = build(Some(folder), None, 0, &Device::Cpu, &sizes, |weights| {
        Decoder::new(&sizes, &recipe, &Device::Cpu, Purpose::Infer, LENGTH, weights)
    })
    .unwrap();
    model.quantize_weights().unwrap();
    model
}

/// The score of a text, as evaluations of reward models compute it.
fn score(model: &mut Decoder, ids: &[u32]) -> f64 {
    let mut inputs: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
    inputs.resize(LENGTH, 0);
    let mut targets = vec![IGNORE_INDEX; LENGTH];
    targets[ids.len() - 1] = 1;
    let mut batch = Batch::whole(inputs, targets, 1);
    batch.padding = vec![LENGTH - ids.len()];
    let (pass, precision) = (Pass::Evaluation, StepPrecision::Recipe);
    row_log_probs(model, &Partition::solo(), &[&batch], pass, precision).unwrap()[0][0]
}

/// The score of a completion in a batch is the score that an evaluation of the reward model computes for prompt and completion, bit for bit. The token
/// that ends the completion is the padding token of the model, so the score is read at the token before it.
#[test]
fn completions_have_the_scores_of_evaluations() {
    let folder = tempfile::tempdir().unwrap();
    let model = reward_model(folder.path());
    let tokenizer = Tokenizer::load(folder.path()).unwrap();
    for recipe in [RecipeName::Fp32, RecipeName::Fp8Row] {
        let run = folder.path().join(recipe.as_str());
        let mut config = with_reward_model(config(folder.path(), &run, recipe, 1), &model);
        config.logging.completions = 64;
        // A batch of a reward model has the rows of a micro-batch; the last batch has fewer.
        (config.training.per_device_train_batch_size, config.training.gradient_accumulation_steps) = (32, 8);
        train(&config, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        let log = std::fs::read_to_string(run.join("completions.jsonl")).unwrap();
        let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let is_empty = |line: &Value| line["completion"] == "";
        assert!(lines.len() == 64 && lines.iter().any(is_empty), "some completions are the token that ends them");
        let mut scorer = opened(&model, recipe);
        for line in lines {
            let text = [&line["prompt"], &line["completion"]].map(|part| part.as_str().unwrap()).join(" ");
            let expected = score(&mut scorer, &tokenizer.encode(&text).unwrap());
            assert_eq!(line["rewards"]["model"], expected, "{}: {line}", recipe.as_str());
            assert!(expected != 0.0 && line["reward"] == line["rewards"]["model"], "{line}");
        }
    }
}

#[test]
fn a_policy_learns_from_a_reward_model_and_resumes() {
    let folder = tempfile::tempdir().unwrap();
    let model = reward_model(folder.path());
    let of = |name: &str| {
        with_reward_model(config(folder.path(), &folder.path().join(name), RecipeName::Fp8Row, 24), &model)
    };
    train(&of("whole"), &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let rewards = values_of(&folder.path().join("whole"), "reward");
    let spread = values_of(&folder.path().join("whole"), "reward_std");
    // The mean reward rises by more than half of the standard deviation of the first completions of a prompt.
    assert!(rewards[rewards.len() - 1] > rewards[0] + spread[0] / 2.0, "{rewards:?}, {spread:?}");
    train(&of("stopped"), &Device::Cpu, &Start::New, 3).unwrap_err();
    let mut resumed = of("stopped");
    resumed.training.max_steps = Some(24);
    train(&resumed, &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
    assert_eq!(values_of(&folder.path().join("stopped"), "reward"), rewards);
}

#[test]
fn folders_that_are_no_reward_models_of_the_run_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let model = reward_model(folder.path());
    let error = |model: &Path| {
        let run = with_reward_model(config(folder.path(), &folder.path().join("run"), RecipeName::Fp32, 1), model);
        train(&run, &Device::Cpu, &Start::New, u64::MAX).unwrap_err().to_string()
    };
    let text = error(folder.path());
    assert!(text.contains("reward `model`: `path`") && text.contains("is a language model"), "{text}");
    let text = error(Path::new("missing"));
    assert!(text.contains("missing"), "{text}");
    let rewrite = |file: &str, from: &str, to: &str| {
        let text = std::fs::read_to_string(model.join(file)).unwrap();
        assert!(text.contains(from), "{text}");
        std::fs::write(model.join(file), text.replace(from, to)).unwrap();
        let found = error(&model);
        std::fs::write(model.join(file), text).unwrap();
        found
    };
    let text = rewrite("config.json", "\"vocab_size\": 16", "\"vocab_size\": 15");
    assert!(text.contains("is a reward model of 15 tokens"), "{text}");
    let text = rewrite("config.json", "\"max_position_embeddings\": 64", "\"max_position_embeddings\": 8");
    assert!(text.contains("a reward model of 8 positions"), "{text}");
    let text = rewrite("tokenizer.json", "\"of\"", "\"off\"");
    assert!(
        text.contains("the reward model of `model`") && text.contains("has other tokens than the tokenizer"),
        "{text}"
    );
}

/// A plan has the weights of a reward model once, however many micro-batches a step has.
#[test]
fn plans_count_reward_models() {
    let folder = tempfile::tempdir().unwrap();
    let model = reward_model(folder.path());
    let bytes = |rewards: bool, micro_batches: usize| {
        let mut run = config(folder.path(), &folder.path().join("run"), RecipeName::Fp32, 1);
        run.training.gradient_accumulation_steps = micro_batches;
        let run = if rewards { with_reward_model(run, &model) } else { run };
        let sizes = run.decoder_config().unwrap();
        MemoryPlan::new(&ResolvedConfig::fastest(&run), &sizes, &Device::Cpu).unwrap().peak_bytes
    };
    let weights = std::fs::metadata(model.join("model.safetensors")).unwrap().len();
    for micro_batches in [1, 2] {
        let apart = bytes(true, micro_batches) - bytes(false, micro_batches);
        assert!((weights * 9 / 10..weights * 3 / 2).contains(&apart), "{micro_batches}: {apart} of {weights} bytes");
    }
}
