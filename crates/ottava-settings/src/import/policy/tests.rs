use super::super::{Imported, import};
use crate::{AdvantageEstimator, CorrectionMode, KlEstimator, PolicyLossType, RunConfig, ScaleRewards};
use ottava_rewards::{RewardKind, RewardSpec};

/// Imports `text` from a file of this name.
fn imported(name: &str, text: &str) -> (Imported, RunConfig) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(name), text).unwrap();
    let imported = import(&folder.path().join(name)).unwrap();
    let config = toml::from_str(&imported.toml).unwrap_or_else(|error| panic!("{error}\n{}", imported.toml));
    (imported, config)
}

/// The error of a file that has another objective.
fn objective(text: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.yaml");
    std::fs::write(&path, text).unwrap();
    let error = import(&path).unwrap_err().to_string();
    assert!(error.contains("another objective, so none is written"), "{error}");
    error
}

/// Expects a note that has these words, in a line of the file `name`.
fn expect_note(notes: &[String], name: &str, line: usize, words: &str) {
    let start = format!("{name}:{line}: {words}");
    assert!(notes.iter().any(|note| note.contains(&start)), "{start} in {notes:#?}");
}

fn names(rewards: &[RewardSpec]) -> Vec<(&str, f64)> {
    rewards.iter().map(|reward| (reward.name.as_str(), reward.weight)).collect()
}

const TRL: &str = "model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: data/problems.jsonl
learning_rate: 2.0e-6
per_device_train_batch_size: 16
gradient_accumulation_steps: 2
max_steps: 200
reward_funcs:
  - accuracy_reward
  - think_format_reward
  - my_rewards.brevity
reward_weights: [1.0, 0.5, 0.1]
num_generations: 8
generation_batch_size: 64
max_prompt_length: 256
max_completion_length: 768
temperature: 0.9
top_p: 0.95
num_iterations: 2
epsilon_high: 0.28
beta: 0.04
scale_rewards: none
loss_type: grpo
importance_sampling_level: sequence
mask_truncated_completions: true
use_vllm: true
vllm_mode: colocate
vllm_importance_sampling_mode: token_mask
vllm_importance_sampling_clip_max: 2.5
top_entropy_quantile: 0.2
steps_per_generation: 4
log_completions: true
sparkle: 7
";

#[test]
fn grpo_of_trl_is_translated_and_what_is_left_is_named() {
    let (imported, config) = imported("grpo.yaml", TRL);
    let r = &config.reinforcement;
    assert_eq!((r.num_generations, r.prompts_per_generation, r.num_iterations), (8, 8, 2));
    assert_eq!((r.max_completion_length, config.data.max_length, r.temperature), (768, 1024, 0.9));
    assert_eq!((r.loss.loss_type, r.loss.epsilon_high, r.loss.beta), (PolicyLossType::Gspo, 0.28, 0.04));
    assert_eq!(r.advantage.scale_rewards, ScaleRewards::None);
    assert_eq!((r.correction.mode, r.correction.max), (CorrectionMode::TokenMask, 2.5));
    assert!(r.mask_truncated_completions);
    assert_eq!(names(&r.rewards), [("accuracy_reward", 1.0), ("think_format_reward", 0.5), ("brevity", 0.1)]);
    assert!(matches!(&r.rewards[0].kind, RewardKind::Math(math) if math.answer == "solution"));
    assert!(matches!(&r.rewards[2].kind, RewardKind::Command(own) if own.command == ["python3", "brevity.py"]));
    assert_eq!((config.optimizer.learning_rate, config.training.max_steps), (2e-6, Some(200)));
    for (line, words) in [
        (7, "`reward_funcs`: write `brevity.py`: for each line of standard input"),
        (17, "`top_p`: completions are drawn from the whole distribution"),
        (29, "`top_entropy_quantile`: every token"),
        (30, "`steps_per_generation`: 4 micro-batches are a generation, and 2 a step; write `prompts_per_generation`"),
        (32, "`sparkle`: this key is not known"),
    ] {
        expect_note(&imported.refused, "grpo.yaml", line, words);
    }
    expect_note(&imported.needless, "grpo.yaml", 25, "`use_vllm`: the model that is trained draws");
    assert_eq!(imported.problems, [""; 0]);
}

