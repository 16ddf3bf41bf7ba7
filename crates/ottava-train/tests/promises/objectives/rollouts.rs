//! Reinforcement learning: a model learns from rewards, and runs resume in the middle of a generation.

use crate::runs::resume::{metrics, train};
use crate::setup::{on_one_thread, on_ranks};
use ottava_data::Formatting;
use ottava_parallel::Zero;
use ottava_recipe::{ExceptionsConfig, KvCacheDtype, Precision, RecipeName};
use ottava_settings::{
    CheckpointConfig, CorrectionMode, DataConfig, Interval, LoraConfig, LrSchedulerConfig, ModelConfig,
    OptimizerConfig, RecordsConfig, ReinforcementConfig, RunConfig, TrainingConfig, Warmup, WeightInit,
};
use ottava_tensor::Device;
use ottava_train::trainer::{Start, Trainer};
use serde_json::json;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// Writes a tokenizer of the ten digits and a few words, a model of two blocks, and prompts. The answer to a prompt is the larger of two digits.
pub fn write_inputs(folder: &Path) {
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
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "bos_token_id": null, "eos_token_id": 0,
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

/// Returns a run of `steps` steps, in which a generation has the completions of two steps.
pub fn config(inputs: &Path, output: &Path, recipe: RecipeName, steps: u64) -> RunConfig {
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

/// Returns the values of a metric of a run, by step.
pub fn values_of(run: &Path, name: &str) -> Vec<f64> {
    metrics(run).iter().filter_map(|line| line[name].as_f64()).collect()
}

/// With `OTTAVA_CONVERGENCE=full`, runs more recipes and trains to a higher reward: `just nightly convergence`.
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
        let mut config = config(folder.path(), &run, *recipe, steps);
        config.evaluation.num_generations = 4;
        on_one_thread(|| {
            Trainer::new(config, &Device::Cpu, &Start::New).unwrap().run(&AtomicBool::new(false), &mut |_| {}).unwrap();
        });
        expect_evaluation(&run);
        let rewards = values_of(&run, "reward");
        let mean = |of: &[f64]| of.iter().sum::<f64>() / of.len() as f64;
        let [first, last] = [mean(&rewards[..2]), mean(&rewards[rewards.len() - 10..])];
        assert!(first < 0.2 && last > learned, "{}: {rewards:?}", recipe.as_str());
        // Draws report the log-probabilities that the first step of a generation computes. The second step has updated weights. Before the first step
        // of a run, delayed scaling has no scales.
        let apart = values_of(&run, "sampling/sampling_logp_difference/max");
        let known = if *recipe == Fp8Delayed { 2 } else { 0 };
        assert!(apart.iter().skip(known).step_by(2).all(|apart| *apart == 0.0), "{}: {apart:?}", recipe.as_str());
        assert!(apart.iter().skip(1).step_by(2).all(|apart| *apart > 0.0), "{}: {apart:?}", recipe.as_str());
    }
}

/// The evaluation before the first step and the evaluation after the last step have accuracies and pass rates that fit together. The log has completions
/// with the rewards of the run.
fn expect_evaluation(run: &Path) {
    let [accuracy, reward] = ["eval_accuracy", "eval_reward"].map(|name| values_of(run, name));
    assert_eq!(accuracy, reward, "rewards are 0 or 1");
    assert!(values_of(run, "rewards/exact/scored").iter().all(|share| *share == 1.0));
    let pass_at: Vec<_> = [1, 2, 4].iter().map(|k| values_of(run, &format!("eval_pass@{k}"))).collect();
    for at in [0, 1] {
        assert!(pass_at.is_sorted_by(|less, more| less[at] <= more[at]), "{pass_at:?}");
    }
    assert!(pass_at[0][1] > pass_at[0][0] + 0.4 && accuracy[1] > accuracy[0], "{accuracy:?}, {pass_at:?}");
    let log = std::fs::read_to_string(run.join("completions.jsonl")).unwrap();
    let lines: Vec<serde_json::Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    // A generation has the completions of two steps.
    assert_eq!(lines.len(), 4 * values_of(run, "loss").len().div_ceil(2));
    for line in &lines {
        let prompt: Vec<&str> = line["prompt"].as_str().unwrap().split(' ').collect();
        let is_right = line["completion"].as_str() == prompt[1..3].iter().max().copied();
        assert_eq!(line["reward"], json!(if is_right { 1.0 } else { 0.0 }), "{line}");
        assert_eq!(line["rewards"]["exact"], line["reward"]);
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
    let [unbroken, broken] = [unbroken, broken].map(|run| std::fs::read(run.join("completions.jsonl")).unwrap());
    assert!(unbroken == broken, "completions.jsonl has the same bytes");
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
        // Losses and gradients are sums over 128 completions in F32, in another order.
        assert!(apart.fold(0.0, f64::max) < 1e-5, "{ranks} ranks: {several:?}, {one:?}");
    }
}

