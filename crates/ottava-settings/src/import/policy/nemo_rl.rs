//! The YAML files of NeMo-RL's GRPO.

use super::reader::{Dialect, LOGGED, ONE, RANKS, Reader, SAMPLER, WHOLE};
use super::rewards::{self, table as reward};
use crate::words::Answer::As;
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
        ("lr_scheduler.type", "\"constant\""),
        ("lr_scheduler.warmup_steps", "0"),
        ("data.val_set_size", "0.0"),
    ],
};

const ROWS: &[Row] = &[
    (
        "defaults",
        Not("the file that it names is not read; give the whole configuration, which NeMo-RL prints at its start"),
    ),
    // The algorithm.
    ("grpo.num_prompts_per_step", Is("reinforcement.prompts_per_generation")),
    ("grpo.num_generations_per_prompt", Is("reinforcement.num_generations")),
    ("grpo.max_num_steps", Is("training.max_steps")),
    ("grpo.max_num_epochs", Is("training.num_train_epochs")),
    (
        "grpo.max_rollout_turns",
        Only(&["1", "999999"], "an environment plays turns: name its program under [reinforcement.environment]"),
    ),
    ("grpo.overlong_filtering", Is("reinforcement.mask_truncated_completions")),
    ("grpo.use_dynamic_sampling", Is("reinforcement.sampling.dynamic_sampling")),
    ("grpo.dynamic_sampling_max_gen_batches", Is("reinforcement.sampling.max_rounds")),
    (
        "grpo.batch_multiplier",
        Only(ONE, "a generation draws the prompts that it needs, and further ones while groups have equal rewards"),
    ),
    ("grpo.val_period", Values("evaluation.eval_steps", &[("0", As("\"end\"")), ("-1", As("\"end\""))])),
    ("grpo.val_at_start", Needless("every run evaluates at its start")),
    ("grpo.val_at_end", Needless("every run evaluates at its end")),
    ("grpo.max_val_samples", Needless(VALIDATION)),
    ("grpo.val_batch_size", Needless(VALIDATION)),
    ("grpo.seed", Is("seed")),
    ("grpo.reward_scaling.enabled", Only(&["false"], "set `weight` in a table of [[reinforcement.rewards]]")),
    ("grpo.reward_scaling.*", Needless("only `reward_scaling.enabled` reads it")),
    ("grpo.async_grpo.enabled", Only(&["false"], "steps use completions of the newest weights")),
    ("grpo.async_grpo.*", Needless("only `async_grpo.enabled` reads it")),
    ("grpo.seq_logprob_error_threshold", Only(&["null"], "write `mode` and `max` under [reinforcement.correction]")),
    ("grpo.skip_reference_policy_logprobs_calculation", Needless("the reference model runs only if `beta` is above 0")),
    ("grpo.calculate_advantages_on_gpu", Needless("advantages take no time")),
    // The loss.
    ("loss_fn.reference_policy_kl_penalty", Is("reinforcement.loss.beta")),
    ("loss_fn.reference_policy_kl_type", Values("reinforcement.loss.kl_estimator", &[("k3", As("\"weighted_k3\""))])),
    ("loss_fn.ratio_clip_min", Is("reinforcement.loss.epsilon")),
    ("loss_fn.ratio_clip_max", Is("reinforcement.loss.epsilon_high")),
    ("loss_fn.ratio_clip_c", Is("reinforcement.loss.delta")),
    ("loss_fn.use_on_policy_kl_approximation", Needless("the estimator \"weighted_k3\" has the ratio as a factor")),
    ("loss_fn.force_on_policy_ratio", Only(&["false"], "old probabilities come from the draws")),
    (
        "loss_fn.use_kl_in_reward",
        Only(&["false"], "the divergence is a part of the loss: write `beta` under [reinforcement.loss]"),
    ),
    ("loss_fn.kl_input_clamp_value", Needless(CLAMPED)),
    ("loss_fn.kl_output_clamp_value", Needless(CLAMPED)),
    // The policy.
    ("policy.model_name", Is("model.path")),
    ("policy.hf_config_overrides*", Only(&["{}"], "change config.json in the model folder")),
    ("policy.tokenizer.chat_template_kwargs*", Only(&["null"], "write `chat_template_kwargs` under [data.chat]")),
    ("policy.tokenizer.chat_template", Only(&["null", "default"], "write `chat_template` under [data.chat]")),
    ("policy.train_global_batch_size", Is("training.global_batch_size")),
    ("policy.train_micro_batch_size", Is("training.per_device_train_batch_size")),
    ("policy.generation_batch_size", Needless(SAMPLER)),
    ("policy.logprob_batch_size", Needless("log-probabilities come with the draws")),
    ("policy.logprob_chunk_size", Needless("log-probabilities come with the draws")),
    (
        "policy.precision",
        Values(
            "precision.recipe",
            &[("bfloat16", As("\"bf16\"")), ("float32", As("\"fp32\"")), ("float16", As("\"fp16\""))],
        ),
    ),
    ("policy.max_grad_norm", Is("training.max_grad_norm")),
    ("policy.make_sequence_length_divisible_by", Needless("rows have `max_length` tokens")),
    ("policy.dynamic_batching.*", Needless(ROWS_OF)),
    ("policy.sequence_packing.*", Needless(ROWS_OF)),
    ("policy.dtensor_cfg.tensor_parallel_size", Only(ONE, WHOLE_MODEL)),
    ("policy.dtensor_cfg.context_parallel_size", Only(ONE, WHOLE_MODEL)),
    ("policy.dtensor_cfg.expert_parallel_size", Only(ONE, WHOLE_MODEL)),
    (
        "policy.dtensor_cfg.activation_checkpointing",
        Values("memory.recompute", &[("true", As("\"full\"")), ("false", As("\"none\""))]),
    ),
    (
        "policy.dtensor_cfg.cpu_offload",
        Only(&["false"], "write `offload_optimizer` and `offload_parameters` under [memory]"),
    ),
    ("policy.dtensor_cfg.lora_cfg.dropout", Is("lora.lora_dropout")),
    ("policy.dtensor_cfg.lora_cfg.*", Needless("the adapter starts as in PEFT")),
    ("policy.dtensor_cfg.enabled", Needless(FSDP)),
    ("policy.dtensor_cfg._v2", Needless(FSDP)),
    ("policy.dtensor_cfg.sequence_parallel", Needless(FSDP)),
    ("policy.dtensor_cfg.custom_parallel_plan", Needless(FSDP)),
    ("policy.dtensor_cfg.data_parallel_size", Needless(FSDP)),
    ("policy.dtensor_cfg.clear_cache_every_n_steps", Needless(FSDP)),
    ("policy.dtensor_cfg.env_vars*", Needless(FSDP)),
    ("policy.dtensor_cfg.automodel_kwargs*", Needless(FSDP)),
    ("policy.megatron_cfg.enabled", Only(&["false"], WHOLE_MODEL)),
    ("policy.megatron_cfg.*", Needless("only `megatron_cfg.enabled` reads it")),
    ("policy.optimizer.name", Values("optimizer.name", &[("torch.optim.AdamW", As("\"adamw\""))])),
    ("policy.optimizer.kwargs.lr", Is("optimizer.learning_rate")),
    ("policy.optimizer.kwargs.weight_decay", Is("optimizer.weight_decay")),
    ("policy.optimizer.kwargs.eps", Is("optimizer.eps")),
    ("policy.optimizer.kwargs.foreach", Needless("updates are fused")),
    ("policy.optimizer.kwargs.fused", Needless("updates are fused")),
    ("policy.generation.temperature", Is("reinforcement.sampling.temperature")),
    ("policy.generation.top_p", Only(ONE, WHOLE)),
    ("policy.generation.top_k", Only(&["null", "-1"], WHOLE)),
    ("policy.generation.stop_token_ids", Only(&["null"], STOPS)),
    ("policy.generation.stop_strings", Only(&["null"], STOPS)),
    ("policy.generation.backend", Needless(SAMPLER)),
    ("policy.generation.vllm_cfg.*", Needless(SAMPLER)),
    ("policy.generation.vllm_kwargs*", Needless(SAMPLER)),
    ("policy.generation.sglang_cfg.*", Needless(SAMPLER)),
    ("policy.generation.mcore_generation_config.*", Needless(SAMPLER)),
    ("policy.generation.colocated.*", Needless(SAMPLER)),
    ("policy.generation.port_range*", Needless(SAMPLER)),
    ("policy.generation.num_prompts_per_step", Needless(SAMPLER)),
    ("policy.draft.*", Needless(SAMPLER)),
    // The run.
    ("data.shuffle", Only(&["true"], "prompts are shuffled in every epoch, by `seed`")),
    ("data.max_input_seq_length", Needless("prompts have what completions leave of `max_length`")),
    ("data.num_workers", Needless("tokenizing uses all cores, and batches are read ahead")),
    ("checkpointing.enabled", Only(&["true"], "every run saves its last step")),
    ("checkpointing.checkpoint_dir", Is("output_dir")),
    ("checkpointing.save_period", Is("checkpoint.save_steps")),
    (
        "checkpointing.keep_top_k",
        Not("write `save_total_limit` under [checkpoint], or `load_best_model_at_end` under [evaluation]"),
    ),
    (
        "checkpointing.metric_name",
        Not("write `metric_for_best_model = \"eval_loss\"` under [evaluation]: it is minus the mean reward"),
    ),
    ("checkpointing.higher_is_better", Needless("all metrics of an evaluation are better if they are lower")),
    ("checkpointing.save_optimizer", Only(&["true"], "checkpoints hold the optimizer too, so that every run resumes")),
    (
        "checkpointing.checkpoint_must_save_by",
        Needless("checkpoints are folders of Hugging Face with the state for `--resume`"),
    ),
    (
        "checkpointing.model_save_format",
        Needless("checkpoints are folders of Hugging Face with the state for `--resume`"),
    ),
    (
        "checkpointing.save_consolidated",
        Needless("checkpoints are folders of Hugging Face with the state for `--resume`"),
    ),
    (
        "checkpointing.model_cache_dir",
        Needless("checkpoints are folders of Hugging Face with the state for `--resume`"),
    ),
    ("checkpointing.model_repo_id", Needless("checkpoints are folders of Hugging Face with the state for `--resume`")),
    ("checkpointing.is_peft", Needless("checkpoints are folders of Hugging Face with the state for `--resume`")),
    ("checkpointing.peft_config*", Needless("checkpoints are folders of Hugging Face with the state for `--resume`")),
    ("logger.*", Needless(LOGGED)),
    ("cluster.*", Needless(RANKS)),
];

