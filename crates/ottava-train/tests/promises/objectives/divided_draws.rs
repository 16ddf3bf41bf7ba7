//! Draws of a model that ranks divide: ZeRO changes no completion and no loss, and ranks that divide tensors or experts draw the completions of one rank.

use super::preference_ranks::{expect_equal, write_experts};
use super::rollouts::{config, values_of, write_inputs};
use super::turns::{self, GAME};
use crate::runs::resume::{metrics, train};
use crate::setup::on_ranks;
use ottava_parallel::Zero;
use ottava_recipe::RecipeName;
use ottava_settings::{AdvantageEstimator, CorrectionMode, LoraConfig, ParallelConfig, RunConfig, WeightInit};
use ottava_tensor::Device;
use ottava_train::trainer::{Start, Trainer};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// Runs `config` on two ranks, and returns its metrics and its logged completions.
fn on_two(config: &RunConfig) -> (Vec<Value>, String) {
    on(2, config)
}

/// Runs `config` on `ranks` ranks, and returns its metrics and its logged completions.
fn on(ranks: usize, config: &RunConfig) -> (Vec<Value>, String) {
    let run = config.clone();
    on_ranks(ranks, move |group| {
        let mut trainer = Trainer::shared(run.clone(), &Device::Cpu, &Start::New, group, None).unwrap();
        trainer.run(&AtomicBool::new(false), &mut |_| {}).unwrap();
    });
    let output = &config.output_dir;
    (metrics(output), std::fs::read_to_string(output.join("completions.jsonl")).unwrap())
}

/// Returns a run of two generations on two ranks, whose second generation is drawn with updated weights. It evaluates before and after its steps.
fn two_generations(inputs: &Path, name: &str, recipe: RecipeName) -> RunConfig {
    let mut config = config(inputs, &inputs.join(name), recipe, 4);
    // With several micro-batches, stages 2 and 3 would add gradients in another order.
    (config.training.per_device_train_batch_size, config.training.gradient_accumulation_steps) = (16, 1);
    (config.reinforcement.num_generations, config.reinforcement.prompts_per_generation) = (4, 16);
    (config.reinforcement.max_completion_length, config.evaluation.num_generations) = (3, 2);
    config.reinforcement.correction.mode = CorrectionMode::TokenTruncate;
    config
}

/// Ranks gather values with `fp32` and `fp8-row`, whose draws read codes that are cast after the gather, and codes with the other recipes.
#[test]
fn stages_of_zero_draw_the_same_completions() {
    use RecipeName::{Fp8Block, Fp8Delayed, Fp8Row, Fp32};
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    for recipe in [Fp32, Fp8Row, Fp8Block, Fp8Delayed] {
        let of = |zero: Zero| {
            let name = format!("{}-{}", recipe.as_str(), u8::from(zero));
            let mut config = two_generations(folder.path(), &name, recipe);
            config.parallel.zero = zero;
            on_two(&config)
        };
        let whole = of(Zero::Nothing);
        for zero in [Zero::OptimizerStates, Zero::Gradients, Zero::Weights] {
            // Stages 1 and 2 lend the same weights.
            if zero == Zero::Gradients && recipe != Fp8Block {
                continue;
            }
            assert_eq!(of(zero), whole, "{}, ZeRO {zero:?}", recipe.as_str());
        }
        assert_eq!(whole.0.iter().filter(|line| line["loss"].is_number()).count(), 4);
    }
}

/// Stage 3 also divides the frozen weights beside adapters, and their codes.
#[test]
fn adapters_draw_the_same_completions_with_divided_frozen_weights() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let start = folder.path().join("start");
    train(&config(folder.path(), &start, RecipeName::Fp32, 1), &Device::Cpu, &Start::New, u64::MAX).unwrap();
    for recipe in [RecipeName::Fp8Row, RecipeName::Fp8Block] {
        let of = |zero: Zero| {
            let name = format!("{}-{}", recipe.as_str(), u8::from(zero));
            let mut config = two_generations(folder.path(), &name, recipe);
            (config.model.path, config.model.init) = (start.join("checkpoints/checkpoint-1"), WeightInit::Pretrained);
            config.lora = LoraConfig { r: 4, use_dora: true, ..LoraConfig::default() };
            (config.reinforcement.loss.beta, config.parallel.zero) = (0.1, zero);
            on_two(&config)
        };
        assert_eq!(of(Zero::Weights), of(Zero::Nothing), "{}", recipe.as_str());
    }
}

