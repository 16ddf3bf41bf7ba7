//! Settings without effect, because of other settings.

use crate::objective::OF_REFERENCE;
use crate::{Interval, ObjectiveKind, RunConfig, TrackerKind};
use ottava_data::{BadRecord, Packing};
use ottava_recipe::RecipeName;
use ottava_sentinel::{AlarmPolicy, NonFiniteSteps, NormAlarmPolicy, SentinelPolicy};
use std::collections::BTreeMap;
use toml::Value;

/// Keys, whether a run leaves them unread, and the reason in words.
struct Effect {
    keys: &'static [&'static str],
    is_unread: fn(&RunConfig) -> bool,
    why: &'static str,
}

const fn unread(keys: &'static [&'static str], is_unread: fn(&RunConfig) -> bool, why: &'static str) -> Effect {
    Effect { keys, is_unread, why }
}

/// All settings that can have no effect because of other settings. The first row of a key that applies gives the reason.
const EFFECTS: &[Effect] = &[
    unread(OF_FP8, |run| !run.casts_by(&RecipeName::FP8), "unless a linear has an FP8 recipe"),
    unread(OF_DELAYED, |run| !run.casts_by(&[RecipeName::Fp8Delayed]), "unless a linear has recipe fp8-delayed"),
    unread(
        &["precision.wgrad_blocks"],
        |run| !run.casts_by(&[RecipeName::Fp8Block]),
        "unless a linear has recipe fp8-block",
    ),
    unread(OF_FP16, |run| run.precision.recipe != RecipeName::Fp16, "unless the recipe is fp16"),
    unread(
        &["data.excess_length_strategy"],
        |run| run.data.packing == Packing::Wrapped,
        "with packing `wrapped`, which cuts documents at the ends of rows",
    ),
    unread(OF_RECOVERY, |run| !run.recovery.is_on(), "while `recovery.snapshot_steps` is 0"),
    unread(OF_STRAGGLERS, |run| run.parallel.straggler_steps == 0, "while `parallel.straggler_steps` is 0"),
    unread(OF_PIPELINE, |run| run.parallel.pipeline == 1, "with `parallel.pipeline` = 1"),
    unread(
        &["data.val_set_size"],
        |run| run.datasets().iter().all(|set| !set.val_files.is_empty()),
        "where `val_files` are set",
    ),
    unread(
        &["data.records.max_bad_records"],
        |run| run.data.records.on_bad_record == BadRecord::Error,
        "unless `on_bad_record` is \"skip\"",
    ),
    unread(
        &["data.shuffle_shards", "data.cached_shards"],
        |run| !run.data.streaming,
        "unless `data.streaming` is true",
    ),
    unread(
        &["checkpoint.save_minutes"],
        |run| run.checkpoint.save_steps == Interval::End,
        "with `save_steps` = \"end\", which saves at the end alone",
    ),
    unread(
        &["evaluation.per_device_eval_batch_size"],
        |run| {
            matches!(run.objective(), ObjectiveKind::Embedding | ObjectiveKind::Labels | ObjectiveKind::Reinforcement)
        },
        "with this objective, whose evaluations have the batches of training",
    ),
    unread(
        &["evaluation.early_stopping_threshold"],
        |run| run.evaluation.early_stopping_patience == 0,
        "unless `early_stopping_patience` is above 0",
    ),
    unread(
        &["evaluation.metric_for_best_model"],
        |run| !run.evaluation.compares(),
        "unless `load_best_model_at_end` or `early_stopping_patience` is set",
    ),
    unread(
        &["lora.lora_dropout", "lora.loraplus_lr_ratio", "lora.modules_to_save"],
        |run| run.lora.r == 0,
        "while `lora.r` is 0, which trains all weights",
    ),
    unread(
        &["memory.weight_codes"],
        |run| run.lora.load_in_4bit,
        "with `lora.load_in_4bit`, whose weights have no stored codes",
    ),
    unread(&["training.num_train_epochs"], |run| run.training.max_steps.is_some(), "where `max_steps` is set"),
    unread(
        &["training.label_smoothing_factor"],
        |run| run.preference.loss_type.is_some(),
        "with preferences; it is for the loss of texts",
    ),
    unread(
        &["training.label_smoothing_factor"],
        |run| run.distillation.is_on(),
        "with a teacher; it is for the loss of texts",
    ),
    unread(
        &["training.label_smoothing_factor"],
        |run| run.objective().of_examples().is_some(),
        "with examples; it is for the loss of texts",
    ),
    unread(&["ema.start", "ema.every", "ema.evaluate"], |run| run.ema.decay == 0.0, "while `ema.decay` is 0"),
    unread(
        &["embedding.temperature", "embedding.negatives", "embedding.gather_across_ranks"],
        |run| !run.embedding.is_on(),
        "without `embedding.pooling`",
    ),
    unread(OF_TEACHER, |run| !run.distillation.is_on(), "without `distillation.teacher` or `distillation.logits`"),
    unread(&["distillation.top_k"], |run| !run.distillation.is_stored(), "without `distillation.logits`"),
    unread(&["distillation.max_completion_length"], |run| !run.distillation.draws(), "while `distillation.lmbda` is 0"),
    unread(
        OF_REFERENCE,
        |run| run.preference.trains_reward_model(),
        "with loss_type bradley_terry, which has no reference model",
    ),
    unread(
        &["preference.reference_free", "preference.precompute_ref_log_probs"],
        |run| run.preference.is_without_reference(),
        "with loss_type cpo, simpo or orpo, which have no reference model",
    ),
    unread(
        &["preference.precompute_ref_log_probs"],
        |run| run.preference.loss_type.is_some() && run.preference.reference_free,
        "with `reference_free`, since there is no reference model",
    ),
    unread(
        &["sentinel.sentinel_policy"],
        |run| run.sentinel.sentinel_steps == 0 && !run.sentinel.compares_metric(),
        "while `sentinel_steps` is 0, without `sentinel_metric`",
    ),
    unread(OF_SENTINEL, |run| run.sentinel.sentinel_steps == 0, "while `sentinel_steps` is 0"),
    unread(
        &["sentinel.sentinel_metric_gap", "sentinel.sentinel_metric_return"],
        |run| !run.sentinel.compares_metric(),
        "without `sentinel_metric`",
    ),
    unread(
        &["sentinel.sentinel_sequences"],
        |run| run.sentinel.sentinel_steps == 0 && run.debug.debug_steps.is_empty(),
        "while `sentinel_steps` is 0, without `debug_steps`",
    ),
    unread(
        &["sentinel.sentinel_hold_steps"],
        |run| !matches!(run.sentinel.sentinel_policy, SentinelPolicy::Demote | SentinelPolicy::Bf16),
        "with this `sentinel_policy`; it is for demote and bf16",
    ),
    unread(
        &["alarms.max_skipped_steps"],
        |run| {
            let alarms = &run.alarms;
            alarms.non_finite_steps == NonFiniteSteps::Stop && alarms.grad_norm_spike != NormAlarmPolicy::Skip
        },
        "unless `non_finite_steps` or `grad_norm_spike` is \"skip\"",
    ),
    unread(OF_ROLLBACKS, |run| !run.alarms.rolls_back(), "without an alarm that is \"rollback\""),
    unread(
        &["debug.debug_tensors", "debug.dump_tensors"],
        |run| run.debug.debug_steps.is_empty(),
        "without `debug_steps`",
    ),
    unread(OF_ENVIRONMENT, |run| !run.reinforcement.environment.is_on(), "without `reinforcement.environment.command`"),
    unread(
        &["reinforcement.endpoint.max_staleness"],
        |run| !run.reinforcement.endpoint.is_on(),
        "without `reinforcement.endpoint.address`",
    ),
    unread(
        &["reinforcement.endpoint.address"],
        |run| !run.reinforcement.is_on(),
        "without `[[reinforcement.rewards]]`",
    ),
    unread(
        &["reinforcement.environment.command"],
        |run| !run.reinforcement.is_on(),
        "without `[[reinforcement.rewards]]`",
    ),
    unread(
        &["evaluation.num_generations", "evaluation.pass_reward", "logging.completions", "alarms.rollouts"],
        |run| !run.reinforcement.is_on(),
        "without `[[reinforcement.rewards]]`",
    ),
    unread(
        &["alarms.loss_spike"],
        |run| !run.objective().properties().loss_falls,
        "with `[[reinforcement.rewards]]`: the loss of a policy is about 0 in each step",
    ),
    unread(
        OF_VALUES,
        |run| run.reinforcement.value_loss().is_none(),
        "unless `reinforcement.advantage.estimator` is \"gae\"",
    ),
    unread(
        &["reinforcement.advantage.scale_rewards"],
        |run| run.reinforcement.value_loss().is_some(),
        "with estimator gae, whose advantages are divided by their standard deviation over all tokens of a generation",
    ),
    unread(OF_ROLLOUT_ALARMS, |run| !run.reinforcement.is_on(), "without `[[reinforcement.rewards]]`"),
    unread(OF_ROLLOUT_ALARMS, |run| run.alarms.rollouts == AlarmPolicy::Off, "while `rollouts` is \"off\""),
    unread(OF_CAST_ALARMS, |run| run.alarms.casts == AlarmPolicy::Off, "while `casts` is \"off\""),
    unread(OF_CAST_ALARMS, |run| run.logging.cast_statistics_steps == 0, "while `logging.cast_statistics_steps` is 0"),
    unread(&["alarms.collapsed_share"], |run| run.alarms.routers == AlarmPolicy::Off, "while `routers` is \"off\""),
    unread(
        &["alarms.collapsed_share"],
        |run| run.logging.cast_statistics_steps == 0,
        "while `logging.cast_statistics_steps` is 0",
    ),
    unread(
        &["logging.project", "logging.run_name"],
        |run| run.logging.report_to.iter().all(|kind| *kind == TrackerKind::Tensorboard),
        "without a tracker in `logging.report_to`",
    ),
    unread(
        &["generation.at_evaluations", "generation.max_new_tokens", "generation.temperature", "generation.top_p"],
        |run| run.generation.prompts.is_empty(),
        "without `generation.prompts`",
    ),
    unread(
        &["generation.top_p"],
        |run| run.generation.temperature == 0.0,
        "with temperature 0, which takes the most likely token",
    ),
];