const FSDP: &str = "`zero` under [parallel] divides gradients and optimizer states among GPUs";
const VALIDATION: &str = "an evaluation reads the whole validation set, `val_set_size` under [data]";
const CLAMPED: &str = "differences of log-probabilities are bounded before they are exponents";
const ROWS_OF: &str = "a row has one prompt and its completion, and padding costs no products of other rows";
const WHOLE_MODEL: &str = "a model that draws completions is whole on each rank";
const STOPS: &str = "completions end at an end-of-sequence token of the tokenizer";

fn together(reader: &mut Reader) {
    read_lengths(reader);
    read_advantage(reader);
    read_loss(reader);
    read_correction(reader);
    read_optimizer(reader);
    read_adapters(reader);
    read_data(reader);
    read_rewards(reader);
    let (model, tokenizer) = (reader.value_of("policy.model_name").cloned(), reader.take("policy.tokenizer.name"));
    if let Some(Json::String(name)) = tokenizer.filter(|name| Some(name) != model.as_ref()) {
        reader.set("policy.tokenizer.name", "model.tokenizer", name);
    }
    // A generation of as many prompts as a step.
    let (prompts, group) =
        (reader.value_of("grpo.num_prompts_per_step"), reader.value_of("grpo.num_generations_per_prompt"));
    let drawn =
        prompts.and_then(Json::as_u64).zip(group.and_then(Json::as_u64)).map(|(prompts, group)| prompts * group);
    if drawn.is_some() && drawn == reader.value_of("policy.train_global_batch_size").and_then(Json::as_u64) {
        reader.take("grpo.num_prompts_per_step");
    }
}

