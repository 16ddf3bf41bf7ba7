//! The configuration of verl's `main_ppo`: a YAML file of Hydra, or the overrides of a command.

use super::reader::{DEFAULT_LENGTH, Dialect, LOGGED, ONE, RANKS, Reader, SAMPLER, WHOLE, set_lengths};
use super::rewards::{self, table as reward};
use crate::words::Answer::{As, Never, Nothing};
use crate::words::Meaning::{Is, Needless, Not, Only, Values};
use crate::words::Row;
use serde_json::Value as Json;
use toml::Value;

pub(super) const DIALECT: Dialect = Dialect {
    rows: ROWS,
    prefix: "",
    is_open: false,
    together,
    defaults: &[
        ("optimizer.learning_rate", "1e-6"),
        ("optimizer.weight_decay", "0.01"),
        ("optimizer.beta2", "0.999"),
        ("lr_scheduler.type", "\"constant\""),
        ("lr_scheduler.warmup_steps", "0"),
        ("training.num_train_epochs", "30.0"),
        ("data.val_set_size", "0.0"),
        ("memory.recompute", "\"full\""),
        ("reinforcement.loss.delta", "3.0"),
    ],
};

const ROWS: &[Row] = &[
    // The model.
    ("actor_rollout_ref.model.path", Is("model.path")),
    ("actor_rollout_ref.model.tokenizer_path", Is("model.tokenizer")),
    ("actor_rollout_ref.model.lora_rank", Is("lora.r")),
    ("actor_rollout_ref.model.lora_alpha", Is("lora.lora_alpha")),
    ("actor_rollout_ref.model.target_modules", Is("lora.target_modules")),
    ("actor_rollout_ref.model.exclude_modules", Is("lora.exclude_modules")),
    ("actor_rollout_ref.model.lora_adapter_path", Not("a run starts new adapters, or resumes its own")),
    (
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        Values("memory.recompute", &[("true", As("\"full\"")), ("false", As("\"none\""))]),
    ),
    ("actor_rollout_ref.model.trust_remote_code", Only(&["false"], "no code of a model folder is run")),
    ("actor_rollout_ref.model.override_config*", Only(&["{}"], "change config.json in the model folder")),
    ("actor_rollout_ref.model.custom_chat_template", Not("write `chat_template` under [data.chat]")),
    ("actor_rollout_ref.model.external_lib", Not("no Python is loaded")),
    ("actor_rollout_ref.model.use_remove_padding", Needless(KERNELS)),
    ("actor_rollout_ref.model.use_liger", Needless(KERNELS)),
    ("actor_rollout_ref.model.use_fused_kernels", Needless(KERNELS)),
    ("actor_rollout_ref.model.fused_kernel_options*", Needless(KERNELS)),
    ("actor_rollout_ref.model.tiled_mlp*", Needless(KERNELS)),
    ("actor_rollout_ref.model.enable_activation_offload", Needless(KERNELS)),
    ("actor_rollout_ref.model.use_shm", Needless("config.json and weights are read from the model folder")),
    ("actor_rollout_ref.model.hf_config_path", Needless("config.json and weights are read from the model folder")),
    ("actor_rollout_ref.hybrid_engine", Needless(SAMPLER)),
    ("actor_rollout_ref.nccl_timeout", Is("parallel.communication.collective_timeout")),
    // The policy.
    ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", Is("training.per_device_train_batch_size")),
    ("actor_rollout_ref.actor.ppo_micro_batch_size", Not("write `per_device_train_batch_size` under [training]")),
    (
        "actor_rollout_ref.actor.use_dynamic_bsz",
        Only(
            &["false"],
            "a micro-batch has `per_device_train_batch_size` rows of `max_length` tokens; `ottava plan` finds the largest that fits",
        ),
    ),
    ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", Needless("only `use_dynamic_bsz` reads it")),
    ("actor_rollout_ref.actor.ppo_epochs", Is("reinforcement.num_iterations")),
    ("actor_rollout_ref.actor.shuffle", Only(&["false"], "steps use completions in the order of their prompts")),
    ("actor_rollout_ref.actor.grad_clip", Is("training.max_grad_norm")),
    ("actor_rollout_ref.actor.optim.clip_grad", Is("training.max_grad_norm")),
    ("actor_rollout_ref.actor.clip_ratio_high", Is("reinforcement.loss.epsilon_high")),
    ("actor_rollout_ref.actor.clip_ratio_c", Is("reinforcement.loss.delta")),
    ("actor_rollout_ref.actor.entropy_coeff", Is("reinforcement.loss.entropy_coef")),
    ("actor_rollout_ref.actor.entropy_*", Needless(KERNELS)),
    ("actor_rollout_ref.actor.calculate_entropy", Needless("the entropy is always logged")),
    ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", Only(ONE, WHOLE_MODEL)),
    ("actor_rollout_ref.actor.megatron.*", Not(WHOLE_MODEL)),
    (
        "actor_rollout_ref.actor.fsdp_config.param_offload",
        Only(&["false"], "write `offload_parameters` under [memory]"),
    ),
    (
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
        Values("memory.offload_optimizer", &[("true", As("\"auto\"")), ("false", Nothing)]),
    ),
    ("actor_rollout_ref.actor.optim.lr", Is("optimizer.learning_rate")),
    ("actor_rollout_ref.actor.optim.weight_decay", Is("optimizer.weight_decay")),
    ("actor_rollout_ref.actor.optim.lr_warmup_steps", Values(WARMUP, &[("-1", Nothing), ("0", Nothing)])),
    ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", Values(WARMUP, &[("0", Nothing), ("0.0", Nothing)])),
    ("actor_rollout_ref.actor.optim.lr_scheduler_type", Is("lr_scheduler.type")),
    ("actor_rollout_ref.actor.optim.warmup_style", Is("lr_scheduler.type")),
    (
        "actor_rollout_ref.actor.optim.min_lr_ratio",
        Only(&["0", "0.0"], "write `min_learning_rate` under [lr_scheduler]"),
    ),
    ("actor_rollout_ref.actor.optim.total_training_steps", Needless("the schedule ends with the run")),
    ("actor_rollout_ref.actor.optim.num_cycles", Needless("half a cosine is the schedule \"cosine\"")),
    ("actor_rollout_ref.actor.optim.optimizer", Only(&["AdamW"], "write `name` under [optimizer]")),
    ("actor_rollout_ref.actor.optim.optimizer_impl", Needless("AdamW has no further settings")),
    ("actor_rollout_ref.actor.optim.zero_indexed_step", Needless("AdamW has no further settings")),
    ("actor_rollout_ref.actor.policy_loss.*", Not("only losses that are not implemented read it")),
    ("actor_rollout_ref.actor.strategy", Needless(FSDP)),
    ("actor_rollout_ref.actor.fsdp_config.*", Needless(FSDP)),
    ("actor_rollout_ref.actor.use_torch_compile", Needless(KERNELS)),
    ("actor_rollout_ref.actor.use_fused_kernels", Needless(KERNELS)),
    ("actor_rollout_ref.actor.use_remove_padding", Needless(KERNELS)),
    ("actor_rollout_ref.actor.use_prefix_grouper", Needless(KERNELS)),
    ("actor_rollout_ref.actor.ppo_infer_*", Needless(SAMPLER)),
    ("actor_rollout_ref.actor.rollout_n", Needless(SAMPLER)),
    ("actor_rollout_ref.actor.load_weight", Needless(SAMPLER)),
    ("actor_rollout_ref.actor.data_loader_seed", Needless(SAMPLER)),
    ("actor_rollout_ref.actor.profiler.*", Needless(LOGGED)),
    ("actor_rollout_ref.actor.checkpoint.*", Needless(LOGGED)),
    (
        "actor_rollout_ref.ref.*",
        Needless(
            "the reference model is the model without its adapters, or the model of the start in the recipe of the run",
        ),
    ),
    // The sampler.
    ("actor_rollout_ref.rollout.n", Is("reinforcement.num_generations")),
    ("actor_rollout_ref.rollout.temperature", Is("reinforcement.sampling.temperature")),
    ("actor_rollout_ref.rollout.top_p", Only(ONE, WHOLE)),
    ("actor_rollout_ref.rollout.top_k", Only(&["-1", "0"], WHOLE)),
    ("actor_rollout_ref.rollout.repetition_penalty", Only(ONE, WHOLE)),
    ("actor_rollout_ref.rollout.do_sample", Only(&["true"], WHOLE)),
    ("actor_rollout_ref.rollout.val_kwargs.n", Only(ONE, GREEDY)),
    ("actor_rollout_ref.rollout.val_kwargs.do_sample", Only(&["false"], GREEDY)),
    ("actor_rollout_ref.rollout.val_kwargs.*", Needless(GREEDY)),
    ("actor_rollout_ref.rollout.multi_turn.enable", Only(&["false"], TURNS)),
    ("actor_rollout_ref.rollout.multi_turn*", Needless("only `multi_turn.enable` reads it")),
    ("actor_rollout_ref.rollout.agent.*", Only(NO_AGENTS, TURNS)),
    ("actor_rollout_ref.rollout.ignore_eos", Only(&["false"], WHOLE)),
    ("actor_rollout_ref.rollout.name", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.mode", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.dtype", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.load_format", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.quantization*", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.gpu_memory_utilization", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.tensor_model_parallel_size", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.data_parallel_size", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.expert_parallel_size", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.pipeline_model_parallel_size", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.max_num_batched_tokens", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.max_num_seqs", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.max_model_len", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.enforce_eager", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.cudagraph_capture_sizes", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.free_cache_engine", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.enable_chunked_prefill", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.enable_prefix_caching", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.prompt_length", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.response_length", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.log_prob_*", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.calculate_log_probs", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.logprobs_mode", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.disable_log_stats", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.engine_kwargs*", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.layered_summon", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.update_weights_*", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.checkpoint_engine*", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.multi_stage_wake_up", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.scheduling_policy", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.nnodes", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.n_gpus_per_node", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.server*", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.trace*", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.skip_*", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.profiler*", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.prometheus*", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.over_sample_rate", Needless(SAMPLER)),
    ("actor_rollout_ref.rollout.limit_images", Needless(SAMPLER)),
    // Advantages.
    ("algorithm.gamma", Is("reinforcement.advantage.gamma")),
    ("algorithm.lam", Is("reinforcement.advantage.lambda")),
    ("algorithm.kl_ctrl.*", Needless("only `use_kl_in_reward` reads it")),
    ("algorithm.kl_penalty", Needless("only `use_kl_in_reward` reads it")),
    ("algorithm.use_pf_ppo", Only(&["false"], "completions are not drawn again by their rewards")),
    ("algorithm.pf_ppo*", Needless("only `use_pf_ppo` reads it")),
    ("algorithm.filter_groups.enable", Is("reinforcement.sampling.dynamic_sampling")),
    ("algorithm.filter_groups.metric", Needless("groups whose rewards are all equal are replaced")),
    (
        "algorithm.filter_groups.max_num_gen_batches",
        Values("reinforcement.sampling.max_rounds", &[("0", Never("rounds have a limit; it is 10 by default"))]),
    ),
    ("algorithm.rollout_correction.rollout_is_batch_normalize", Only(&["false"], "factors are not normalised")),
    ("algorithm.rollout_correction.bypass_mode", Needless("`mode = \"none\"` under [reinforcement.correction]")),
    (
        "algorithm.rollout_correction.*",
        Only(NONE_OR_NULL, "factors of tokens are bounded by `min` and `max` under [reinforcement.correction]"),
    ),
    // Data.
    ("data.reward_fn_key", Needless("rewards read all fields of a record")),
    ("data.val_batch_size", Needless("an evaluation reads the whole validation set")),
    ("data.shuffle", Only(&["true"], "prompts are shuffled in every epoch, by `seed`")),
    ("data.seed", Is("seed")),
    ("data.filter_overlong_prompts*", Needless(LONG)),
    ("data.truncation", Needless(LONG)),
    ("data.train_max_samples", Only(&["-1"], "`max_steps` under [training] ends a run")),
    ("data.val_max_samples", Only(&["-1"], "`val_set_size` under [data] is the size of a validation set")),
    ("data.trust_remote_code", Only(&["false"], "no code of a model folder is run")),
    ("data.tokenizer", Is("model.tokenizer")),
    ("data.custom_cls.*", Only(NONE_OR_NULL, "no Python is loaded; write the prompts to a file first")),
    ("data.sampler.*", Only(NONE_OR_NULL, "no Python is loaded; prompts are shuffled by `seed`")),
    ("data.datagen.*", Only(NONE_OR_NULL, "no Python is loaded; write the prompts to a file first")),
    ("data.apply_chat_template_kwargs*", Only(&["{}"], "write `chat_template_kwargs` under [data.chat]")),
    ("data.tool_config_path", Only(NONE_OR_NULL, TURNS)),
    ("data.image_key", Needless(TEXT_ONLY)),
    ("data.video_key", Needless(TEXT_ONLY)),
    ("data.return_raw_input_ids", Needless("files are read once, and their tokens cached on disk")),
    ("data.return_raw_chat", Needless("files are read once, and their tokens cached on disk")),
    ("data.return_full_prompt", Needless("files are read once, and their tokens cached on disk")),
    ("data.return_multi_modal_inputs", Needless("files are read once, and their tokens cached on disk")),
    ("data.dataloader_num_workers", Needless("files are read once, and their tokens cached on disk")),
    ("data.use_shm", Needless("files are read once, and their tokens cached on disk")),
    ("data.filter_overlong_prompts_workers", Needless("files are read once, and their tokens cached on disk")),
    // Rewards.
    ("reward_model.*", Needless("only `reward_model.enable` reads it")),
    ("reward.reward_model.*", Needless("rewards are tables of [[reinforcement.rewards]]")),
    ("reward.num_workers", Needless("rewards are tables of [[reinforcement.rewards]]")),
    ("reward.reward_manager.*", Needless("rewards are tables of [[reinforcement.rewards]]")),
    ("reward.reward_kwargs.*", Needless("rewards are tables of [[reinforcement.rewards]]")),
    ("reward.sandbox_fusion.*", Needless("rewards are tables of [[reinforcement.rewards]]")),
    ("reward.custom_reward_function.*", Needless("rewards are tables of [[reinforcement.rewards]]")),
    ("custom_reward_function.*", Needless("rewards are tables of [[reinforcement.rewards]]")),
    // The run.
    ("trainer.total_epochs", Is("training.num_train_epochs")),
    ("trainer.total_training_steps", Is("training.max_steps")),
    ("trainer.save_freq", Values("checkpoint.save_steps", AT_THE_END)),
    ("trainer.test_freq", Values("evaluation.eval_steps", AT_THE_END)),
    ("trainer.val_before_train", Needless("every run evaluates at its start")),
    ("trainer.val_only", Only(&["false"], "`ottava eval` evaluates a model")),
    ("trainer.default_local_dir", Is("output_dir")),
    ("trainer.max_actor_ckpt_to_keep", Is("checkpoint.save_total_limit")),
    ("trainer.critic_warmup", Only(&["0"], "the value head and the policy are one model, which is trained as a whole")),
    ("trainer.nnodes", Needless(RANKS)),
    ("trainer.n_gpus_per_node", Needless(RANKS)),
    ("trainer.resume_*", Needless("`ottava train RUN.toml --resume` resumes a run")),
    ("trainer.logger", Needless(LOGGED)),
    ("trainer.project_name", Needless(LOGGED)),
    ("trainer.experiment_name", Needless(LOGGED)),
    ("trainer.log_val_generations", Needless(LOGGED)),
    ("trainer.rollout_data_dir", Needless(LOGGED)),
    ("trainer.validation_data_dir", Needless(LOGGED)),
    ("trainer.profile_steps", Needless(LOGGED)),
    ("trainer.controller_nsight_options*", Needless(LOGGED)),
    ("trainer.worker_nsight_options*", Needless(LOGGED)),
    ("trainer.balance_batch", Needless(RANKS)),
    ("trainer.device", Needless(RANKS)),
    ("trainer.use_legacy_worker_impl", Needless(RANKS)),
    ("trainer.ray_wait_register_center_timeout", Needless(RANKS)),
    ("trainer.default_hdfs_dir", Needless("checkpoints are folders of Hugging Face with the state for `--resume`")),
    (
        "trainer.del_local_ckpt_after_load",
        Needless("checkpoints are folders of Hugging Face with the state for `--resume`"),
    ),
    (
        "trainer.max_critic_ckpt_to_keep",
        Needless("checkpoints are folders of Hugging Face with the state for `--resume`"),
    ),
    ("trainer.esi_redundant_time", Needless("checkpoints are folders of Hugging Face with the state for `--resume`")),
    ("critic.cliprange_value", Is("reinforcement.loss.cliprange_value")),
    ("critic.*", Needless("the value head is a part of the policy, with its optimizer and its batches")),
    ("ray_*", Needless(RANKS)),
    ("global_profiler*", Needless(LOGGED)),
    ("transfer_queue*", Needless(RANKS)),
];

const WARMUP: &str = "lr_scheduler.warmup_steps";
const KERNELS: &str = "kernels are always fused, and padding costs no products";
const FSDP: &str = "`zero` under [parallel] divides gradients and optimizer states among GPUs";
const GREEDY: &str = "an evaluation draws the most likely completion of each prompt";
const TURNS: &str = "an environment plays turns: name its program under [reinforcement.environment]";
const TEXT_ONLY: &str = "models read text only";
const LONG: &str = "prompts that are too long are left out, and counted in the log";
const WHOLE_MODEL: &str = "a model that draws completions is whole on each rank";
const NO_AGENTS: &[&str] = &["8", "single_turn_agent"];
const NONE_OR_NULL: &[&str] = &["", "null", "false"];
const AT_THE_END: &[(&str, crate::words::Answer)] = &[("-1", As("\"end\"")), ("0", As("\"end\""))];

fn together(reader: &mut Reader) {
    read_files(reader);
    read_batches(reader);
    read_advantage(reader);
    read_loss(reader);
    read_divergence(reader);
    read_correction(reader);
    read_rewards(reader);
    if let Some(Json::Array(betas)) = reader.take("actor_rollout_ref.actor.optim.betas") {
        for (ours, beta) in
            ["optimizer.beta1", "optimizer.beta2"].into_iter().zip(betas.iter().filter_map(Json::as_f64))
        {
            reader.set("actor_rollout_ref.actor.optim.betas", ours, beta);
        }
    }
}

fn read_files(reader: &mut Reader) {
    for (path, ours) in [("data.train_files", "data.train_files"), ("data.val_files", "data.val_files")] {
        let files = match reader.take(path) {
            Some(Json::Array(files)) => {
                files.iter().filter_map(Json::as_str).map(|file| Value::String(file.into())).collect()
            }
            Some(Json::String(file)) => vec![Value::String(file)],
            _ => continue,
        };
        reader.set(path, ours, Value::Array(files));
    }
    let key = reader.text("data.prompt_key").filter(|key| key != "prompt");
    if let Some(key) = key {
        reader.set(
            "data.prompt_key",
            "data.records.fields",
            toml::Table::from_iter([("prompt".to_string(), key.into())]),
        );
    }
    let (prompt, completion) = (reader.count("data.max_prompt_length"), reader.count("data.max_response_length"));
    let completion = completion.unwrap_or(DEFAULT_LENGTH);
    reader.set("data.max_response_length", "reinforcement.max_completion_length", completion as i64);
    set_lengths(reader, "data.max_prompt_length", prompt, Some(completion));
}

/// verl counts prompts, and Ottava completions.
fn read_batches(reader: &mut Reader) {
    let group = reader.value_of("actor_rollout_ref.rollout.n").and_then(Json::as_u64).unwrap_or(1);
    let prompts = reader.count("data.train_batch_size").unwrap_or(1024);
    let of_step = reader.count("actor_rollout_ref.actor.ppo_mini_batch_size").unwrap_or(256).min(prompts);
    if prompts != of_step {
        reader.set("data.train_batch_size", "reinforcement.prompts_per_generation", prompts as i64);
    }
    let comment = format!("{of_step} prompts of `ppo_mini_batch_size` with {group} completions");
    let path = "actor_rollout_ref.actor.ppo_mini_batch_size";
    reader.set_noted(path, "training.global_batch_size", (of_step * group) as i64, &comment);
}

fn read_advantage(reader: &mut Reader) {
    let name = reader.text("algorithm.adv_estimator").unwrap_or_else(|| "gae".into());
    let divides = reader.flag("algorithm.norm_adv_by_std_in_grpo").unwrap_or(true);
    let (estimator, scale) = match name.as_str() {
        "grpo" if divides => return,
        "grpo" => (None, "none"),
        "rloo" => (Some("rloo"), "none"),
        "reinforce_plus_plus" | "gae" => {
            return reader.set("algorithm.adv_estimator", "reinforcement.advantage.estimator", name);
        }
        _ => {
            let reason = format!(
                "`{name}` is none of grpo, rloo, reinforce_plus_plus and gae (`estimator` under [reinforcement.advantage])"
            );
            return reader.refuse_objective("algorithm.adv_estimator", reason);
        }
    };
    if let Some(estimator) = estimator {
        reader.set("algorithm.adv_estimator", "reinforcement.advantage.estimator", estimator);
    }
    reader.set("algorithm.norm_adv_by_std_in_grpo", "reinforcement.advantage.scale_rewards", scale);
}

fn read_loss(reader: &mut Reader) {
    let (mode_key, mean_key) =
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "actor_rollout_ref.actor.loss_agg_mode");
    let mode = reader.text(mode_key).unwrap_or_else(|| "vanilla".into());
    let mean = reader.text(mean_key).unwrap_or_else(|| "token-mean".into());
    // A constant of its own for the sums of tokens.
    let constant = reader.take("actor_rollout_ref.actor.loss_scale_factor");
    let loss = match (mode.as_str(), mean.as_str()) {
        ("vanilla", "token-mean") => "dapo",
        ("vanilla", "seq-mean-token-mean") => "grpo",
        ("vanilla", "seq-mean-token-sum-norm") => "dr_grpo",
        ("gspo", "seq-mean-token-mean") => "gspo",
        ("cispo", "token-mean") => "cispo",
        ("vanilla" | "gspo" | "cispo", _) => {
            let reason = format!(
                "`{mode}` with this mean over tokens is not implemented; docs/reinforcement.md lists losses with their means"
            );
            return reader.refuse_objective(mean_key, reason);
        }
        _ => return reader.refuse_objective(mode_key, format!("`{mode}` is none of vanilla, gspo and cispo")),
    };
    if loss != "dapo" {
        reader.set(mode_key, "reinforcement.loss.loss_type", loss);
    }
    if loss == "dr_grpo" && constant.is_some() {
        reader.refuse("actor_rollout_ref.actor.loss_scale_factor", "sums are divided by `max_completion_length`");
    }
    // `clip_ratio_low` replaces `clip_ratio` below 1.
    let paths = ["actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio"];
    let both = paths.map(|path| (path, reader.number(path)));
    if let Some((path, low)) = both.into_iter().find_map(|(path, low)| Some((path, low?))) {
        reader.set(path, "reinforcement.loss.epsilon", low);
    }
}