#[test]
fn defaults_and_other_losses_of_trl() {
    let of = |keys: &str| {
        let text = format!("model_name_or_path: m\ndataset_name: d.jsonl\nmax_steps: 9\nreward_funcs: [a.b]\n{keys}");
        imported("run.yaml", &text)
    };
    let (imported, config) = of("");
    assert_eq!((config.optimizer.learning_rate, config.data.max_length), (1e-6, 1024));
    assert_eq!(config.reinforcement.loss.loss_type, PolicyLossType::Dapo);
    assert!(
        imported.toml.contains("max_length = 1024  # 512 tokens of a prompt and 512 of a completion"),
        "{}",
        imported.toml
    );
    let loss = |keys: &str| of(keys).1.reinforcement.loss;
    assert_eq!(loss("loss_type: dr_grpo\n").loss_type, PolicyLossType::DrGrpo);
    let cispo = loss("loss_type: cispo\nepsilon_high: 5.0\n");
    assert_eq!((cispo.loss_type, cispo.epsilon, cispo.epsilon_high), (PolicyLossType::Cispo, 1.0, 4.0));
    assert_eq!(loss("use_bias_correction_kl: false\n").kl_estimator, KlEstimator::K3);
    for (keys, words) in [
        ("loss_type: bnpo\n", "`loss_type`: it divides by the tokens of a micro-batch"),
        ("loss_type: sapo\n", "`loss_type`: the losses are"),
        ("loss_type: cispo\n", "`epsilon_high`: `loss_type = cispo` bounds every weight by 0.2"),
        ("importance_sampling_level: sequence\n", "`importance_sampling_level`: ratios of completions"),
    ] {
        let text = format!("model_name_or_path: m\ndataset_name: d.jsonl\nreward_funcs: [a.b]\n{keys}");
        assert!(objective(&text).contains(words), "{keys}");
    }
    let rloo = of("normalize_advantages: false\nreward_clip_range: [-5, 5]\n");
    let r = &rloo.1.reinforcement;
    assert_eq!((r.num_generations, r.loss.beta, r.loss.loss_type), (2, 0.05, PolicyLossType::DrGrpo));
    assert_eq!((r.advantage.estimator, r.advantage.scale_rewards), (AdvantageEstimator::Rloo, ScaleRewards::None));
    expect_note(&rloo.0.refused, "run.yaml", 6, "`reward_clip_range`: rewards are not clipped");
}

#[test]
fn grpo_of_axolotl_has_the_keys_of_trl_in_a_table() {
    let (imported, config) = imported(
        "axolotl.yml",
        "base_model: Qwen/Qwen2.5-1.5B-Instruct
rl: grpo
trl:
  beta: 0.001
  max_completion_length: 256
  num_generations: 4
  use_vllm: false
  reward_funcs: [rewards.correct, rewards.short]
  reward_weights: [1.0, 0.2]
  scale_rewards: false
  temperature: 0.7
  loss_type: dr_grpo
  replay_buffer_size: 10
  skip_zero_advantage_batches: true
  purple: 3
datasets:
  - path: data/gsm8k.jsonl
    type: rewards.transform
sequence_len: 1024
micro_batch_size: 8
gradient_accumulation_steps: 4
max_steps: 50
adapter: lora
lora_r: 16
lora_alpha: 32
learning_rate: 1e-5
optimizer: adamw_torch_fused
",
    );
    let r = &config.reinforcement;
    assert_eq!((r.num_generations, r.max_completion_length, config.data.max_length), (4, 256, 1024));
    assert_eq!((r.loss.loss_type, r.loss.beta, r.temperature), (PolicyLossType::DrGrpo, 0.001, 0.7));
    assert_eq!(names(&r.rewards), [("correct", 1.0), ("short", 0.2)]);
    assert_eq!((config.lora.r, config.optimizer.learning_rate), (16, 1e-5));
    assert_eq!(config.data.train_files, [std::path::Path::new("data/gsm8k.jsonl")]);
    for (line, words) in [
        (8, "`trl.reward_funcs`: write `correct.py`"),
        (13, "`trl.replay_buffer_size`: completions are used"),
        (15, "`trl.purple`: this key is not known"),
    ] {
        expect_note(&imported.refused, "axolotl.yml", line, words);
    }
    expect_note(&imported.needless, "axolotl.yml", 7, "`trl.use_vllm`");
    assert_eq!(imported.problems, [""; 0]);
}