/// The pass for corrections computes the log-probabilities that draws report, so every ratio is 1. So the run has the bits of the run without
/// corrections.
#[test]
fn corrections_change_nothing_where_draws_and_steps_agree() {
    const RATIO: &str = "sampling/importance_sampling_ratio/mean";
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    // A generation of two steps needs a pass, and a generation of one step does not.
    let logged = |mode: CorrectionMode, steps: usize| {
        let run = folder.path().join(format!("{mode:?}-{steps}"));
        let mut config = config(folder.path(), &run, RecipeName::Fp8Row, 4);
        config.reinforcement.correction.mode = mode;
        config.reinforcement.prompts_per_generation *= steps - 1;
        assert_eq!(config.steps_once(), steps == 1);
        train(&config, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        let ratios = values_of(&run, RATIO);
        let mut lines = metrics(&run);
        lines.iter_mut().for_each(|line| drop(line.as_object_mut().unwrap().remove(RATIO)));
        (lines, ratios)
    };
    for (steps, modes) in [
        (2, [CorrectionMode::TokenMask, CorrectionMode::SequenceTruncate]),
        (1, [CorrectionMode::Auto, CorrectionMode::SequenceMask]),
    ] {
        let (plain, none) = logged(CorrectionMode::None, steps);
        assert!(none.is_empty());
        for mode in modes {
            let (corrected, ratios) = logged(mode, steps);
            assert_eq!((corrected, ratios), (plain.clone(), vec![1.0; 4]), "{mode:?}");
        }
    }
}

/// Draws have the precision of their step: BF16 before step 2, and FP8 before the others. So they agree with all steps, on one rank and where ranks divide weights.
#[test]
fn draws_have_the_precision_of_their_step() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let of = |name: &str, high: &str, ranks: usize| {
        let run = folder.path().join(name);
        let mut config = config(folder.path(), &run, RecipeName::Fp8Row, 4);
        (config.reinforcement.prompts_per_generation, config.parallel.zero) = (0, Zero::Weights);
        config.training.per_device_train_batch_size /= ranks;
        config.precision.exceptions.high_precision_steps = high.parse().unwrap();
        on_ranks(ranks, move |group| {
            let mut trainer = Trainer::shared(config.clone(), &Device::Cpu, &Start::New, group, None).unwrap();
            trainer.run(&AtomicBool::new(false), &mut |_| {}).unwrap();
        });
        // The entropy is the mean of minus the log-probabilities of draws.
        ["sampling/sampling_logp_difference/max", "entropy"].map(|name| values_of(&run, name))
    };
    let [recipe, in_fp8] = of("recipe", "", 1);
    assert_eq!(recipe, [0.0; 4]);
    for (name, ranks) in [("one", 1), ("two", 2)] {
        let [apart, entropies] = of(name, "2..3", ranks);
        assert_eq!(apart, [0.0; 4], "{ranks} ranks");
        assert!((entropies[0] - in_fp8[0]).abs() < 1e-12 && entropies[1] != in_fp8[1], "{entropies:?}, {in_fp8:?}");
    }
}

/// Keys and values in FP8 have relative errors of up to 1/16, so draws and steps differ a little, and the correction weighs tokens by ratios near 1.
#[test]
fn draws_with_a_kv_cache_in_fp8_are_near_the_steps() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let first = |steps: usize| {
        let run = folder.path().join(format!("run-{steps}"));
        let mut config = config(folder.path(), &run, RecipeName::Fp8Row, 3);
        config.reinforcement.sampling.kv_cache_dtype = KvCacheDtype::Fp8;
        config.reinforcement.prompts_per_generation *= steps - 1;
        train(&config, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        ["sampling/sampling_logp_difference/max", "sampling/importance_sampling_ratio/mean"]
            .map(|name| values_of(&run, name)[0])
    };
    for steps in [1, 2] {
        let [difference, ratio] = first(steps);
        assert!(difference > 0.0 && difference < 0.1, "{difference}");
        assert!(ratio != 1.0 && (ratio - 1.0).abs() < 0.01, "{ratio}");
    }
}

