//! A run that is interrupted or killed after any step, and resumed, equals the uninterrupted run: weights, optimizer states, scales, metrics, logs,
//! and the decisions of sentinel and alarms. All features are switched on.
//!
//! `OTTAVA_INTERRUPTIONS=full` also interrupts a run of each case at each step once, and kills it at each step once.

use crate::objectives::preference::{run_config, write_records};
use crate::objectives::{rollouts, turns};
use crate::runs::resume::{config, metrics};
use crate::setup::on_ranks;
use ottava_checkpoint::Manifest;
use ottava_parallel::Zero;
use ottava_recipe::RecipeName;
use ottava_recipe::storage::Storage;
use ottava_sentinel::{AlarmPolicy, NonFiniteSteps, NormAlarmPolicy, SentinelPolicy};
use ottava_settings::{
    CorrectionMode, EvaluationConfig, Interval, LoraConfig, ParallelConfig, Rollbacks, RunConfig, SentinelConfig,
    Spikes,
};
use ottava_tensor::Device;
use ottava_train::trainer::{Start, Trainer};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

const STEPS: u64 = 12;

/// A run with all features that later steps depend on.
struct Case {
    name: &'static str,
    ranks: usize,
    config: RunConfig,
}

/// Switches on the sentinel, all alarms, early stopping, and logs.
fn with_everything(mut config: RunConfig) -> RunConfig {
    config.sentinel = SentinelConfig {
        sentinel_steps: 3,
        sentinel_policy: SentinelPolicy::Demote,
        sentinel_hold_steps: 2,
        // The bound is so narrow that comparisons have findings.
        sentinel_loss_gap: 1e-4,
        sentinel_sequences: 2,
        repeat_steps: 5,
        ..SentinelConfig::default()
    };
    let alarms = &mut config.alarms;
    // The loss of a small model fluctuates, so some steps are spikes.
    alarms.spikes = Spikes { spike_window: 4, spike_threshold: 1.0 };
    (alarms.loss_spike, alarms.grad_norm_spike) = (AlarmPolicy::Rollback, NormAlarmPolicy::Skip);
    alarms.rollback = Rollbacks { rollback_steps: 2, max_rollbacks: 4 };
    alarms.max_skipped_steps = 2;
    (alarms.casts, alarms.cast_bounds.saturated_share, alarms.cast_bounds.amax_growth) = (AlarmPolicy::Warn, 0.01, 0.5);
    alarms.non_finite_steps = NonFiniteSteps::Skip;
    (config.training.max_steps, config.optimizer.learning_rate) = (Some(STEPS), 0.2);
    (config.checkpoint.save_steps, config.checkpoint.save_total_limit) = (Interval::Every(2), 3);
    config.evaluation = EvaluationConfig {
        eval_steps: Interval::Every(2),
        load_best_model_at_end: true,
        early_stopping_patience: 5,
        ..EvaluationConfig::default()
    };
    config.logging.cast_statistics_steps = 3;
    config
}

/// Scores a completion by its first token.
const REWARD: &str = r#"
while read -r line; do
    id=${line#*:}; id=${id%%,*}
    case $line in *'"completion":"1'*|*'"completion":"a'*) reward=1 ;; *'"completion":"'[2-5]*) reward=0.5 ;; *) reward=0 ;; esac
    echo "{\"id\":$id,\"rewards\":[$reward]}"
done"#;