impl RunConfig {
    /// Changed settings that have no effect, a sentence each.
    pub fn without_effect(&self) -> Vec<String> {
        let defaults: BTreeMap<String, Value> = RunConfig::default().flat().into_iter().collect();
        let changed = self.flat().into_iter().filter(|(key, value)| defaults.get(key) != Some(value));
        let reason = |key: &str| {
            let found = EFFECTS.iter().find(|effect| effect.keys.contains(&key) && (effect.is_unread)(self));
            found.map(|effect| effect.why.to_string()).or_else(|| self.unread_by_losses(key))
        };
        changed.filter_map(|(key, value)| Some(format!("`{key} = {value}` has no effect {}", reason(&key)?))).collect()
    }

    /// Whether a linear has one of these recipes.
    fn casts_by(&self, recipes: &[RecipeName]) -> bool {
        self.precision.recipes().any(|recipe| recipes.contains(&recipe))
    }
}

const OF_FP8: &[&str] = &[
    "precision.fp8_format",
    "precision.power_of_two_scales",
    "precision.accumulation.fprop_accumulation",
    "precision.accumulation.dgrad_accumulation",
    "precision.accumulation.wgrad_accumulation",
    "precision.exceptions.high_precision_products",
    "precision.exceptions.high_precision_layers",
    "precision.exceptions.first_layers_bf16",
    "precision.exceptions.last_layers_bf16",
    "precision.exceptions.skip_slow_linears",
    "memory.weight_codes",
    "logging.cast_statistics_steps",
];

