//! Keys in tables of other trainers' files, by the paths of their tables. A key that is not listed here never has the meaning of a word that it only
//! shares its last part with: `some_table.lr` is not a learning rate.

/// The tables that hold the keys of DeepSpeed's file.
const OF_DEEPSPEED: &[&str] = &["deepspeed.", "deepspeed_config.", "deepspeed_plugin."];

/// The path of a table, and its keys that mean what the words for their last two parts or their last part mean.
const TABLES: &[(&str, &[&str])] = &[
    // DeepSpeed.
    ("zero_optimization", &["stage", "mics_shard_size", "zero_hpz_partition_size"]),
    ("zero_optimization.offload_optimizer", &["device", "pin_memory"]),
    ("zero_optimization.offload_param", &["device", "pin_memory"]),
    ("optimizer", &["type"]),
    ("optimizer.params", &["lr", "betas", "eps", "weight_decay", "momentum"]),
    ("scheduler", &["type"]),
    ("scheduler.params", &["warmup_num_steps", "warmup_max_lr", "warmup_min_lr", "total_num_steps"]),
    ("bf16", &["enabled"]),
    ("fp16", &["enabled", "loss_scale", "loss_scale_window", "initial_scale_power", "min_loss_scale", "hysteresis"]),
    // Accelerate, and FSDP in files of Axolotl and transformers.
    (
        "fsdp_config",
        &[
            "fsdp_sharding_strategy",
            "sharding_strategy",
            "fsdp_reshard_after_forward",
            "reshard_after_forward",
            "fsdp_offload_params",
            "offload_params",
            "fsdp_activation_checkpointing",
            "activation_checkpointing",
        ],
    ),
    (
        "fp8_config",
        &[
            "backend",
            "recipe",
            "fp8_format",
            "amax_history_len",
            "amax_compute_algo",
            "margin",
            "interval",
            "override_linear_precision",
            "use_autocast_during_eval",
            "use_mxfp8_block_scaling",
            "opt_level",
            "pad_inner_dim",
            "enable_fsdp_float8_all_gather",
        ],
    ),
    ("parallelism_config", PARALLEL),
    // transformers and Axolotl.
    ("lr_scheduler_kwargs", &["min_lr", "lr_end"]),
    ("special_tokens", &["bos_token", "eos_token", "unk_token", "pad_token", "additional_special_tokens"]),
];

/// Keys of Accelerate's table of ranks.
const PARALLEL: &[&str] = &["dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "ep_size"];

/// The table of PEFT's `LoraConfig`, which the Python module writes. All its keys mean what the words for them mean.
const OF_PEFT: &str = "lora";

/// The path of a key of DeepSpeed's file, if `path` is one in a table that holds such a file.
pub(super) fn of_deepspeed(path: &str) -> Option<&str> {
    OF_DEEPSPEED.iter().find_map(|table| path.strip_prefix(table))
}

/// The path of a key without what a file adds: the table of DeepSpeed's file, and names of tables that Accelerate repeats in their keys.
pub(super) fn own_path(path: &str) -> String {
    let path = of_deepspeed(path).unwrap_or(path);
    path.replace("parallelism_config.parallelism_config_", "parallelism_config.")
}

/// Whether a key with this [`own_path`] means what the words for its last parts mean: it is in no table or in PEFT's, or [`TABLES`] lists it.
pub(super) fn is_word(path: &str) -> bool {
    let Some((table, key)) = path.rsplit_once('.') else { return true };
    table == OF_PEFT || TABLES.iter().any(|(theirs, keys)| *theirs == table && keys.contains(&key))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{keys, words};

    #[test]
    fn keys_of_pefts_table_are_words() {
        assert!(is_word("lora.r") && is_word("lora.lora_alpha") && !is_word("other.r") && !is_word("other.lora.r"));
    }

    #[test]
    fn listed_keys_are_words_or_keys_of_ours() {
        for (table, keys_of_table) in TABLES {
            for key in *keys_of_table {
                let path = format!("{table}.{key}");
                let is_ours = keys::key_paths().any(|path| path.rsplit('.').next() == Some(key));
                assert!(is_word(&path) && (is_ours || words::meaning(&path).is_some()), "{path}");
            }
        }
    }
}