const VERL: &str = "algorithm:
  adv_estimator: grpo
  norm_adv_by_std_in_grpo: false
  use_kl_in_reward: false
  gamma: 1.0
  filter_groups:
    enable: true
    metric: acc
    max_num_gen_batches: 10
  rollout_correction:
    rollout_is: token
    rollout_is_threshold: 2.0
data:
  train_files: ~/data/gsm8k/train.parquet
  val_files: [~/data/gsm8k/test.parquet]
  prompt_key: prompt
  max_prompt_length: 512
  max_response_length: 1024
  train_batch_size: 256
  filter_overlong_prompts: true
  truncation: error
actor_rollout_ref:
  hybrid_engine: true
  model:
    path: Qwen/Qwen3-8B
    use_remove_padding: true
    enable_gradient_checkpointing: true
    lora_rank: 32
    lora_alpha: 32
  actor:
    strategy: fsdp2
    optim:
      lr: 1e-6
      weight_decay: 0.1
      betas: [0.9, 0.99]
    ppo_mini_batch_size: 64
    ppo_micro_batch_size_per_gpu: 4
    ppo_epochs: 1
    clip_ratio_low: 0.2
    clip_ratio_high: 0.28
    clip_ratio_c: 10.0
    loss_agg_mode: seq-mean-token-mean
    use_kl_loss: true
    kl_loss_coef: 0.002
    kl_loss_type: low_var_kl
    entropy_coeff: 0.01
    ulysses_sequence_parallel_size: 2
    fsdp_config:
      param_offload: false
  rollout:
    name: vllm
    n: 5
    temperature: 1.0
    response_length: ${data.max_response_length}
    gpu_memory_utilization: 0.6
    tensor_model_parallel_size: 2
    val_kwargs:
      do_sample: true
  ref:
    log_prob_micro_batch_size_per_gpu: 8
custom_reward_function:
  path: recipes/score.py
  name: compute_score
trainer:
  total_epochs: 15
  save_freq: 20
  test_freq: -1
  n_gpus_per_node: 8
  logger: [console, wandb]
  default_local_dir: runs/verl
  sparkle: 1
";

#[test]
fn yaml_of_verl_is_translated_and_what_is_left_is_named() {
    let (imported, config) = imported("ppo.yaml", VERL);
    let r = &config.reinforcement;
    assert_eq!((r.num_generations, r.prompts_per_generation, config.training.global_batch_size), (5, 256, Some(320)));
    assert_eq!((r.max_completion_length, config.data.max_length), (1024, 1536));
    assert_eq!(
        (r.loss.loss_type, r.loss.epsilon, r.loss.epsilon_high, r.loss.delta),
        (PolicyLossType::Grpo, 0.2, 0.28, 10.0)
    );
    assert_eq!((r.loss.beta, r.loss.kl_estimator, r.loss.entropy_coef), (0.002, KlEstimator::K3, 0.01));
    assert_eq!((r.advantage.estimator, r.advantage.scale_rewards), (AdvantageEstimator::Grpo, ScaleRewards::None));
    assert_eq!((r.dynamic_sampling, r.max_rounds), (true, 10));
    assert_eq!((r.correction.mode, r.correction.max), (CorrectionMode::TokenTruncate, 2.0));
    assert_eq!(names(&r.rewards), [("compute_score", 1.0)]);
    assert_eq!((config.lora.r, config.optimizer.learning_rate, config.optimizer.weight_decay), (32, 1e-6, 0.1));
    assert_eq!((config.training.per_device_train_batch_size, config.training.num_train_epochs), (4, 15.0));
    assert_eq!(config.output_dir, std::path::Path::new("runs/verl"));
    for (line, words) in [
        (47, "`actor_rollout_ref.actor.ulysses_sequence_parallel_size`: a model that draws"),
        (58, "`actor_rollout_ref.rollout.val_kwargs.do_sample`: an evaluation draws the most likely"),
        (62, "`custom_reward_function.path`: write `compute_score.py`"),
        (71, "`trainer.sparkle`: this key is not known"),
    ] {
        expect_note(&imported.refused, "ppo.yaml", line, words);
    }
    assert!(
        imported
            .needless
            .iter()
            .any(|note| note.contains("`actor_rollout_ref.hybrid_engine`: the model that is trained"))
    );
    let left: Vec<_> = imported.problems.iter().filter(|problem| !problem.contains("no file")).collect();
    assert_eq!(left, [""; 0]);
}