const OF_DELAYED: &[&str] = &[
    "precision.delayed.amax_history_len",
    "precision.delayed.amax_compute_algo",
    "precision.delayed.margin",
    "precision.delayed.interval",
    "precision.delayed.non_finite",
    "precision.delayed.first_step",
];

const OF_TEACHER: &[&str] =
    &["distillation.beta", "distillation.temperature", "distillation.lmbda", "distillation.teacher_recipe"];

const OF_VALUES: &[&str] = &[
    "reinforcement.advantage.gamma",
    "reinforcement.advantage.lambda",
    "reinforcement.loss.vf_coef",
    "reinforcement.loss.cliprange_value",
];

const OF_STRAGGLERS: &[&str] = &["parallel.straggler_ratio", "recovery.stragglers"];

const OF_RECOVERY: &[&str] = &[
    "recovery.spares",
    "recovery.min_hosts",
    "recovery.stragglers",
    "recovery.memory_dir",
    "recovery.max_recoveries",
    "recovery.silence_timeout",
    "recovery.host_timeout",
    "recovery.start_timeout",
];

const OF_PIPELINE: &[&str] = &["parallel.pipeline_schedule", "parallel.pipeline_stages"];

const OF_SENTINEL: &[&str] =
    &["sentinel.sentinel_hold_steps", "sentinel.sentinel_loss_gap", "sentinel.sentinel_cosine"];

