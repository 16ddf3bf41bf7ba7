//! Reinforcement learning: draws have the log-probabilities of training, a model learns from rewards, and runs resume in the middle of a
//! generation.

use crate::runs::resume::{metrics, train};
use crate::setup::{Seeded, on_one_thread, on_ranks, recipe, tiny_llama_with};
use ottava_data::{Batch, Formatting};
use ottava_engine::{Engine, EngineOptions, KvCacheDtype, LogprobsMode};
use ottava_models::Decoder;
use ottava_parallel::Partition;
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer};
use ottava_recipe::layer_ranks::ShardPlace;
use ottava_recipe::mode::{Pass, StepPrecision};
use ottava_recipe::param::{MemoryPolicy, Purpose};
use ottava_recipe::{ExceptionsConfig, Fp8Format, Precision, RecipeName};
use ottava_settings::{
    CheckpointConfig, CorrectionMode, DataConfig, Interval, LrSchedulerConfig, ModelConfig, OptimizerConfig,
    RecordsConfig, ReinforcementConfig, RunConfig, TrainingConfig, Warmup, WeightInit,
};
use ottava_tensor::Device;
use ottava_tensor::ops::IGNORE_INDEX;
use ottava_train::objective::rollout::{Sample, sample, seed_of};
use ottava_train::step::host::values;
use ottava_train::step::{MicroBatch, TrainStep, token_losses};
use ottava_train::trainer::{Start, Trainer};
use serde_json::json;
use std::path::Path;
use std::sync::atomic::AtomicBool;

const LENGTH: usize = 64;

/// The log-probabilities of the tokens of `samples` as a step computes them before its first update, each sample in a row of its own.
fn log_probs_of_training(model: &mut Decoder, samples: &[Sample]) -> Vec<Vec<f32>> {
    let (mut inputs, mut targets) = (Vec::new(), Vec::new());
    for sample in samples {
        let tokens: Vec<i32> = sample.prompt.iter().chain(&sample.tokens).map(|&token| token as i32).collect();
        let target =
            |at: usize| if (sample.prompt.len()..tokens.len()).contains(&at) { tokens[at] } else { IGNORE_INDEX };
        targets.extend((1..=LENGTH).map(target));
        inputs.extend(tokens.iter().copied().chain(std::iter::repeat_n(0, LENGTH - tokens.len())));
    }
    let batch = Batch::whole(inputs, targets, samples.len());
    let micro_batch = MicroBatch::new(&batch, &Device::Cpu, ShardPlace::ALONE).unwrap();
    let partition = Partition::solo();
    let losses = token_losses(model, &[micro_batch], Pass::Evaluation, StepPrecision::Recipe, &partition).unwrap();
    let losses = values(&losses[0]).unwrap();
    let of_sample = |(row, sample): (usize, &Sample)| {
        let first = row * LENGTH + sample.prompt.len() - 1;
        losses[first..][..sample.tokens.len()].iter().map(|loss| -*loss as f32).collect()
    };
    samples.iter().enumerate().map(of_sample).collect()
}

/// Draws and steps read the same weights, scales and codes by the same arithmetic, so their log-probabilities have the same bits, in any batch and
/// with any chunks of a prompt.
#[test]
fn log_probabilities_of_draws_are_those_of_training() {
    use RecipeName::{Bf16, Fp8Block, Fp8Delayed, Fp8Row, Fp32};
    for name in [Fp32, Bf16, Fp8Row, Fp8Block, Fp8Delayed] {
        let mut sizes = tiny_llama_with(json!({"vocab_size": 96}));
        // As for a run at temperature 1.6.
        (sizes.head.wide_logits, sizes.head.scale) = (true, 1.0 / 1.6);
        let purpose = Purpose::Train(MemoryPolicy::FULL);
        let recipe = recipe(name, Fp8Format::Auto);
        let mut model = Decoder::new(&sizes, &recipe, &Device::Cpu, purpose, LENGTH, &mut Seeded { std: 0.3 }).unwrap();
        model.quantize_weights().unwrap();
        let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.0, max_grad_norm: 1.0 };
        let mut optimizer = AdamWOptimizer::new(adamw, &model.parameters()).unwrap();
        let mut step = TrainStep::new(&model, 1, 8, LENGTH).unwrap();
        let ids = || (0..8 * LENGTH as i32).map(|i| i * 31 % 96).collect();
        let mut update = |model: &mut Decoder| {
            step.load(0, &Batch::whole(ids(), ids(), 8)).unwrap();
            step.run(model, &mut optimizer, 1e-3, StepPrecision::Recipe).unwrap();
        };
        // Before its first step, a run has no scales.
        update(&mut model);
        let options = EngineOptions {
            max_model_len: LENGTH,
            max_batch: 3,
            kv_cache_tokens: 320,
            prefill_chunk: 7,
            kv_cache_dtype: KvCacheDtype::Auto,
            prefix_caching: true,
            batch_invariant: false,
            logprobs_mode: LogprobsMode::Loss,
        };
        let mut engine = Engine::to_lend(&model, &options).unwrap();
        let prompt = |tokens: u32| -> Vec<u32> { (0..tokens).map(|i| (7 * i + tokens) % 96).collect() };
        let prompts: Vec<_> =
            (0..8).map(|i| (prompt([3, 11, 3, 40, 33, 1, 40, 16][i]), seed_of([1, 2, 3, i as u64]))).collect();
        let draw = |model: &mut Decoder, engine: &mut Engine| {
            engine.lend(model, |engine| sample(engine, &prompts, 20, &[5], false)).unwrap()
        };
        let samples = draw(&mut model, &mut engine);
        assert_eq!(draw(&mut model, &mut engine), samples, "{}: draws depend on their seeds", name.as_str());
        assert_ne!(samples[3].tokens, samples[6].tokens, "{}: equal prompts with other seeds", name.as_str());
        let expect_alike = |model: &mut Decoder, samples: &[Sample]| {
            for (sample, expected) in samples.iter().zip(log_probs_of_training(model, samples)) {
                assert_eq!(sample.logprobs, expected, "{}", name.as_str());
            }
        };
        expect_alike(&mut model, &samples);
        // After an update, keys and values of the draws before no longer count, though the prompts are the same.
        update(&mut model);
        let samples = draw(&mut model, &mut engine);
        expect_alike(&mut model, &samples);
    }
}