#[test]
fn scripts_that_start_verl_are_translated_with_their_variables() {
    let script = "set -x
# The model
MODEL=Qwen/Qwen2.5-Math-7B
max_response_length=$((1024 * 8))
train_file=$HOME/data/dapo.parquet
clip=0.28

python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=rloo \\
    data.train_files=\"$train_file\" \\
    data.train_batch_size=64 \\
    data.max_response_length=2048 \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.clip_ratio_high=${clip} \\
    actor_rollout_ref.rollout.n=4 \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=512 \\
    reward_model.reward_manager=dapo \\
    'trainer.logger=[\"console\",\"wandb\"]' \\
    trainer.unheard_of=3 \\
    trainer.total_training_steps=100 $@
";
    let (imported, config) = imported("run_dapo.sh", script);
    let r = &config.reinforcement;
    assert_eq!((r.num_generations, r.prompts_per_generation, config.training.global_batch_size), (4, 0, Some(256)));
    assert_eq!((config.model.path.to_str(), config.training.max_steps), (Some("Qwen/Qwen2.5-Math-7B"), Some(100)));
    assert_eq!((r.advantage.estimator, r.advantage.scale_rewards), (AdvantageEstimator::Rloo, ScaleRewards::None));
    assert_eq!((r.loss.epsilon_high, r.loss.delta), (0.28, 3.0), "verl always has a bound of 3");
    assert_eq!(names(&r.rewards), [("", 1.0), ("", 1.0)]);
    assert!(matches!(&r.rewards[0].kind, RewardKind::Math(math) if math.answer == "reward_model.ground_truth"));
    assert_eq!(config.data.train_files, [std::path::Path::new("$HOME/data/dapo.parquet")]);
    expect_note(&imported.refused, "run_dapo.sh", 21, "`trainer.unheard_of`: this key is not known");
    assert!(imported.refused.iter().any(|note| note.contains("verl chooses its rule by the column `data_source`")));
}

/// PPO is the default of verl. Its value model becomes the value head of the policy, and its reward model runs beside the policy.
#[test]
fn ppo_of_verl_has_a_value_head_and_a_reward_model() {
    let text = "actor_rollout_ref:\n  model:\n    path: m\nalgorithm:\n  gamma: 0.99\n  lam: 0.95\ncritic:\n  cliprange_value: 0.2\n  optim:\n    lr: 1e-5\nreward_model:\n  enable: true\n  model:\n    path: runs/reward\n";
    let (imported, config) = imported("ppo.yaml", text);
    let r = &config.reinforcement;
    assert_eq!(r.advantage.estimator, AdvantageEstimator::Gae);
    assert_eq!((r.advantage.gamma, r.advantage.lambda, r.loss.cliprange_value), (0.99, 0.95, 0.2));
    assert!(
        matches!(&r.rewards[..], [RewardSpec { kind: RewardKind::Model(model), .. }] if model.path.ends_with("reward"))
    );
    assert!(
        imported.needless.iter().any(|note| note.contains("`critic.optim.lr`: the value head is a part of the policy"))
    );
}

const NEMO: &str = "grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 16
  max_rollout_turns: 1
  max_num_epochs: 1
  max_num_steps: 400
  normalize_rewards: true
  use_leave_one_out_baseline: true
  val_period: 10
  val_at_start: false
  overlong_filtering: true
  max_val_samples: 256
  val_batch_size: 256
  seed: 42
  use_dynamic_sampling: false
  reward_shaping:
    enabled: true
    overlong_buffer_length: 128
    overlong_buffer_penalty: 0.5
    max_response_length: ${policy.max_total_sequence_length}
  async_grpo:
    enabled: false
    max_trajectory_age_steps: 1
loss_fn:
  reference_policy_kl_penalty: 0.01
  reference_policy_kl_type: k3
  ratio_clip_min: 0.2
  ratio_clip_max: 0.28
  ratio_clip_c: null
  use_on_policy_kl_approximation: false
  use_importance_sampling_correction: true
  truncated_importance_sampling_ratio: 5.0
  truncated_importance_sampling_ratio_min: 0.5
  truncated_importance_sampling_type: icepop
  sequence_level_importance_ratios: false
  token_level_loss: true
checkpointing:
  enabled: true
  checkpoint_dir: results/grpo
  metric_name: val:accuracy
  higher_is_better: true
  keep_top_k: 3
  save_period: 10