/// Without adapters, and with adapters beside modules that are trained whole, the reference model is the model of the start. So the divergence is 0 in the steps of the first generation before an update, and
/// above 0 after updates. A run that resumes compares with the same model.
#[test]
fn the_divergence_is_from_the_model_of_the_start() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let start = folder.path().join("start");
    train(&config(folder.path(), &start, RecipeName::Fp32, 1), &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let config = |name: &str| {
        let mut config = config(folder.path(), &folder.path().join(name), RecipeName::Fp8Row, 4);
        (config.model.path, config.model.init) = (start.join("checkpoints/checkpoint-1"), WeightInit::Pretrained);
        // The reference model has the temperature of the run too.
        (config.reinforcement.loss.beta, config.reinforcement.sampling.temperature) = (0.1, 1.5);
        config
    };
    let mut adapted = config("adapted");
    // Adapters of this factor have no effect, so only the head moves away from the reference.
    let modules_to_save = vec!["lm_head".into()];
    adapted.lora = LoraConfig { r: 2, lora_alpha: 1e-9, modules_to_save, ..LoraConfig::default() };
    for run in [config("unbroken"), adapted] {
        train(&run, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        let kl = values_of(&run.output_dir, "kl");
        assert!(kl[0] == 0.0 && kl[1..].iter().all(|kl| *kl > 1e-7), "{kl:?}");
    }
    assert!(train(&config("broken"), &Device::Cpu, &Start::New, 3).is_err_and(|error| error.is_stop()));
    train(&config("broken"), &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
    let [unbroken, broken] = ["unbroken", "broken"].map(|name| metrics(&folder.path().join(name)));
    assert_eq!(unbroken, broken);
}

/// With dynamic sampling, the rewards in each group of a step differ. A run in which all prompts have a single reward ends with an error.
#[test]
fn groups_without_a_difference_are_replaced() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let config = |name: &str| {
        let mut config = config(folder.path(), &folder.path().join(name), RecipeName::Fp32, 2);
        (config.reinforcement.sampling.dynamic_sampling, config.reinforcement.sampling.max_rounds) = (true, 8);
        config
    };
    train(&config("replaced"), &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let [equal, reward] =
        ["frac_reward_zero_std", "reward"].map(|name| values_of(&folder.path().join("replaced"), name)[0]);
    assert!(equal > 0.3 && reward < 0.2, "of groups that were drawn, many have no right answer: {equal}, {reward}");
    let mut hopeless = config("hopeless");
    hopeless.reinforcement.rewards =
        vec!["type = 'regex'\npattern = 'never'".parse::<toml::Table>().unwrap().try_into().unwrap()];
    let alarms = || {
        let log = std::fs::read_to_string(folder.path().join("equal/alarms.jsonl")).unwrap();
        log.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<serde_json::Value>>()
    };
    let mut equal = self::config(folder.path(), &folder.path().join("equal"), RecipeName::Fp32, 4);
    equal.reinforcement.rewards.clone_from(&hopeless.reinforcement.rewards);
    train(&equal, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    // Completions have a single token at most, so most of them do not end by themselves.
    let raised: Vec<_> = alarms().iter().map(|line| (line["step"].clone(), line["alarm"].clone())).collect();
    assert_eq!(
        raised,
        [(json!(1), json!("length_growth")), (json!(1), json!("no_signal"))],
        "each alarm is raised once"
    );
    let error = train(&hopeless, &Device::Cpu, &Start::New, u64::MAX).unwrap_err().to_string();
    assert!(error.starts_with("of 256 groups of completions, 0 have rewards that differ"), "{error}");
}

/// The bonus for entropy is a part of the loss, and draws stay more different than with a negligible bonus.
#[test]
fn a_bonus_for_entropy_keeps_draws_different() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let logged = |name: &str, coefficient: f64| {
        let mut config = config(folder.path(), &folder.path().join(name), RecipeName::Fp32, 6);
        config.reinforcement.loss.entropy_coef = coefficient;
        train(&config, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        ["loss", "entropy"].map(|metric| values_of(&folder.path().join(name), metric))
    };
    let ([plain, _], [loss, entropy]) = (logged("plain", 0.0), logged("bonus", 0.5));
    let [_, negligible] = logged("negligible", 1e-6);
    // Losses are sums over 128 tokens in F32.
    assert!((plain[0] - 0.5 * entropy[0] - loss[0]).abs() < 1e-5, "{plain:?}, {loss:?}, {entropy:?}");
    assert_eq!(entropy[0], negligible[0]);
    assert!(negligible[5] < entropy[5] && entropy[5] < 16f64.ln(), "{entropy:?}, {negligible:?}");
}
