//! GRPOConfig and RLOOConfig of TRL, and the table `trl` of Axolotl, which has TRL's keys.

use super::reader::{ALL_TOKENS, Dialect, LOGGED, ONE, Reader, SAMPLER, WHOLE, set_lengths};
use super::rewards::{self, table as reward};
use crate::words::Answer::{As, Nothing};
use crate::words::Meaning::{Is, Needless, Not, Only, Values};
use crate::words::{NONE, Row};
use serde_json::Value as Json;
use toml::Value;

pub(super) const GRPO: Dialect =
    Dialect { rows: ROWS, prefix: "", is_open: true, together: grpo, defaults: &[("optimizer.learning_rate", "1e-6")] };

pub(super) const RLOO: Dialect = Dialect {
    rows: ROWS,
    prefix: "",
    is_open: true,
    together: rloo,
    defaults: &[
        ("optimizer.learning_rate", "1e-6"),
        ("reinforcement.num_generations", "2"),
        ("reinforcement.loss.beta", "0.05"),
    ],
};

/// Axolotl's learning rate has no default.
pub(super) const OF_AXOLOTL: Dialect =
    Dialect { rows: ROWS, prefix: "trl.", is_open: true, together: of_axolotl, defaults: &[] };

const ROWS: &[Row] = &[
    ("num_generations", Is("reinforcement.num_generations")),
    ("num_generations_eval", Only(ONE, "an evaluation draws the most likely completion of each prompt")),
    ("max_completion_length", Is("reinforcement.max_completion_length")),
    ("num_iterations", Is("reinforcement.num_iterations")),
    ("temperature", Is("reinforcement.sampling.temperature")),
    ("top_p", Only(ONE, WHOLE)),
    ("top_k", Only(ALL_TOKENS, WHOLE)),
    ("min_p", Only(&["0", "0.0"], WHOLE)),
    ("repetition_penalty", Only(ONE, WHOLE)),
    ("generation_kwargs*", Only(&["{}"], WHOLE)),
    ("beta", Is("reinforcement.loss.beta")),
    ("epsilon", Is("reinforcement.loss.epsilon")),
    ("epsilon_high", Is("reinforcement.loss.epsilon_high")),
    ("delta", Is("reinforcement.loss.delta")),
    (
        "use_bias_correction_kl",
        Values("reinforcement.loss.kl_estimator", &[("true", As("\"weighted_k3\"")), ("false", As("\"k3\""))]),
    ),
    ("mask_truncated_completions", Is("reinforcement.mask_truncated_completions")),
    (
        "vllm_importance_sampling_correction",
        Values("reinforcement.correction.mode", &[("true", Nothing), ("false", As("\"none\""))]),
    ),
    ("vllm_importance_sampling_mode", Is("reinforcement.correction.mode")),
    ("vllm_importance_sampling_cap", Is("reinforcement.correction.max")),
    ("vllm_importance_sampling_clip_max", Is("reinforcement.correction.max")),
    ("vllm_importance_sampling_clip_min", Is("reinforcement.correction.min")),
    ("use_vllm", Needless(SAMPLER)),
    ("vllm*", Needless(SAMPLER)),
    ("use_transformers_*", Needless(SAMPLER)),
    ("cache_implementation", Needless(SAMPLER)),
    ("async_prefetch", Only(&["false"], "completions are drawn by the newest weights, before the steps that use them")),
    ("ds3_gather_for_generation", Needless("weights are whole on each rank, or gathered in any case")),
    ("disable_dropout", Only(&["false"], "the one dropout is `lora_dropout` under [lora]: leave it out")),
    ("cast_lm_head_to_fp32", Needless("the head of a run of reinforcement learning always computes logits in F32")),
    ("use_liger_kernel", Needless("kernels are always fused")),
    ("use_liger_loss", Needless("kernels are always fused")),
    ("pad_to_multiple_of", Needless("rows have `max_length` tokens")),
    ("model_init_kwargs*", Only(&["{}"], "write the settings of the model under [model] and [precision]")),
    ("chat_template_kwargs*", Not("write `chat_template_kwargs` under [data.chat]")),
    ("sync_ref_model", Only(&["false"], "the reference model is the one that a run starts from, and does not follow")),
    ("ref_model_*", Needless("only `sync_ref_model` reads it")),
    ("top_entropy_quantile", Only(ONE, "every token of a completion counts, whatever its entropy")),
    ("off_policy_mask_threshold", Only(NONE, "write `mode` and `max` under [reinforcement.correction]")),
    (
        "multi_objective_aggregation",
        Only(&["sum_then_normalize"], "rewards are added by weight before they are normalised"),
    ),
    (
        "max_tool_calling_iterations",
        Only(&["0"], "an environment plays turns: name its program under [reinforcement.environment]"),
    ),
    (
        "rollout_func",
        Only(
            NONE,
            "a function cannot be translated; clients draw by [reinforcement.endpoint], and programs play turns by [reinforcement.environment]",
        ),
    ),
    ("tools", Only(NONE, "an environment plays turns: name its program under [reinforcement.environment]")),
    ("sapo_*", Needless("only `loss_type = sapo` reads it")),
    ("vespo_*", Needless("only `loss_type = vespo` reads it")),
    ("log_completions", Needless(SAMPLES)),
    ("log_unique_prompts", Needless(SAMPLES)),
    ("wandb_log_unique_prompts", Needless(SAMPLES)),
    ("num_completions_to_print", Needless(SAMPLES)),
    ("log_multimodal", Needless(SAMPLES)),
    // Keys of Axolotl alone.
    ("skip_zero_advantage_batches", Needless("a step without advantages has a loss and gradients of 0")),
    ("replay_buffer_size", Only(&["0"], "completions are used by the steps after they were drawn, and then forgotten")),
    (
        "reroll_*",
        Not("write `dynamic_sampling = true` under [reinforcement.sampling], which replaces groups of equal rewards"),
    ),
];

