//! Words for steps, batches, learning rates and optimizers.

use super::meaning::Answer::{As, Default, Never, Nothing, Unset};
use super::meaning::Meaning::{Is, Needless, Not, Only, Values};
use super::meaning::{Answer, NONE, Row};

pub(super) const ROWS: &[Row] = &[
    // Batches.
    ("micro_batch_size", Is("training.per_device_train_batch_size")),
    ("local_batch_size", Is("training.per_device_train_batch_size")),
    ("train_micro_batch_size_per_gpu", Values("training.per_device_train_batch_size", AUTO)),
    ("per_gpu_train_batch_size", Is("training.per_device_train_batch_size")),
    ("train_batch_size", Values("training.global_batch_size", AUTO)),
    ("batch_size", Not("say which: `per_device_train_batch_size` or `global_batch_size` under [training]")),
    ("gradient_accumulation", Is("training.gradient_accumulation_steps")),
    (
        "auto_find_batch_size",
        Only(&["false"], "`ottava plan` finds the largest `per_device_train_batch_size` that fits"),
    ),
    ("eval_batch_size", Is("evaluation.per_device_eval_batch_size")),
    ("per_gpu_eval_batch_size", Is("evaluation.per_device_eval_batch_size")),
    ("eval_accumulation_steps", Needless("losses are added up batch by batch, so nothing accumulates on the device")),
    ("sequence_parallel", Only(&["false"], "sequence parallelism is not implemented")),
    // Steps.
    ("max_steps", Values("training.max_steps", &[("-1", Default)])),
    ("train_iters", Is("training.max_steps")),
    ("num_epochs", Is("training.num_train_epochs")),
    ("epochs", Is("training.num_train_epochs")),
    ("train_samples", Not("write `max_steps` under [training]: the samples divided by the sequences of a step")),
    (
        "max_tokens",
        Not("write `max_steps` under [training]: the tokens divided by those of a step, which `ottava plan` prints"),
    ),
    ("logging_strategy", Values("logging.logging_steps", &[("steps", Nothing), ("epoch", Never(BY_EPOCH))])),
    ("log_interval", Is("logging.logging_steps")),
    ("log_freq", Is("logging.logging_steps")),
    ("logging_first_step", Needless("the first step is always logged")),
    ("eval_strategy", Values("evaluation.eval_steps", STRATEGIES)),
    ("evaluation_strategy", Values("evaluation.eval_steps", STRATEGIES)),
    ("eval_interval", Is("evaluation.eval_steps")),
    (
        "evals_per_epoch",
        Not(
            "write `eval_steps` under [evaluation], a number of steps; `ottava plan --show-data` prints the rows of an epoch",
        ),
    ),
    ("eval_on_start", Needless("every run evaluates at its start")),
    ("eval_iters", Needless("an evaluation reads the whole validation set; `val_set_size` under [data] is its size")),
    ("do_train", Needless("`ottava train` trains")),
    ("do_eval", Needless("runs with a validation set evaluate; `val_set_size` under [data]")),
    ("do_predict", Only(&["false"], "`ottava generate` writes answers after the run")),
    ("predict_with_generate", Only(&["false"], "`ottava generate` writes answers after the run")),
    (
        "save_strategy",
        Values(
            "checkpoint.save_steps",
            &[("steps", Nothing), ("no", As("\"end\"")), ("epoch", Never(BY_EPOCH)), ("best", Never(BEST))],
        ),
    ),
    ("save_interval", Is("checkpoint.save_steps")),
    ("checkpoint_interval", Is("checkpoint.save_steps")),
    (
        "saves_per_epoch",
        Not(
            "write `save_steps` under [checkpoint], a number of steps; `ottava plan --show-data` prints the rows of an epoch",
        ),
    ),
    ("keep_latest_k", Is("checkpoint.save_total_limit")),
    ("metric_for_best_model", Values("evaluation.metric_for_best_model", &[("loss", As("\"eval_loss\""))])),
    ("greater_is_better", Needless("the metric says whether higher or lower values are better")),
    ("early_stopping_steps", Is("evaluation.early_stopping_patience")),
    ("save_safetensors", Only(&["true"], "weights are always safetensors")),
    (
        "async_mode",
        Values(
            "checkpoint.async_save",
            &[("disabled", As("false")), ("async", As("true")), ("async_with_pinned_mem", As("true"))],
        ),
    ),
    ("enable_async_checkpoint", Is("checkpoint.async_save")),
    // Learning rates.
    ("lr", Is("optimizer.learning_rate")),
    ("min_lr", Is("lr_scheduler.min_learning_rate")),
    ("eta_min", Is("lr_scheduler.min_learning_rate")),
    ("cosine_min_lr_ratio", Not("write `min_learning_rate` under [lr_scheduler]: the ratio times `learning_rate`")),
    ("min_lr_ratio", Not("write `min_learning_rate` under [lr_scheduler]: the ratio times `learning_rate`")),
    ("cosine_constant_lr_ratio", Only(&["0", "0.0"], SCHEDULES)),
    ("lr_scheduler", Values("lr_scheduler.type", SCHEDULERS)),
    ("lr_scheduler_type", Values("lr_scheduler.type", SCHEDULERS)),
    ("lr_decay_style", Values("lr_scheduler.type", SCHEDULERS)),
    ("decay_type", Values("lr_scheduler.type", SCHEDULERS)),
    (
        "lr_scheduler_kwargs",
        Only(&["{}"], "write `min_learning_rate`, `decay_steps`, `num_cycles` and `power` under [lr_scheduler]"),
    ),
    ("lr_power", Is("lr_scheduler.power")),
    ("lr_end", Is("lr_scheduler.min_learning_rate")),
    ("lr_num_cycles", Is("lr_scheduler.num_cycles")),
    ("lr_warmup_steps", Is("lr_scheduler.warmup_steps")),
    ("lr_warmup_iters", Is("lr_scheduler.warmup_steps")),
    ("lr_warmup_fraction", Values("lr_scheduler.warmup_steps", NO_SHARE)),
    ("warmup_ratio", Values("lr_scheduler.warmup_steps", NO_SHARE)),
    ("warmup_num_steps", Is("lr_scheduler.warmup_steps")),
    ("lr_wsd_decay_iters", Is("lr_scheduler.decay_steps")),
    ("lr_decay_iters", Needless("the schedule ends with the run, at `max_steps`")),
    ("lr_quadratic_warmup", Only(&["false"], "the warm-up is linear")),
    ("embedding_lr", Only(NONE, ONE_RATE)),
    ("embedding_lr_scale", Only(NONE, ONE_RATE)),
    ("lr_groups", Only(NONE, ONE_RATE)),
    ("loraplus_lr_ratio", Is("lora.loraplus_lr_ratio")),
    ("loraplus_lr_embedding", Only(NONE, ONE_RATE)),
    ("jagged_restart_*", Not(SCHEDULES)),
    // Optimizers.
    ("optim", Values("optimizer.name", OPTIMIZERS)),
    ("optimizer", Values("optimizer.name", OPTIMIZERS)),
    ("optimizer_type", Values("optimizer.name", OPTIMIZERS)),
    ("optimizer.type", Values("optimizer.name", OPTIMIZERS)),
    ("optimizer.name", Values("optimizer.name", OPTIMIZERS)),
    ("lr_scheduler.type", Values("lr_scheduler.type", SCHEDULERS)),
    ("scheduler.type", Values("lr_scheduler.type", SCHEDULERS)),
    ("warmup_max_lr", Values("optimizer.learning_rate", AUTO)),
    ("warmup_min_lr", Only(&["0", "0.0", "auto"], "the warm-up starts at 0")),
    ("total_num_steps", Values("training.max_steps", AUTO)),
    ("optim_args", Only(NONE, "write `beta1`, `beta2` and `eps` under [optimizer]")),
    ("optim_target_modules", Not("an optimizer updates all trained weights")),
    ("use_muon", Values("optimizer.name", &[("true", As("\"muon\"")), ("false", Unset)])),
    ("muon_momentum", Is("optimizer.momentum")),
    ("adam_eps", Is("optimizer.eps")),
    ("adam_epsilon", Is("optimizer.eps")),
    ("adam_beta1", Is("optimizer.beta1")),
    ("adam_beta2", Is("optimizer.beta2")),
    ("betas", Not("write `beta1` and `beta2` under [optimizer]")),
    ("wd", Is("optimizer.weight_decay")),
    ("max_norm", Is("training.max_grad_norm")),
    ("clip_grad", Is("training.max_grad_norm")),
    ("grad_clip", Is("training.max_grad_norm")),
    ("gradient_clipping", Values("training.max_grad_norm", AUTO)),
    ("use_galore", Only(&["false"], LOW_RANK)),
    ("galore_*", Not(LOW_RANK)),
    ("qgalore_*", Not(LOW_RANK)),
    ("use_apollo", Only(&["false"], LOW_RANK)),
    ("apollo_*", Not(LOW_RANK)),
    (
        "use_badam",
        Only(&["false"], "BAdam is not implemented; `offload_optimizer` under [memory] saves the same memory"),
    ),
    ("badam_*", Not("BAdam is not implemented; `offload_optimizer` under [memory] saves the same memory")),
    (
        "use_adam_mini",
        Only(&["false"], "Adam-mini is not implemented; `storage = \"coat\"` under [optimizer] has moments in FP8"),
    ),
    ("lisa_*", Not("LISA is not implemented; use adapters ([lora]) or `storage` under [optimizer]")),
    ("dion_*", Not("Dion is not implemented; `name` under [optimizer] is adamw, muon or lion")),
    ("noisy_embedding_alpha", Is("training.neftune_noise_alpha")),
    ("neftune_alpha", Is("training.neftune_noise_alpha")),
    (
        "loss_type",
        Values(
            "preference.loss_type",
            &[
                ("nll", Default),
                ("chunked_nll", Default),
                ("dft", Never("the loss of texts is the cross entropy of the targets")),
                ("aot_pair", As("\"aot_unpaired\"")),
            ],
        ),
    ),
    ("f_divergence_type", Values("preference.loss_type", DIVERGENCES)),
    ("use_weighting", Values("preference.loss_type", WEIGHTING)),
    ("sync_ref_model", Values("preference.loss_type", SYNCHRONIZED)),
    ("ref_model_mixup_alpha", Needless("only `sync_ref_model` reads it")),
    ("ref_model_sync_steps", Needless("only `sync_ref_model` reads it")),
    ("f_alpha_divergence_coef", Needless("only `f_divergence_type = alpha_divergence` reads it")),
    (
        "ld_alpha",
        Only(&["1", "1.0"], "LD-DPO is not implemented; every token of a completion counts, as with `ld_alpha = 1`"),
    ),
    (
        "rpo_alpha",
        Only(NONE, "write `loss_type = [\"sigmoid\", \"sft\"]` and `loss_weights = [1.0, ALPHA]` under [preference]"),
    ),
    ("loss_watchdog_*", Needless("a loss that is not finite ends the run before the update")),
    ("logging_nan_inf_filter", Needless("a loss that is not finite ends the run before the update")),
    ("average_tokens_across_devices", Only(&["true"], "the loss is always divided by the target tokens of all ranks")),
    ("include_num_input_tokens_seen", Needless("metrics.jsonl counts tokens")),
    ("include_tokens_per_second", Needless("metrics.jsonl has tokens per second")),
    ("include_tkps", Needless("metrics.jsonl has tokens per second")),
];