/// One rank and two ranks draw the same first generation, and sums of losses differ by rounding.
#[test]
fn two_ranks_that_divide_weights_draw_the_completions_of_one() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let mut config = two_generations(folder.path(), "two", RecipeName::Fp32);
    (config.training.max_steps, config.parallel.zero) = (Some(2), Zero::Weights);
    let (_, completions) = on_two(&config);
    let two = config.output_dir.clone();
    config.output_dir = folder.path().join("one");
    config.training.per_device_train_batch_size *= 2;
    train(&config, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    // Rank 0 logs its completions, and the first prompt is a prompt of rank 0.
    let log = std::fs::read_to_string(config.output_dir.join("completions.jsonl")).unwrap();
    assert_eq!(completions, log);
    for name in ["reward", "reward_std", "completions/mean_length", "eval_reward", "eval_pass@2"] {
        assert_eq!(values_of(&two, name)[0], values_of(&config.output_dir, name)[0], "{name}");
    }
    for name in ["loss", "grad_norm"] {
        let [one, two] = [&config.output_dir, &two].map(|run| values_of(run, name));
        // Sums over 64 completions in F32, in another order.
        let apart = one.iter().zip(&two).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(apart < 1e-5, "{name}: {one:?}, {two:?}");
    }
}

/// Each run draws two generations: the second with updated weights. One rank scores what ranks draw together.
#[test]
fn ranks_that_divide_tensors_or_experts_draw_the_completions_of_one() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let (start, experts) = (folder.path().join("start"), folder.path().join("experts"));
    train(&config(folder.path(), &start, RecipeName::Fp32, 1), &Device::Cpu, &Start::New, u64::MAX).unwrap();
    write_experts(folder.path(), &experts, json!({"vocab_size": 16, "eos_token_id": 0}));
    let mut plain = two_generations(folder.path(), "plain", RecipeName::Fp32);
    // The completions of most groups have different rewards, so that gradients are not rounding alone.
    plain.reinforcement.rewards =
        vec!["type = 'regex'\npattern = '^[0-4]'".parse::<toml::Table>().unwrap().try_into().unwrap()];
    // AdamW makes updates of the size of the learning rate even of gradients that are rounding.
    plain.optimizer.learning_rate = 1e-4;
    let mut reference = plain.clone();
    (reference.model.path, reference.model.init) = (start.join("checkpoints/checkpoint-1"), WeightInit::Pretrained);
    reference.reinforcement.loss.beta = 0.1;
    let mut values = plain.clone();
    values.reinforcement.advantage.estimator = AdvantageEstimator::Gae;
    let mut entropy = plain.clone();
    entropy.reinforcement.loss.entropy_coef = 0.01;
    let mut ahead = plain.clone();
    ahead.reinforcement.sampling.max_staleness = 4;
    let mut game = turns::run(folder.path(), Path::new(""), RecipeName::Fp32, 4, GAME);
    (game.training.per_device_train_batch_size, game.training.gradient_accumulation_steps) = (32, 1);
    game.optimizer.learning_rate = 1e-4;
    let mut mixture = plain.clone();
    mixture.model.path = experts;
    let mesh = |tensor, expert, zero| ParallelConfig { tensor, expert, zero, ..ParallelConfig::default() };
    let whole = Zero::Nothing;
    for (name, mut config, parallel, ranks) in [
        ("tensor", plain.clone(), mesh(2, 1, whole), 2),
        ("tensor and data", plain, mesh(2, 1, Zero::Weights), 4),
        ("reference", reference, mesh(2, 1, whole), 2),
        ("values", values, mesh(2, 1, whole), 2),
        ("entropy", entropy, mesh(2, 1, whole), 2),
        ("ahead", ahead, mesh(2, 1, whole), 2),
        ("environment", game, mesh(2, 1, whole), 2),
        ("expert", mixture.clone(), mesh(1, 2, whole), 2),
        ("expert, tensor and data", mixture, mesh(2, 2, whole), 8),
    ] {
        let data = ranks / parallel.tensor;
        config.output_dir = folder.path().join(format!("{name}, one"));
        let (expected, completions) = on(1, &config);
        config.output_dir = folder.path().join(name);
        config.training.per_device_train_batch_size /= data;
        let (got, of_ranks) = on(ranks, &RunConfig { parallel, ..config });
        expect_equal(name, &expected, &got);
        // Rank 0 logs completions of the first prompts of its share.
        let first = |log: &str| log.lines().next().unwrap().to_string();
        assert_eq!(first(&of_ranks), first(&completions), "{name}");
    }
}