fn read_divergence(reader: &mut Reader) {
    const USE: &str = "actor_rollout_ref.actor.use_kl_loss";
    const FACTOR: &str = "actor_rollout_ref.actor.kl_loss_coef";
    const TYPE: &str = "actor_rollout_ref.actor.kl_loss_type";
    let (is_on, factor, kind) = (reader.flag(USE), reader.number(FACTOR), reader.text(TYPE));
    if reader.flag("algorithm.use_kl_in_reward") == Some(true) {
        let reason = "the divergence is a part of the loss, not of the reward: write `beta` under [reinforcement.loss]";
        reader.refuse("algorithm.use_kl_in_reward", reason);
    }
    if is_on != Some(true) {
        return;
    }
    reader.set(FACTOR, "reinforcement.loss.beta", factor.unwrap_or(0.001));
    match kind.as_deref().unwrap_or("low_var_kl") {
        "kl" | "k1" => reader.set(TYPE, "reinforcement.loss.kl_estimator", "k1"),
        "mse" | "k2" | "k3+" | "low_var_kl+" => reader.set(TYPE, "reinforcement.loss.kl_estimator", "k2"),
        "low_var_kl" | "k3" => reader.set(TYPE, "reinforcement.loss.kl_estimator", "k3"),
        other => reader.refuse(TYPE, format!("`{other}` is none of k1, k2 and k3")),
    }
}