const DIVERGENCES: &[(&str, Answer)] = &[
    ("reverse_kl", Nothing),
    ("forward_kl", Never(REVERSE)),
    ("js_divergence", Never(REVERSE)),
    ("alpha_divergence", Never(REVERSE)),
];
const WEIGHTING: &[(&str, Answer)] =
    &[("false", Nothing), ("true", Never("the weights of WPO are not implemented; all pairs count alike"))];
const SYNCHRONIZED: &[(&str, Answer)] = &[
    ("false", Nothing),
    ("true", Never("the reference model is the one that a run starts from, and does not follow")),
];
const REVERSE: &str = "rewards are differences of log-probabilities, the divergence `reverse_kl`";

/// A share of 0 leaves the number of steps as it is.
const NO_SHARE: &[(&str, Answer)] = &[("0", Nothing), ("0.0", Nothing)];
const AUTO: &[(&str, Answer)] = &[("auto", Nothing)];
const STRATEGIES: &[(&str, Answer)] =
    &[("steps", Nothing), ("no", As("\"end\"")), ("false", As("\"end\"")), ("epoch", Never(BY_EPOCH))];

const SCHEDULERS: &[(&str, Answer)] = &[
    ("cosine_with_min_lr", As("\"cosine\"")),
    ("constant_with_warmup", As("\"constant\"")),
    ("wsd", As("\"warmup_stable_decay\"")),
    ("WSD", As("\"warmup_stable_decay\"")),
    ("WarmupLR", As("\"constant\"")),
    ("WarmupDecayLR", As("\"linear\"")),
    ("WarmupCosineLR", As("\"cosine\"")),
    ("inverse-square-root", As("\"inverse_sqrt\"")),
    ("reduce_lr_on_plateau", Never(SCHEDULES)),
    ("one_cycle", Never(SCHEDULES)),
    ("rex", Never(SCHEDULES)),
    ("sqrt", Never(SCHEDULES)),
];