const SAMPLES: &str = LOGGED;

/// TRL's reward functions that have a rule here.
fn rule(name: &str) -> Option<toml::Table> {
    let tags = |names: &[&str]| Value::Array(names.iter().map(|name| Value::String((*name).into())).collect());
    match name.rsplit('.').next().unwrap_or(name) {
        "accuracy_reward" => Some(reward(
            "math",
            [("name", Value::String("accuracy_reward".into())), ("answer", Value::String("solution".into()))],
        )),
        "think_format_reward" => Some(reward(
            "regex",
            [
                ("name", Value::String("think_format_reward".into())),
                ("pattern", Value::String(r"<think>.*</think>.*".into())),
            ],
        )),
        "format_reward" => Some(reward("format", [("tags", tags(&["think", "answer"]))])),
        _ => None,
    }
}

/// The rewards of `reward_funcs`, with their weights, and of `reward_model_name_or_path`.
fn read_rewards(reader: &mut Reader, prefix: &str) {
    let (funcs, weights) = (format!("{prefix}reward_funcs"), format!("{prefix}reward_weights"));
    let names = match reader.take(&funcs) {
        Some(Json::Array(names)) => names,
        Some(one) => vec![one],
        None => Vec::new(),
    };
    let given = match reader.take(&weights) {
        Some(Json::Array(weights)) => weights.iter().map(Json::as_f64).collect::<Option<Vec<f64>>>(),
        _ => Some(Vec::new()),
    };
    let given = given.filter(|given| given.is_empty() || given.len() == names.len()).unwrap_or_else(|| {
        reader.refuse(
            &weights,
            "one number is needed for each reward; set `weight` in each table of [[reinforcement.rewards]]",
        );
        Vec::new()
    });
    for (at, name) in names.iter().enumerate() {
        let name = name.as_str().map_or_else(|| name.to_string(), str::to_string);
        let mut table = rule(&name).unwrap_or_else(|| {
            let short = name.rsplit(['.', '/']).next().unwrap_or(&name).to_string();
            if name.contains('/') {
                return rewards::model(&name);
            }
            reader.refuse(
                &funcs,
                rewards::how_to_write(&short, &format!("the function `{name}`, called as TRL calls it")),
            );
            rewards::python(&short)
        });
        if name.ends_with("accuracy_reward") {
            reader.refuse(&funcs, "check `answer` of the reward `accuracy_reward`: TRL reads the column `solution`");
        }
        if let Some(weight) = given.get(at).filter(|weight| **weight != 1.0) {
            table.insert("weight".into(), Value::Float(*weight));
        }
        reader.rewards.push(table);
    }
    let model = format!("{prefix}reward_model_name_or_path");
    if let Some(name) = reader.text(&model) {
        reader.rewards.push(rewards::model(&name));
    }
    if reader.rewards.is_empty() {
        reader.refuse(
            &funcs,
            format!("the file names no reward; {}", rewards::how_to_write("reward", "your reward function")),
        );
        reader.rewards.push(rewards::python("reward"));
    }
}

/// The loss, from the two keys that name it.
fn read_loss(reader: &mut Reader, prefix: &str) {
    let (key, level) = (format!("{prefix}loss_type"), format!("{prefix}importance_sampling_level"));
    let (loss, of_sequence) = (reader.text(&key), reader.text(&level).is_some_and(|level| level == "sequence"));
    let loss = loss.unwrap_or_else(|| "dapo".into());
    let ours = match (loss.as_str(), of_sequence) {
        ("grpo", true) => "gspo",
        (_, true) => {
            let reason =
                format!("ratios of completions are those of `loss_type = grpo` (GSPO), and the loss is `{loss}`");
            return reader.refuse_objective(&level, reason);
        }
        ("grpo", _) => "grpo",
        ("dapo", _) => "dapo",
        ("dr_grpo", _) => "dr_grpo",
        ("cispo", _) => return read_cispo(reader, prefix, &key),
        ("bnpo", _) => {
            let reason = "it divides by the tokens of a micro-batch; `dapo` divides by the tokens of the whole step";
            return reader.refuse_objective(&key, reason);
        }
        _ => {
            let reason = "the losses are \"dapo\", \"grpo\", \"dr_grpo\", \"gspo\", \"cispo\" and \"reinforce\" (`loss_type` under [reinforcement.loss])";
            return reader.refuse_objective(&key, reason);
        }
    };
    if ours != "dapo" {
        reader.set(&key, "reinforcement.loss.loss_type", ours);
    }
}