/// A tokenizer of the ten digits and a few words, a model of two blocks, and prompts whose answer is the larger one of two digits.
fn write_inputs(folder: &Path) {
    let words = ["<end>", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "of", "is", "a", "b", "<unk>"];
    let vocabulary: serde_json::Map<_, _> =
        words.iter().zip(0..).map(|(word, id)| (word.to_string(), json!(id))).collect();
    let special = |id: usize| json!({"id": id, "content": words[id], "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [special(0), special(15)], "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    });
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 16,
        "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "bos_token_id": null, "eos_token_id": 0,
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(folder.join("tokenizer_config.json"), json!({"eos_token": "<end>"}).to_string()).unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let record = |i: usize| {
        let (a, b) = (i / 10, i % 10);
        json!({"prompt": format!("of {a} {b} is"), "answer": a.max(b).to_string()}).to_string() + "\n"
    };
    std::fs::write(folder.join("prompts.jsonl"), (0..100).map(record).collect::<String>()).unwrap();
}

/// A run of `steps` steps, whose generations have the completions of two steps.
fn config(inputs: &Path, output: &Path, recipe: RecipeName, steps: u64) -> RunConfig {
    let reward = "type = 'exact'".parse::<toml::Table>().unwrap().try_into().unwrap();
    RunConfig {
        output_dir: output.to_path_buf(),
        model: ModelConfig { path: inputs.to_path_buf(), init: WeightInit::Random, tokenizer: Default::default() },
        data: DataConfig {
            train_files: vec![inputs.join("prompts.jsonl")],
            records: RecordsConfig { formatting: Formatting::Prompts, ..RecordsConfig::default() },
            val_set_size: 10.0,
            max_length: 16,
            cache_dir: inputs.join("tokens"),
            ..DataConfig::default()
        },
        reinforcement: ReinforcementConfig {
            num_generations: 8,
            prompts_per_generation: 32,
            max_completion_length: 1,
            rewards: vec![reward],
            ..ReinforcementConfig::default()
        },
        training: TrainingConfig {
            max_steps: Some(steps),
            per_device_train_batch_size: 64,
            gradient_accumulation_steps: 2,
            ..TrainingConfig::default()
        },
        optimizer: OptimizerConfig { learning_rate: 1e-3, weight_decay: 0.0, ..OptimizerConfig::default() },
        lr_scheduler: LrSchedulerConfig { warmup_steps: Warmup::Steps(0), ..LrSchedulerConfig::default() },
        checkpoint: CheckpointConfig { save_steps: Interval::End, save_total_limit: 0, ..CheckpointConfig::default() },
        precision: Precision {
            recipe,
            exceptions: ExceptionsConfig { skip_slow_linears: false, ..ExceptionsConfig::default() },
            ..Precision::default()
        },
        ..RunConfig::default()
    }
}

/// The values of a metric in the file of a run, by step.
fn values_of(run: &Path, name: &str) -> Vec<f64> {
    metrics(run).iter().filter_map(|line| line[name].as_f64()).collect()
}