fn read_correction(reader: &mut Reader) {
    const MODE: &str = "algorithm.rollout_correction.rollout_is";
    const MAX: &str = "algorithm.rollout_correction.rollout_is_threshold";
    let (mode, max) = (reader.text(MODE), reader.number(MAX).unwrap_or(2.0));
    let ours = match mode.as_deref() {
        None | Some("null") => return,
        Some("token") => "token_truncate",
        Some("sequence") => "sequence_truncate",
        Some(other) => return reader.refuse(MODE, format!("`{other}` is none of token and sequence")),
    };
    reader.set(MODE, "reinforcement.correction.mode", ours);
    reader.set(MAX, "reinforcement.correction.max", max);
}

fn read_rewards(reader: &mut Reader) {
    let paths = ["custom_reward_function.path", "reward.custom_reward_function.path"];
    let names = ["custom_reward_function.name", "reward.custom_reward_function.name"];
    let path = reader.take_one(&paths).filter(|(_, path)| path.as_str() != Some("null"));
    let name = reader.take_one(&names).and_then(|(_, name)| name.as_str().map(str::to_string));
    match path {
        Some((key, file)) => {
            let name = name.unwrap_or_else(|| "compute_score".into());
            let call = format!(
                "`{name}(data_source, solution_str, ground_truth, extra_info)` of {file}, whose arguments are columns of the record"
            );
            reader.refuse(key, rewards::how_to_write(&name, &call));
            reader.rewards.push(rewards::python(&name));
        }
        None if read_model(reader) => {}
        None => read_rule(reader),
    }
    let is_shaped =
        ["reward_model.reward_manager", "reward.reward_manager.name"].iter().any(|key| reader.is(key, "dapo"));
    for prefix in ["reward_model.reward_kwargs.", "reward.reward_kwargs.", "reward_model."] {
        let of = |name: &str| {
            format!("{prefix}overlong_buffer_cfg.{name}")
                .replace("reward_model.overlong_buffer_cfg", "reward_model.overlong_buffer")
        };
        if reader.flag(&of("enable")) != Some(true) {
            continue;
        }
        let buffer = reader.count(&of("len")).unwrap_or(4096);
        let factor = reader.number(&of("penalty_factor")).unwrap_or(1.0);
        let longest = reader.value_of("data.max_response_length").and_then(Json::as_u64).unwrap_or(DEFAULT_LENGTH);
        match is_shaped {
            true => reader.rewards.push(rewards::overlong(longest, buffer, factor)),
            false => reader.refuse(&of("enable"), "only the reward manager `dapo` reads it"),
        }
        break;
    }
}

