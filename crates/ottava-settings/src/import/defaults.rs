//! The trainers that wrote a file, and what their keys mean without a value.

use serde_json::{Map, Value as Json};
use toml::Value;

/// Thirty days in seconds.
const LONGEST_TIMEOUT: i64 = 2_592_000;

/// The trainer that a file is for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Trainer {
    Axolotl,
    LlamaFactory,
    Trl,
    DeepSpeed,
    Verl,
    NemoRl,
    Other,
}

impl Trainer {
    /// The trainer of a file with these keys.
    pub(super) fn of(table: &Map<String, Json>) -> Trainer {
        let has = |keys: &[&str]| keys.iter().any(|key| table.contains_key(*key));
        match () {
            () if has(&["actor_rollout_ref"]) => Trainer::Verl,
            () if has(&["grpo"]) && has(&["policy"]) => Trainer::NemoRl,
            () if has(&["num_generations", "reward_funcs"]) && !has(&["base_model"]) => Trainer::Trl,
            () if has(&["base_model", "sequence_len", "datasets"]) && !has(&["dataset_name"]) => Trainer::Axolotl,
            () if has(&["finetuning_type", "stage", "cutoff_len", "template"]) => Trainer::LlamaFactory,
            () if has(&["model_name_or_path", "dataset_name"]) => Trainer::Trl,
            () if has(&["zero_optimization", "train_micro_batch_size_per_gpu"]) => Trainer::DeepSpeed,
            () if has_tables_of_deepspeed(table) => Trainer::DeepSpeed,
            () => Trainer::Other,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Trainer::Axolotl => "Axolotl",
            Trainer::LlamaFactory => "LLaMA-Factory",
            Trainer::Trl => "TRL",
            Trainer::DeepSpeed => "DeepSpeed",
            Trainer::Verl => "verl",
            Trainer::NemoRl => "NeMo-RL",
            Trainer::Other => "another trainer",
        }
    }

    /// The translation of a key that means something else in other places, in a file with the keys of `table`.
    pub(super) fn own(self, key: &str, value: &Value, table: &Map<String, Json>) -> Option<(&'static str, Value)> {
        match (self, key, value.as_bool()) {
            (Trainer::Trl, "beta" | "temperature" | "max_new_tokens", _) => {
                Some((of_objective(key, table)?, value.clone()))
            }
            (_, "lora_dropout", _) if self.switches_dropout_off(table) => {
                Some(("lora.lora_dropout", Value::Float(0.0)))
            }
            // Both quantize by torchao's or Accelerate's scale per tensor, from the tensor's own amax, unless Axolotl names rows.
            (Trainer::Axolotl | Trainer::LlamaFactory, "fp8", Some(true)) => {
                let recipe = table.get("fp8_config").and_then(|config| config.get("recipe")?.as_str());
                let is_by_row = recipe.is_some_and(|recipe| recipe.starts_with("rowwise"));
                let ours = if is_by_row { "fp8-row" } else { "fp8-current" };
                Some(("precision.recipe", Value::String(ours.into())))
            }
            // Their examples write years, which is no limit.
            (_, "ddp_timeout", _) => Some((
                "parallel.communication.collective_timeout",
                Value::Integer(value.as_integer()?.min(LONGEST_TIMEOUT)),
            )),
            // TRL's own default is BF16; without both switches it trains in F32.
            (Trainer::Trl, "bf16", Some(false)) if table.get("fp16").is_none_or(|fp16| fp16 != true) => {
                Some(("precision.recipe", Value::String("fp32".into())))
            }
            (Trainer::Axolotl, "batch_size", _) => Some(("training.global_batch_size", value.clone())),
            (Trainer::Axolotl | Trainer::LlamaFactory | Trainer::Trl, "packing" | "sample_packing", Some(true)) => {
                Some(("data.packing", Value::String("bfd".into())))
            }
            _ => None,
        }
    }

    /// Whether the trainer of a file with the keys of `table` switches all dropout off, as trainers of preferences do by default.
    fn switches_dropout_off(self, table: &Map<String, Json>) -> bool {
        match self {
            Trainer::Trl => is_of_preferences(table) && table.get("disable_dropout") != Some(&Json::Bool(false)),
            Trainer::LlamaFactory => table.get("stage").is_some_and(|stage| stage == "dpo" || stage == "kto"),
            _ => false,
        }
    }