/// With `OTTAVA_CONVERGENCE=full`, in more recipes and to a higher reward: `just nightly convergence`.
#[test]
fn fp8_learns_as_well_from_rewards() {
    use RecipeName::{Bf16, Fp8Block, Fp8Delayed, Fp8Row, Fp32};
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let is_full = std::env::var("OTTAVA_CONVERGENCE").is_ok_and(|value| value == "full");
    let (recipes, steps, learned) = match is_full {
        true => (&[Fp32, Bf16, Fp8Row, Fp8Block, Fp8Delayed][..], 300, 0.9),
        false => (&[Fp8Row][..], 160, 0.8),
    };
    for recipe in recipes {
        let run = folder.path().join(recipe.as_str());
        let config = config(folder.path(), &run, *recipe, steps);
        on_one_thread(|| {
            Trainer::new(config, &Device::Cpu, &Start::New).unwrap().run(&AtomicBool::new(false), &mut |_| {}).unwrap();
        });
        let rewards = values_of(&run, "reward");
        let mean = |of: &[f64]| of.iter().sum::<f64>() / of.len() as f64;
        let [first, last] = [mean(&rewards[..2]), mean(&rewards[rewards.len() - 10..])];
        assert!(first < 0.2 && last > learned, "{}: {rewards:?}", recipe.as_str());
        // What draws report is what the first step of a generation computes; the second step has updated weights. Before the first step of a run, delayed
        // scaling has no scales.
        let apart = values_of(&run, "sampling/sampling_logp_difference/max");
        let known = if *recipe == Fp8Delayed { 2 } else { 0 };
        assert!(apart.iter().skip(known).step_by(2).all(|apart| *apart == 0.0), "{}: {apart:?}", recipe.as_str());
        assert!(apart.iter().skip(1).step_by(2).all(|apart| *apart > 0.0), "{}: {apart:?}", recipe.as_str());
    }
}

#[test]
fn a_run_resumes_in_the_middle_of_a_generation() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let [unbroken, broken] = ["unbroken", "broken"].map(|name| folder.path().join(name));
    let config = |output: &Path| config(folder.path(), output, RecipeName::Fp8Delayed, 6);
    train(&config(&unbroken), &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let stopped = train(&config(&broken), &Device::Cpu, &Start::New, 3);
    assert!(stopped.is_err_and(|error| error.is_stop()));
    train(&config(&broken), &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
    assert_eq!(metrics(&unbroken), metrics(&broken));
}

/// Each rank draws completions of its prompts. The first generation is the same on any number of ranks, and sums of losses differ by rounding.
#[test]
fn ranks_draw_the_completions_of_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let logged = |ranks: usize| {
        let run = folder.path().join(format!("ranks-{ranks}"));
        let mut config = config(folder.path(), &run, RecipeName::Fp32, 2);
        config.training.per_device_train_batch_size /= ranks;
        on_ranks(ranks, move |group| {
            let mut trainer = Trainer::shared(config.clone(), &Device::Cpu, &Start::New, group, None).unwrap();
            trainer.run(&AtomicBool::new(false), &mut |_| {}).unwrap();
        });
        ["loss", "reward", "reward_std", "completions/mean_length", "grad_norm"].map(|name| values_of(&run, name))
    };
    let one = logged(1);
    for ranks in [2, 4] {
        let several = logged(ranks);
        assert_eq!(several[1..4], one[1..4], "{ranks} ranks");
        let apart = several.iter().flatten().zip(one.iter().flatten()).map(|(a, b)| (a - b).abs());
        // Losses and gradients are sums of 128 completions in F32, in another order.
        assert!(apart.fold(0.0, f64::max) < 1e-5, "{ranks} ranks: {several:?}, {one:?}");
    }
}

/// The pass that corrections need computes what draws report, so every ratio is 1 and the run is the run without corrections, bit for bit.
#[test]
fn corrections_change_nothing_where_draws_and_steps_agree() {
    const RATIO: &str = "sampling/importance_sampling_ratio/mean";
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let logged = |mode: CorrectionMode| {
        let run = folder.path().join(format!("{mode:?}"));
        let mut config = config(folder.path(), &run, RecipeName::Fp8Row, 4);
        config.reinforcement.correction.mode = mode;
        train(&config, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        let ratios = values_of(&run, RATIO);
        let mut lines = metrics(&run);
        lines.iter_mut().for_each(|line| drop(line.as_object_mut().unwrap().remove(RATIO)));
        (lines, ratios)
    };
    let (plain, none) = logged(CorrectionMode::None);
    assert!(none.is_empty());
    for mode in [CorrectionMode::TokenMask, CorrectionMode::SequenceTruncate] {
        let (corrected, ratios) = logged(mode);
        assert_eq!((corrected, ratios), (plain.clone(), vec![1.0; 4]), "{mode:?}");
    }
}

/// With dynamic sampling, each group of a step has rewards that differ; and a run whose prompts all have one reward ends with an error.
#[test]
fn groups_without_a_difference_are_replaced() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let config = |name: &str| {
        let mut config = config(folder.path(), &folder.path().join(name), RecipeName::Fp32, 2);
        (config.reinforcement.dynamic_sampling, config.reinforcement.max_rounds) = (true, 8);
        config
    };
    train(&config("replaced"), &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let [equal, reward] =
        ["frac_reward_zero_std", "reward"].map(|name| values_of(&folder.path().join("replaced"), name)[0]);
    assert!(equal > 0.3 && reward < 0.2, "of groups that were drawn, many have no right answer: {equal}, {reward}");
    let mut hopeless = config("hopeless");
    hopeless.reinforcement.rewards =
        vec!["type = 'regex'\npattern = 'never'".parse::<toml::Table>().unwrap().try_into().unwrap()];
    let error = train(&hopeless, &Device::Cpu, &Start::New, u64::MAX).unwrap_err().to_string();
    assert!(error.starts_with("of 256 groups of completions, 0 have rewards that differ"), "{error}");
}