/// The reward model, if the file enables one. Returns whether it does.
fn read_model(reader: &mut Reader) -> bool {
    let flags = ["reward_model.enable", "reward.reward_model.enable"].map(|path| reader.flag(path));
    if !flags.contains(&Some(true)) {
        return false;
    }
    let paths = ["reward_model.model.path", "reward.reward_model.model_path", "reward.reward_model.model.path"];
    match reader.take_one(&paths).and_then(|(_, path)| path.as_str().map(str::to_string)) {
        Some(path) => reader.rewards.push(rewards::model(&path)),
        None => return false,
    }
    true
}

/// The rule of verl for the data of a file, which is in the column `data_source` of each record.
fn read_rule(reader: &mut Reader) {
    let files = reader.value_of("data.train_files").map_or(String::new(), Json::to_string);
    let answer = || ("answer", Value::String("reward_model.ground_truth".into()));
    let (rule, words) = match files.contains("gsm8k") {
        true => {
            (reward("number", [answer(), ("extract", Value::String("after:####".into()))]), "the number after `####`")
        }
        false => (reward("math", [answer()]), "the last `\\boxed{…}`"),
    };
    reader.rewards.push(rule);
    reader.refuse(
        "custom_reward_function",
        format!("verl chooses its rule by the column `data_source`; here the reward reads {words}. Change [[reinforcement.rewards]] for other data"),
    );
}