/// Returns runs of reinforcement learning whose generations have the completions of three steps: with a command as the reward, and with an environment on
/// ranks that divide the weights. A reward that no longer grows takes the run back.
fn policies(folder: &Path) -> [Case; 2] {
    std::fs::create_dir(folder).unwrap();
    rollouts::write_inputs(folder);
    let of = |name, ranks: usize, mut config: RunConfig| {
        let r = &mut config.reinforcement;
        (r.num_generations, r.prompts_per_generation, r.max_completion_length) = (4, 6, 3);
        r.correction.mode = CorrectionMode::TokenTruncate;
        (config.training.per_device_train_batch_size, config.training.gradient_accumulation_steps) = (8 / ranks, 1);
        let mut config = with_everything(config);
        // The sentinel does not compare losses of policies.
        config.sentinel = SentinelConfig::default();
        config.optimizer.learning_rate = 1e-2;
        config.evaluation.num_generations = 2;
        config.alarms.rollouts = AlarmPolicy::Rollback;
        let bounds = &mut config.alarms.rollout_bounds;
        (bounds.max_clipped_ratio, bounds.max_zero_std_ratio, bounds.plateau_steps) = (1.0, 1.0, 2);
        bounds.max_mult_prob_error = f64::INFINITY;
        config.alarms.rollback.max_rollbacks = 20;
        Case { name, ranks, config }
    };
    let mut scored = rollouts::config(folder, &PathBuf::new(), RecipeName::Fp8Delayed, STEPS);
    let command = toml::Table::from_iter([
        ("type".into(), "command".into()),
        ("command".into(), ["sh", "-c", REWARD].map(toml::Value::from).to_vec().into()),
        ("batch_size".into(), 1.into()),
    ]);
    scored.reinforcement.rewards = vec![command.try_into().unwrap()];
    scored.reinforcement.num_iterations = 2;
    let mut played = turns::run(folder, &PathBuf::new(), RecipeName::Fp8Block, STEPS, turns::GAME);
    played.parallel.zero = Zero::Weights;
    [of("a reward by a command", 1, scored), of("an environment", 2, played)]
}

/// Returns all cases, with their inputs in `folder`.
fn cases(folder: &Path) -> Vec<Case> {
    write_records(folder);
    let experts = folder.join("experts");
    std::fs::create_dir(&experts).unwrap();
    write_records(&experts);
    let keys = json!({
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": null, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
        "norm_topk_prob": true, "max_position_embeddings": 64,
    });
    std::fs::write(experts.join("config.json"), keys.to_string()).unwrap();
    let of = |name, ranks, config: RunConfig| Case { name, ranks, config: with_everything(config) };
    // The sentinel does not compare losses of preferences.
    let of_pairs = |name, config| {
        let Case { config, .. } = of(name, 1, config);
        Case { name, ranks: 1, config: RunConfig { sentinel: SentinelConfig::default(), ..config } }
    };
    let plain = |recipe| config(folder, &PathBuf::new(), recipe);
    let pairs = |recipe| run_config(folder, &PathBuf::new(), recipe, "pairs.jsonl");
    let with = |config: RunConfig, parallel| RunConfig { parallel, ..config };
    let lora = |config: RunConfig| {
        let lora = LoraConfig { r: 2, use_dora: true, ..LoraConfig::default() };
        RunConfig { lora, ..config }
    };
    let mut fp16 = plain(RecipeName::Fp16);
    fp16.precision.fp16.loss_scale_window = 3;
    let mut narrow = plain(RecipeName::Fp8Delayed);
    (narrow.optimizer.storage, narrow.seed) = (Storage::MsampO2, 4);
    let mut routed = config(&experts, &PathBuf::new(), RecipeName::Fp8Current);
    (routed.router.balance_loss, routed.router.z_loss, routed.router.bias_update_rate) = (0.1, 0.01, 0.01);
    let on = |change: fn(&mut ParallelConfig)| {
        let mut parallel = ParallelConfig::default();
        change(&mut parallel);
        parallel
    };
    let mut all = vec![
        of("fp8-delayed", 1, plain(RecipeName::Fp8Delayed)),
        of("fp8-block, storage O2", 1, narrow),
        of("fp16", 1, fp16),
        of("adapters with fp8-delayed", 1, lora(plain(RecipeName::Fp8Delayed))),
        of_pairs("DPO", pairs(RecipeName::Fp8Delayed)),
        of_pairs("DPO with adapters", lora(pairs(RecipeName::Fp8Delayed))),
        of("experts", 1, routed.clone()),
        of("data", 2, with(plain(RecipeName::Fp8Delayed), on(|parallel| parallel.zero = Zero::Weights))),
        of("tensor", 2, with(plain(RecipeName::Fp8Delayed), on(|parallel| parallel.tensor = 2))),
        of("pipeline", 2, with(plain(RecipeName::Fp8Current), on(|parallel| parallel.pipeline = 2))),
        of("expert ranks", 2, with(routed, on(|parallel| parallel.expert = 2))),
    ];
    all.extend(policies(&folder.join("policies")));
    all
}