fn read_lengths(reader: &mut Reader) {
    const ALL: &str = "policy.max_total_sequence_length";
    const NEW: &str = "policy.generation.max_new_tokens";
    let (all, new) = (reader.count(ALL), reader.count(NEW));
    if let Some(all) = all {
        reader.set(ALL, "data.max_length", all as i64);
    }
    match (all, new) {
        (Some(all), Some(new)) if new >= all => {
            let half = (all / 2).max(1);
            let reason = format!(
                "prompt and completion have {all} tokens together, and completions of {new} tokens leave none for prompts; completions have {half} here: set \
                 `max_completion_length` under [reinforcement]"
            );
            reader.refuse(NEW, reason);
            reader.set(NEW, "reinforcement.max_completion_length", half as i64);
        }
        (_, Some(new)) => reader.set(NEW, "reinforcement.max_completion_length", new as i64),
        _ => {}
    }
}

fn read_advantage(reader: &mut Reader) {
    const NAME: &str = "grpo.adv_estimator.name";
    let name = reader.text(NAME).unwrap_or_else(|| "grpo".into());
    let either = |reader: &mut Reader, key: &str| {
        let old = reader.flag(&format!("grpo.{key}"));
        reader.flag(&format!("grpo.adv_estimator.{key}")).or(old)
    };
    let divides = either(reader, "normalize_rewards").unwrap_or(true);
    let leaves_out = either(reader, "use_leave_one_out_baseline").unwrap_or(false);
    let minus_baseline = either(reader, "minus_baseline").unwrap_or(false);
    match name.as_str() {
        "grpo" if leaves_out => {
            reader.set("grpo.use_leave_one_out_baseline", "reinforcement.advantage.estimator", "rloo");
            if divides {
                let reason = "the standard deviation is the group's here; NeMo-RL leaves the completion out of it too, so that a single right answer gets a small advantage";
                reader.refuse("grpo.normalize_rewards", reason);
            }
        }
        "grpo" => {}
        "reinforce_plus_plus" => {
            reader.set(NAME, "reinforcement.advantage.estimator", "reinforce_plus_plus");
            if minus_baseline {
                reader.refuse(NAME, "the mean of the group is not subtracted first");
            }
        }
        _ => return reader.refuse_objective(NAME, format!("`{name}` is none of grpo and reinforce_plus_plus")),
    }
    if !divides && name == "grpo" {
        reader.set("grpo.normalize_rewards", "reinforcement.advantage.scale_rewards", "none");
    }
}