const OF_ROLLBACKS: &[&str] = &["alarms.rollback.rollback_steps", "alarms.rollback.max_rollbacks"];

const OF_CAST_ALARMS: &[&str] =
    &["alarms.cast_bounds.saturated_share", "alarms.cast_bounds.underflowed_share", "alarms.cast_bounds.amax_growth"];

const OF_ENVIRONMENT: &[&str] = &[
    "reinforcement.environment.max_turns",
    "reinforcement.environment.processes",
    "reinforcement.environment.batch_size",
    "reinforcement.environment.timeout",
    "reinforcement.environment.attempts",
    "reinforcement.environment.on_error",
];

const OF_ROLLOUT_ALARMS: &[&str] = &[
    "alarms.rollout_bounds.max_mult_prob_error",
    "alarms.rollout_bounds.min_entropy",
    "alarms.rollout_bounds.max_clipped_ratio",
    "alarms.rollout_bounds.max_zero_std_ratio",
    "alarms.rollout_bounds.plateau_steps",
];

const OF_FP16: &[&str] =
    &["precision.fp16.initial_loss_scale", "precision.fp16.loss_scale_window", "precision.fp16.min_loss_scale"];

#[cfg(test)]
mod tests {
    use super::super::keys;
    use super::*;

    #[test]
    fn every_key_is_a_setting() {
        for key in EFFECTS.iter().flat_map(|effect| effect.keys) {
            assert!(keys::find(key).is_some(), "{key}");
        }
    }

    #[test]
    fn settings_without_effect_are_named_with_the_reason() {
        let mut config = RunConfig::default();
        assert_eq!(config.without_effect(), [""; 0]);
        (config.precision.delayed.margin, config.precision.exceptions.first_layers_bf16) = (2, 1);
        config.evaluation.early_stopping_threshold = 0.1;
        let told = |config: &RunConfig| config.without_effect().join("\n");
        let text = told(&config);
        for expected in [
            "`precision.delayed.margin = 2` has no effect unless a linear has recipe fp8-delayed",
            "`precision.exceptions.first_layers_bf16 = 1` has no effect unless a linear has an FP8 recipe",
            "`evaluation.early_stopping_threshold = 0.1` has no effect unless `early_stopping_patience` is above 0",
        ] {
            assert!(text.contains(expected), "{text}");
        }
        config.evaluation.early_stopping_threshold = 0.0;
        config.precision.recipe = RecipeName::Fp8Current;
        assert_eq!(
            told(&config),
            "`precision.delayed.margin = 2` has no effect unless a linear has recipe fp8-delayed"
        );
        config.precision.recipe = RecipeName::Fp8Delayed;
        assert_eq!(config.without_effect(), [""; 0]);
    }
}