/// CISPO of TRL bounds weights by `epsilon_high` alone: 1 + epsilon_high is that bound here, and `epsilon` = 1 is no bound from below.
fn read_cispo(reader: &mut Reader, prefix: &str, key: &str) {
    let (low, high) = (format!("{prefix}epsilon"), format!("{prefix}epsilon_high"));
    let most = reader.number(&high).or_else(|| reader.number(&low)).unwrap_or(0.2);
    reader.take(&low);
    if most <= 1.0 {
        let reason = format!(
            "`loss_type = cispo` bounds every weight by {most}, also where the policy has not changed; set it to 5, as in the paper"
        );
        return reader.refuse_objective(&high, reason);
    }
    reader.set(key, "reinforcement.loss.loss_type", "cispo");
    reader.set_noted(&low, "reinforcement.loss.epsilon", 1.0, "weights have no bound from below in TRL");
    reader.set_noted(&high, "reinforcement.loss.epsilon_high", most - 1.0, "added to 1 here, and not in TRL");
}

fn read_scale(reader: &mut Reader, prefix: &str) {
    let key = format!("{prefix}scale_rewards");
    match reader.text(&key).as_deref() {
        None | Some("true" | "group") => {}
        Some("false" | "none") => reader.set(&key, SCALE, "none"),
        Some("batch") => reader.set(&key, SCALE, "batch"),
        Some(other) => reader.refuse_objective(&key, format!("`{other}` is none of group, batch and none")),
    }
}

const SCALE: &str = "reinforcement.advantage.scale_rewards";

/// The completions of a generation, and the tokens of a row.
fn read_sizes(reader: &mut Reader) {
    let group = reader.value_of("num_generations").and_then(Json::as_u64).unwrap_or(8).max(1);
    if let Some(completions) = reader.count("generation_batch_size") {
        match completions % group {
            0 => reader.set("generation_batch_size", PROMPTS, (completions / group) as i64),
            _ => reader.refuse("generation_batch_size", format!("{completions} completions are no groups of {group}")),
        }
    }
    let accumulation = reader.value_of("gradient_accumulation_steps").and_then(Json::as_u64).unwrap_or(1);
    if let Some(steps) = reader.count("steps_per_generation").filter(|steps| *steps != accumulation) {
        let reason = format!(
            "{steps} micro-batches are a generation, and {accumulation} a step; write `prompts_per_generation` under [reinforcement]: {steps} times \
             `per_device_train_batch_size` times the number of GPUs, divided by {group}"
        );
        reader.refuse("steps_per_generation", reason);
    }
    let prompt = reader.count("max_prompt_length");
    let completion = reader.value_of("max_completion_length").and_then(Json::as_u64);
    set_lengths(reader, "max_prompt_length", prompt, completion);
}

const PROMPTS: &str = "reinforcement.prompts_per_generation";

fn grpo(reader: &mut Reader) {
    read_rewards(reader, "");
    read_loss(reader, "");
    read_scale(reader, "");
    read_sizes(reader);
}

/// TRL's RLOOTrainer adds up the log-probabilities of a completion, and subtracts the divergence from the reward.
fn rloo(reader: &mut Reader) {
    read_rewards(reader, "");
    read_sizes(reader);
    reader.set("normalize_advantages", "reinforcement.advantage.estimator", "rloo");
    let is_normalised = reader.flag("normalize_advantages").unwrap_or(false);
    reader.set("normalize_advantages", SCALE, if is_normalised { "batch" } else { "none" });
    reader.set_noted(
        "num_iterations",
        "reinforcement.loss.loss_type",
        "dr_grpo",
        "the sum over the tokens of a completion, as in RLOO, divided by max_completion_length",
    );
    if reader.take("reward_clip_range").is_some() {
        reader.refuse("reward_clip_range", "rewards are not clipped; let the reward bound its scores");
    }
    if reader.value_of("beta").and_then(Json::as_f64) != Some(0.0) {
        reader.refuse(
            "beta",
            "TRL subtracts the divergence from the reward; here `beta` times the divergence is a part of the loss",
        );
    }
}

fn of_axolotl(reader: &mut Reader) {
    reader.take("rl");
    read_rewards(reader, "trl.");
    read_loss(reader, "trl.");
    read_scale(reader, "trl.");
    if let Some(completion) = reader.value_of("trl.max_completion_length").and_then(Json::as_u64) {
        let prompt = reader.count("sequence_len").map(|all| all.saturating_sub(completion)).filter(|left| *left > 0);
        set_lengths(reader, "sequence_len", prompt, Some(completion));
    }
}