const OPTIMIZERS: &[(&str, Answer)] = &[
    ("adamw_torch", As("\"adamw\"")),
    ("adamw_torch_fused", As("\"adamw\"")),
    ("adamw_hf", As("\"adamw\"")),
    ("adamw_apex_fused", As("\"adamw\"")),
    ("adam", As("\"adamw\"")),
    ("Adam", As("\"adamw\"")),
    ("AdamW", As("\"adamw\"")),
    ("FusedAdam", As("\"adamw\"")),
    ("FusedAdamW", As("\"adamw\"")),
    ("CPUAdam", As("\"adamw\"")),
    ("HybridAdam", As("\"adamw\"")),
    ("lion_32bit", As("\"lion\"")),
    ("lion_pytorch", As("\"lion\"")),
    ("Muon", As("\"muon\"")),
    ("adamw_8bit", Never(EIGHT_BIT)),
    ("adamw_bnb_8bit", Never(EIGHT_BIT)),
    ("adamw_torch_8bit", Never(EIGHT_BIT)),
    ("adamw_torch_4bit", Never(EIGHT_BIT)),
    ("ao_adamw_8bit", Never(EIGHT_BIT)),
    ("ao_adamw_fp8", Never(EIGHT_BIT)),
    (
        "paged_adamw_8bit",
        Never("write `state_dtype = \"float8\"` under [optimizer] and `offload_optimizer = \"auto\"` under [memory]"),
    ),
    (
        "paged_adamw_32bit",
        Never("write `offload_optimizer = \"auto\"` under [memory]; `name = \"adamw\"` is the default"),
    ),
    ("paged_adamw", Never("write `offload_optimizer = \"auto\"` under [memory]; `name = \"adamw\"` is the default")),
    ("lion_8bit", Never("write `name = \"lion\"` and `state_dtype = \"float8\"` under [optimizer]")),
    ("sgd", Never(OTHERS)),
    ("adafactor", Never(OTHERS)),
    ("adagrad", Never(OTHERS)),
    ("rmsprop", Never(OTHERS)),
    ("galore_adamw", Never(LOW_RANK)),
    ("apollo_adamw", Never(LOW_RANK)),
    ("schedule_free_adamw", Never(OTHERS)),
    ("grokadamw", Never(OTHERS)),
    ("stable_adamw", Never(OTHERS)),
    ("came_pytorch", Never(OTHERS)),
    ("optimi_adamw", Never("write `storage = \"bfloat16\"` under [optimizer]: BF16 states with stochastic rounding")),
];

const EIGHT_BIT: &str = "write `state_dtype = \"float8\"` under [optimizer], AdamW with both moments in FP8; docs/optimizer.md has all formats";
const OTHERS: &str = "the optimizers are \"adamw\", \"muon\" and \"lion\"";
const LOW_RANK: &str = "optimizers on low-rank projections are not implemented; `storage = \"coat\"` under [optimizer] and adapters ([lora]) save memory";
const SCHEDULES: &str = "the schedules are \"cosine\", \"linear\", \"constant\", \"warmup_stable_decay\", \"cosine_with_restarts\", \"polynomial\" and \"inverse_sqrt\"";
const ONE_RATE: &str = "all weights have one `learning_rate`";
const BY_EPOCH: &str = "write a number of steps; `ottava plan --show-data` prints the rows of an epoch";
const BEST: &str = "`load_best_model_at_end = true` under [evaluation] saves and keeps the best checkpoint";