fn read_loss(reader: &mut Reader) {
    const TOKENS: &str = "loss_fn.token_level_loss";
    const SEQUENCES: &str = "loss_fn.sequence_level_importance_ratios";
    let of_tokens = reader.flag(TOKENS).unwrap_or(true);
    let of_sequences = reader.flag(SEQUENCES).unwrap_or(false);
    let (is_cispo, is_plain) =
        (reader.flag("loss_fn.use_cispo").unwrap_or(false), reader.flag("loss_fn.disable_ppo_ratio").unwrap_or(false));
    let loss = match (of_tokens, of_sequences, is_cispo, is_plain) {
        (true, false, false, false) => return,
        (false, false, false, false) => "grpo",
        (false, true, false, false) => "gspo",
        (true, false, true, false) => "cispo",
        (true, false, false, true) => "reinforce",
        _ => {
            let reason = "this combination with `token_level_loss`, `use_cispo` and `disable_ppo_ratio` is not implemented; docs/reinforcement.md lists losses with their means";
            return reader.refuse_objective(SEQUENCES, reason);
        }
    };
    reader.set(TOKENS, "reinforcement.loss.loss_type", loss);
}

fn read_correction(reader: &mut Reader) {
    const USE: &str = "loss_fn.use_importance_sampling_correction";
    const KIND: &str = "loss_fn.truncated_importance_sampling_type";
    const MAX: &str = "loss_fn.truncated_importance_sampling_ratio";
    const MIN: &str = "loss_fn.truncated_importance_sampling_ratio_min";
    let (is_on, kind) = (reader.flag(USE), reader.text(KIND));
    let (max, min) = (reader.number(MAX), reader.number(MIN));
    match is_on {
        Some(true) => {}
        Some(false) => return reader.set(USE, "reinforcement.correction.mode", "none"),
        None => return,
    }
    let mode = match kind.as_deref() {
        None | Some("null" | "tis") => "token_truncate",
        Some("icepop") => "token_mask",
        Some(other) => return reader.refuse(KIND, format!("`{other}` is none of tis and icepop")),
    };
    reader.set(KIND, "reinforcement.correction.mode", mode);
    match max {
        Some(max) => reader.set(MAX, "reinforcement.correction.max", max),
        None => reader
            .refuse(USE, "factors without a bound are not implemented; `max` under [reinforcement.correction] is 3"),
    }
    if let Some(min) = min {
        reader.set(MIN, "reinforcement.correction.min", min);
    }
}