/// The interruption of a part of a run.
#[derive(Clone, Copy)]
enum Until<'a> {
    End,
    /// A signal arrives during this step of a new run. For step 1, the signal arrives during the first step of this part.
    Signal(u64),
    /// A kill after the report of this step. The run's folder is copied to this path.
    Kill(u64, &'a Path),
}

/// Runs a part of a run on all its ranks. Returns the error that ended it.
fn part(case: &Case, output: &Path, start: Start, until: Until) -> Option<String> {
    let config = RunConfig { output_dir: output.to_path_buf(), ..case.config.clone() };
    let (signal, kill) = match until {
        Until::End => (u64::MAX, None),
        Until::Signal(step) => (step, None),
        Until::Kill(step, copy) => (u64::MAX, Some((step, copy.to_path_buf()))),
    };
    let from = output.to_path_buf();
    let ends = on_ranks(case.ranks, move |comm| {
        let leads = comm.rank() == 0;
        let mut trainer = Trainer::shared(config.clone(), &Device::Cpu, &start, comm, None).unwrap();
        let stop = AtomicBool::new(signal <= 1);
        let (mut last, mut kill) = (0, kill.clone());
        let done = trainer.run(&stop, &mut |report| {
            last = report.step;
            // The flag is read after the next step's update.
            stop.fetch_or(report.step + 1 >= signal, Ordering::Relaxed);
            if let Some((_, copy)) = kill.take_if(|(step, _)| leads && *step == last) {
                copy_folder(&from, &copy);
            }
        });
        done.err().map(|error| error.to_string())
    });
    let end = ends.into_iter().next().expect("there is a rank");
    end.map(|error| error.replace(&output.display().to_string(), "RUN"))
}

/// Copies a folder while a checkpoint may be written into it. If a file is renamed before it was copied, the copy is repeated.
fn copy_folder(from: &Path, to: &Path) {
    for _ in 0..20 {
        std::fs::create_dir(to).unwrap();
        let copied = std::process::Command::new("cp").arg("-r").arg(from.join(".")).arg(to).output().unwrap();
        if copied.status.success() {
            return;
        }
        std::fs::remove_dir_all(to).unwrap();
    }
    panic!("{} cannot be copied", from.display());
}

/// Returns the state that must be equal: the checkpoints at the end, and the logs.
fn left(output: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    for name in
        ["casts.jsonl", "sentinel.jsonl", "alarms.jsonl", "rollbacks.jsonl", "digests.jsonl", "completions.jsonl"]
    {
        if let Ok(bytes) = std::fs::read(output.join(name)) {
            all.insert(name.to_string(), bytes);
        }
    }
    let lines: Vec<String> = metrics(output).iter().map(|line| line.to_string() + "\n").collect();
    all.insert("metrics.jsonl".into(), lines.concat().into_bytes());
    for checkpoint in std::fs::read_dir(output.join("checkpoints")).unwrap() {
        let checkpoint = checkpoint.unwrap().path();
        // An uninterrupted run has no checkpoints that a rollback or a resumed run has renamed, and none that a signal requested.
        let is_aside = checkpoint.file_name().is_some_and(|name| name.to_string_lossy().starts_with("abandoned-"));
        if is_aside || Manifest::read(&checkpoint).unwrap().is_some_and(|manifest| manifest.is_interruption()) {
            continue;
        }
        for folder in [checkpoint.clone(), checkpoint.join("training")] {
            for file in std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()) {
                if file.extension().is_some_and(|end| end == "safetensors") {
                    let name = file.strip_prefix(output).unwrap().display().to_string();
                    all.insert(name, std::fs::read(&file).unwrap());
                }
            }
        }
    }
    all
}