policy:
  model_name: Qwen/Qwen2.5-1.5B
  tokenizer:
    name: ${policy.model_name}
    chat_template_kwargs: null
  train_global_batch_size: 512
  train_micro_batch_size: 4
  logprob_batch_size: 4
  max_total_sequence_length: 512
  precision: bfloat16
  dtensor_cfg:
    enabled: true
    tensor_parallel_size: 2
    activation_checkpointing: true
    lora_cfg:
      enabled: true
      dim: 8
      alpha: 32
      target_modules: []
  megatron_cfg:
    enabled: false
    optimizer:
      lr: 5.0e-6
  sequence_packing:
    enabled: true
  max_grad_norm: 1.0
  optimizer:
    name: torch.optim.AdamW
    kwargs:
      lr: 5.0e-6
      weight_decay: 0.01
      betas: [0.9, 0.999]
      eps: 1e-8
      foreach: false
  scheduler:
    - name: torch.optim.lr_scheduler.LinearLR
      kwargs:
        start_factor: 0.1
        end_factor: 1.0
        total_iters: 50
    - name: torch.optim.lr_scheduler.ConstantLR
      kwargs:
        factor: 1.0
        total_iters: 10000000000
    - milestones: [50]
  generation:
    backend: vllm
    max_new_tokens: ${policy.max_total_sequence_length}
    temperature: 1.0
    top_p: 1.0
    top_k: null
    min_p: 0.1
    vllm_cfg:
      gpu_memory_utilization: 0.6
data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  shuffle: true
  num_workers: 1
  train:
    dataset_name: OpenMathInstruct-2
    split_validation_size: 0.05
  default:
    prompt_file: examples/prompts/cot.txt
env:
  math:
    num_workers: 8
logger:
  wandb_enabled: false
cluster:
  gpus_per_node: 8
  num_nodes: 1
  violin: 2
unheard: 1
";

#[test]
fn yaml_of_nemo_rl_is_translated_and_what_is_left_is_named() {
    let (imported, config) = imported("grpo_math.yaml", NEMO);
    let r = &config.reinforcement;
    assert_eq!((r.num_generations, r.prompts_per_generation, config.training.global_batch_size), (16, 0, Some(512)));
    assert_eq!((r.max_completion_length, config.data.max_length, r.mask_truncated_completions), (256, 512, true));
    assert_eq!((r.advantage.estimator, r.advantage.scale_rewards), (AdvantageEstimator::Rloo, ScaleRewards::Group));
    assert_eq!((r.loss.loss_type, r.loss.epsilon_high, r.loss.delta), (PolicyLossType::Dapo, 0.28, 0.0));
    assert_eq!((r.loss.beta, r.loss.kl_estimator), (0.01, KlEstimator::WeightedK3));
    assert_eq!((r.correction.mode, r.correction.min, r.correction.max), (CorrectionMode::TokenMask, 0.5, 5.0));
    assert_eq!(names(&r.rewards), [("", 1.0), ("", 0.5)]);
    assert_eq!((config.lora.r, config.lora.lora_alpha), (8, 32.0));
    assert_eq!((config.optimizer.learning_rate, config.training.max_steps), (5e-6, Some(400)));
    assert_eq!(config.lr_scheduler.warmup_steps, crate::Warmup::Steps(50));
    for words in [
        "`grpo.normalize_rewards`: the standard deviation is the group's here",
        "`policy.generation.max_new_tokens`: prompt and completion have 512 tokens together",
        "`policy.dtensor_cfg.tensor_parallel_size`: a model that draws completions is whole",
        "`checkpointing.metric_name`: ",
        "`checkpointing.keep_top_k`: ",
        "`data.train.dataset_name`: data sets are not downloaded",
        "`data.default.prompt_file`: write the whole prompt",
        "`env.math`: the reward `math` reads the right answer from the column `answer`",
        "`policy.generation.min_p`: this key is not known",
        "`unheard`: this key is not known",
    ] {
        assert!(imported.refused.iter().any(|note| note.contains(words)), "{words} in {:#?}", imported.refused);
    }
    let left: Vec<_> = imported.problems.iter().filter(|problem| !problem.contains("train_files")).collect();
    assert_eq!(left, [""; 0], "{}", imported.toml);
    let sequences =
        NEMO.replace("token_level_loss: true", "token_level_loss: true\n  use_cispo: true\n  disable_ppo_ratio: true");
    assert!(objective(&sequences).contains("this combination"));
}