fn read_optimizer(reader: &mut Reader) {
    const BETAS: &str = "policy.optimizer.kwargs.betas";
    if let Some(Json::Array(betas)) = reader.take(BETAS) {
        for (ours, beta) in
            ["optimizer.beta1", "optimizer.beta2"].into_iter().zip(betas.iter().filter_map(Json::as_f64))
        {
            reader.set(BETAS, ours, beta);
        }
    }
    // A list of schedules of PyTorch; a linear rise before a constant rate is a warm-up.
    const SCHEDULER: &str = "policy.scheduler";
    let list = match reader.take(SCHEDULER) {
        Some(Json::Array(list)) => list,
        _ => return,
    };
    let of = |entry: &Json, name: &str| entry["name"].as_str().is_some_and(|full| full.ends_with(name));
    let is_warm_up =
        list.iter().all(|entry| of(entry, "LinearLR") || of(entry, "ConstantLR") || entry.get("milestones").is_some());
    let steps =
        list.iter().find(|entry| of(entry, "LinearLR")).and_then(|entry| entry["kwargs"]["total_iters"].as_u64());
    match (is_warm_up, steps) {
        (true, Some(steps)) => {
            reader.set_noted(
                SCHEDULER,
                "lr_scheduler.warmup_steps",
                steps as i64,
                "from 0 here, and from `start_factor` in NeMo-RL",
            );
        }
        _ => reader.refuse(SCHEDULER, "write `type`, `warmup_steps` and `min_learning_rate` under [lr_scheduler]"),
    }
}

fn read_adapters(reader: &mut Reader) {
    const START: &str = "policy.dtensor_cfg.lora_cfg.";
    let of = |name: &str| format!("{START}{name}");
    if reader.flag(&of("enabled")) != Some(true) {
        return reader.take_all(START);
    }
    for (theirs, ours) in [("dim", "lora.r"), ("alpha", "lora.lora_alpha")] {
        if let Some(value) = reader.number(&of(theirs)) {
            reader.set(&of(theirs), ours, value);
        }
    }
    for name in ["target_modules", "exclude_modules"] {
        let names = match reader.take(&of(name)) {
            Some(Json::Array(names)) if !names.is_empty() => names,
            _ => continue,
        };
        let names = names.iter().filter_map(Json::as_str).map(|name| Value::String(name.into())).collect();
        let ours = if name == "target_modules" { "lora.target_modules" } else { "lora.exclude_modules" };
        reader.set(&of(name), ours, Value::Array(names));
    }
}