    /// Settings of ours, as TOML, for keys that the file leaves out, where the trainer's defaults are others.
    pub(super) fn defaults(self, table: &Map<String, Json>) -> Vec<(&'static str, String)> {
        let mut defaults: Vec<(&'static str, &str)> = match self {
            Trainer::Axolotl => vec![
                ("data.max_length", "512"),
                ("data.packing", "\"none\""),
                ("data.val_set_size", "0.0"),
                ("training.per_device_train_batch_size", "1"),
                ("lr_scheduler.warmup_steps", "0.03"),
            ],
            Trainer::LlamaFactory => vec![
                ("data.max_length", "2048"),
                ("data.packing", "\"none\""),
                ("data.val_set_size", "0.0"),
                ("training.num_train_epochs", "3.0"),
                ("optimizer.learning_rate", "5e-5"),
                ("lr_scheduler.type", "\"linear\""),
                ("lr_scheduler.warmup_steps", "0"),
            ],
            Trainer::Trl => vec![
                ("data.packing", "\"none\""),
                ("data.val_set_size", "0.0"),
                ("training.num_train_epochs", "3.0"),
                ("optimizer.learning_rate", if is_of_preferences(table) { "1e-6" } else { "2e-5" }),
                ("lr_scheduler.type", "\"linear\""),
                ("lr_scheduler.warmup_steps", "0"),
                ("memory.recompute", "\"full\""),
            ],
            Trainer::DeepSpeed | Trainer::Verl | Trainer::NemoRl | Trainer::Other => Vec::new(),
        };
        if self == Trainer::LlamaFactory && table.get("stage").is_some_and(|stage| stage == "pt") {
            defaults.retain(|(path, _)| *path != "data.packing");
            defaults.push(("data.packing", "\"wrapped\""));
        }
        // TRL counts all tokens of `messages`, unless `assistant_only_loss` is set.
        if self == Trainer::Trl && is_of_texts(table) {
            defaults.push(("data.train_on_inputs", "true"));
        }
        if self == Trainer::Trl && has_teacher(table) {
            defaults.push(("distillation.lmbda", "0.5"));
        }
        if uses_fsdp(table) {
            defaults.push(("parallel.zero", "3"));
        }
        if matches!(self, Trainer::Axolotl | Trainer::LlamaFactory | Trainer::Trl) {
            defaults.extend([("optimizer.weight_decay", "0.0"), ("optimizer.beta2", "0.999")]);
        }
        let mut defaults: Vec<_> = defaults.into_iter().map(|(path, value)| (path, value.to_string())).collect();
        if matches!(self, Trainer::LlamaFactory | Trainer::Trl) && evaluates_by_steps(table) {
            let default = if self == Trainer::Trl { 10 } else { 500 };
            let steps = table.get("logging_steps").map_or(Some(default), Json::as_u64);
            defaults.extend(steps.map(|steps| ("evaluation.eval_steps", steps.to_string())));
        }
        if self == Trainer::LlamaFactory && table.get("finetuning_type").is_none_or(|kind| kind == "lora") {
            let rank = table.get("lora_rank").and_then(Json::as_u64).unwrap_or(8);
            defaults.extend([("lora.r", rank.to_string()), ("lora.lora_alpha", format!("{}.0", 2 * rank))]);
        }
        if self == Trainer::Trl && table.get("use_peft").is_some_and(|uses| uses == true) {
            defaults.extend([("lora.r", "16".into()), ("lora.lora_alpha", "32.0".into())]);
            if !self.switches_dropout_off(table) {
                defaults.push(("lora.lora_dropout", "0.05".into()));
            }
        }
        defaults
    }
}

/// Whether a file has tables that only files of DeepSpeed have.
fn has_tables_of_deepspeed(table: &Map<String, Json>) -> bool {
    let has = |name: &str, key: &str| table.get(name).is_some_and(|inner| inner.get(key).is_some());
    has("fp16", "enabled") || has("bf16", "enabled") || has("optimizer", "params") || has("scheduler", "params")
}

/// Our key for a key that several of TRL's trainers have, by the trainer that a file with the keys of `table` is for.
fn of_objective(key: &str, table: &Map<String, Json>) -> Option<&'static str> {
    let has = |keys: &[&str]| keys.iter().any(|key| table.contains_key(*key));
    match (key, has_teacher(table), has(&["num_generations", "reward_funcs"])) {
        ("beta", true, _) => Some("distillation.beta"),
        ("beta", false, true) => Some("reinforcement.loss.beta"),
        ("beta", false, false) => Some("preference.beta"),
        ("temperature", true, _) => Some("distillation.temperature"),
        ("temperature", false, true) => Some("reinforcement.sampling.temperature"),
        (_, true, _) => Some("distillation.max_completion_length"),
        _ => None,
    }
}

/// Whether a file of TRL is of its GKDTrainer.
fn has_teacher(table: &Map<String, Json>) -> bool {
    table.contains_key("teacher_model_name_or_path")
}

/// Whether a file evaluates every `eval_steps`, whose default is `logging_steps`.
fn evaluates_by_steps(table: &Map<String, Json>) -> bool {
    ["eval_strategy", "evaluation_strategy"].iter().any(|key| table.get(*key).is_some_and(|choice| choice == "steps"))
}

/// Whether a file of TRL is of its SFTTrainer.
fn is_of_texts(table: &Map<String, Json>) -> bool {
    let of_others = ["num_generations", "reward_funcs", "reward_model"].iter().any(|key| table.contains_key(*key));
    !of_others && !has_teacher(table) && !is_of_preferences(table)
}

/// Whether a file of TRL is of its DPOTrainer, CPOTrainer, ORPOTrainer or KTOTrainer.
fn is_of_preferences(table: &Map<String, Json>) -> bool {
    if has_teacher(table) {
        return false;
    }
    let keys = [
        "beta",
        "loss_weights",
        "precompute_ref_log_probs",
        "desirable_weight",
        "undesirable_weight",
        "cpo_alpha",
        "simpo_gamma",
    ];
    let of_texts = |loss: &Json| ["nll", "dft", "chunked_nll"].iter().any(|name| loss == name);
    keys.iter().any(|key| table.contains_key(*key)) || table.get("loss_type").is_some_and(|loss| !of_texts(loss))
}

/// Whether a file sets up FSDP, which divides weights unless its strategy says otherwise.
fn uses_fsdp(table: &Map<String, Json>) -> bool {
    ["fsdp", "fsdp_config"].into_iter().filter_map(|key| table.get(key)).any(|value| match value {
        Json::String(words) => !words.is_empty(),
        Json::Array(words) => !words.is_empty(),
        Json::Object(keys) => !keys.is_empty(),
        other => other == &Json::Bool(true),
    })
}