/// Returns the difference between two runs in words.
fn difference(expected: &BTreeMap<String, Vec<u8>>, got: &BTreeMap<String, Vec<u8>>) -> Option<String> {
    let names = |left: &BTreeMap<String, Vec<u8>>| left.keys().cloned().collect::<Vec<_>>();
    // The metrics say at which step the difference begins.
    let differs = |name: &&String| expected.get(*name) != got.get(*name);
    let metrics = expected.keys().filter(|name| *name == "metrics.jsonl");
    let name = metrics.chain(expected.keys()).chain(got.keys()).find(differs)?;
    let (Some(expected), Some(got)) = (expected.get(name), got.get(name)) else {
        return Some(format!("files: {:?}\nexpected {:?}", names(got), names(expected)));
    };
    let (expected, got) = (String::from_utf8_lossy(expected), String::from_utf8_lossy(got));
    let lines = expected.lines().zip(got.lines()).find(|(a, b)| a != b);
    let lines = lines.filter(|_| name.ends_with(".jsonl"));
    Some(format!("{name}: {}", lines.map_or("other bytes".into(), |(a, b)| format!("\n{b}\nexpected\n{a}"))))
}

/// Returns whether a signal has ended a run.
fn was_signalled(error: &str) -> bool {
    error.starts_with("stopped by a signal after step ")
}

/// Resumes an interrupted run until its end.
fn finish(case: &Case, output: &Path) -> Option<String> {
    part(case, output, Start::Resume, Until::End)
}

#[test]
fn interrupted_runs_end_as_unbroken_ones() {
    let is_full = std::env::var("OTTAVA_INTERRUPTIONS").is_ok_and(|value| value == "full");
    let inputs = tempfile::tempdir().unwrap();
    let (mut interruptions, mut decided) = (0, BTreeMap::<&str, usize>::new());
    let seeds: &[u64] = if is_full { &[3, 5] } else { &[3] };
    let with = |case: &Case, seed| Case { config: RunConfig { seed, ..case.config.clone() }, ..*case };
    let all = cases(inputs.path());
    for case in seeds.iter().flat_map(|&seed| all.iter().map(move |case| with(case, seed))) {
        let runs = tempfile::tempdir().unwrap();
        let unbroken = runs.path().join("unbroken");
        let end = part(&case, &unbroken, Start::New, Until::End);
        let expected = left(&unbroken);
        for log in ["alarms.jsonl", "rollbacks.jsonl", "sentinel.jsonl"] {
            *decided.entry(log).or_default() += usize::from(expected.get(log).is_some_and(|log| !log.is_empty()));
        }
        let check = |what: &str, output: &Path, got: Option<String>| {
            let differs = difference(&expected, &left(output));
            assert!(got == end && differs.is_none(), "{}, {what}: {got:?}, expected {end:?}; {differs:?}", case.name);
        };

        // The run is interrupted after each step.
        let output = runs.path().join("each");
        let (mut got, mut parts) = (part(&case, &output, Start::New, Until::Signal(1)), 1);
        while got.as_ref().is_some_and(|error| was_signalled(error)) {
            got = part(&case, &output, Start::Resume, Until::Signal(1));
            parts += 1;
            assert!(parts < 20 * STEPS, "{}: the run does not end", case.name);
        }
        interruptions += parts - 1;
        check("interrupted after each step", &output, got);

        for step in 1..if is_full { STEPS } else { 1 } {
            let output = runs.path().join(format!("signal-{step}"));
            let first = part(&case, &output, Start::New, Until::Signal(step));
            let is_stopped = first.as_ref().is_some_and(|error| was_signalled(error));
            let got = if is_stopped { finish(&case, &output) } else { first };
            check(&format!("interrupted in step {step}"), &output, got);
            let [whole, killed] = ["whole", "killed"].map(|name| runs.path().join(format!("{name}-{step}")));
            part(&case, &whole, Start::New, Until::Kill(step, &killed));
            // A run may end before this step.
            if killed.exists() {
                let got = part(&case, &killed, Start::Auto, Until::End);
                check(&format!("killed after step {step}"), &killed, got);
                interruptions += 1;
            }
            interruptions += 1;
        }
    }
    eprintln!("{interruptions} interruptions; cases with each log: {decided:?}");
    assert!(decided.values().all(|&cases| cases >= 3), "{decided:?}");
    assert!(interruptions >= if is_full { 500 } else { 100 }, "{interruptions}");
}