fn read_data(reader: &mut Reader) {
    let mut fields = toml::Table::new();
    for (set, ours) in [("train", "data.train_files"), ("validation", "data.val_files")] {
        let old = if set == "train" { "data.train_data_path" } else { "data.val_data_path" };
        let path = format!("data.{set}.data_path");
        let (name, key) = match reader.text(&path) {
            Some(file) => (Some(file), path),
            None => (reader.text(old), old.to_string()),
        };
        if let Some(file) = name {
            reader.set(&key, ours, Value::Array(vec![Value::String(file)]));
        }
        for start in [format!("data.{set}."), "data.".to_string(), "data.default.".to_string()] {
            if let Some(key) = reader.text(&format!("{start}input_key")).filter(|key| key != "prompt") {
                fields.insert("prompt".into(), key.into());
            }
        }
    }
    if !fields.is_empty() {
        reader.set("data.input_key", "data.records.fields", fields);
    }
    let names: Vec<String> =
        reader.beginning("data.").into_iter().filter(|path| path.ends_with("dataset_name")).collect();
    for path in names {
        let Some(name) = reader.text(&path).filter(|name| !["ResponseDataset", "null"].contains(&name.as_str())) else {
            continue;
        };
        let reason = format!(
            "data sets are not downloaded; write the prompts of `{name}` to a file with the columns `prompt` and `answer`, and name it in `train_files` under [data]"
        );
        reader.refuse(&path, reason);
    }
    for path in reader.beginning("data.") {
        let last = path.rsplit('.').next().unwrap_or_default();
        match last {
            "prompt_file" | "system_prompt_file" if reader.text(&path).is_some_and(|file| file != "null") => {
                let reason = "write the whole prompt into the records: a text, or messages with the system message";
                reader.refuse(&path, reason);
            }
            "processor" | "env_name" | "split" | "output_key" | "split_validation_size" | "seed" => {
                drop(reader.take(&path))
            }
            _ => {}
        }
    }
}

/// Environments: `math` is a rule here, and others are programs.
fn read_rewards(reader: &mut Reader) {
    let paths = reader.beginning("env.");
    let mut names: Vec<String> = paths.iter().filter_map(|path| path.split('.').nth(1).map(str::to_string)).collect();
    names.dedup();
    reader.take_all("env.");
    for name in names {
        let key = format!("env.{name}");
        match name.as_str() {
            "math" | "math_default" => {
                reader.rewards.push(reward("math", []));
                let reason = "the reward `math` reads the right answer from the column `answer`; set `answer` to another column, such as `expected_answer`";
                reader.refuse(&key, reason);
            }
            name if name.starts_with("should_") => {
                reader.refuse(&key, "environments of NeMo-Gym are programs; see docs/rewards.md")
            }
            name => {
                let call = format!("`step` of the environment `{name}`");
                reader.refuse(&key, rewards::how_to_write(name, &call));
                reader.rewards.push(rewards::python(name));
            }
        }
    }
    if reader.rewards.is_empty() {
        reader.refuse(
            "env",
            format!("the file names no environment; {}", rewards::how_to_write("reward", "your reward function")),
        );
        reader.rewards.push(rewards::python("reward"));
    }
    const START: &str = "grpo.reward_shaping.";
    let of = |name: &str| format!("{START}{name}");
    if reader.flag(&of("enabled")) == Some(true) {
        let buffer = reader.count(&of("overlong_buffer_length")).unwrap_or(4096);
        let weight = reader.number(&of("overlong_buffer_penalty")).unwrap_or(1.0);
        let longest = reader.count(&of("max_response_length")).unwrap_or(20480);
        reader.rewards.push(rewards::overlong(longest, buffer, weight));
        reader.refuse(&of("max_response_length"), "`max_length` of the reward `overlong` counts tokens of the completion alone; NeMo-RL's counts the prompt too");
    }
    reader.take_all(START);
}
