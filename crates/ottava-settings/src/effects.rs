//! Settings without effect, because of other settings.

use crate::{OptimizerName, RunConfig};
use ottava_data::{BadRecord, Packing};
use ottava_parallel::optim::SchedulerType;
use ottava_recipe::RecipeName;
use ottava_sentinel::{AlarmPolicy, NonFiniteSteps, SentinelPolicy};
use toml::Value;

impl RunConfig {
    /// Changed settings that have no effect, a sentence each.
    pub fn without_effect(&self) -> Vec<String> {
        let changed: Vec<(String, Value)> = self
            .flat()
            .into_iter()
            .zip(RunConfig::default().flat())
            .filter(|(now, default)| now != default)
            .map(|(now, _)| now)
            .collect();
        let reason =
            |key: &str| self.reasons().into_iter().find(|(keys, _)| keys.contains(&key)).map(|(_, reason)| reason);
        let sentence =
            |(key, value): (String, Value)| Some(format!("`{key} = {value}` has no effect {}", reason(&key)?));
        changed.into_iter().filter_map(sentence).collect()
    }

    /// Keys without effect in this run, and why.
    fn reasons(&self) -> Vec<(&'static [&'static str], String)> {
        let (recipe, t) = (self.precision.recipe, &self.training);
        let lacks = |names: &[RecipeName]| !self.precision.recipes().any(|recipe| names.contains(&recipe));
        let mut reasons: Vec<(&[&str], String)> = Vec::new();
        let of_recipe = format!("with recipe {}", recipe.as_str());
        if lacks(&RecipeName::FP8) {
            reasons.push((OF_FP8, format!("{of_recipe}, which casts nothing to FP8")));
        }
        if lacks(&[RecipeName::Fp8Delayed]) {
            reasons.push((OF_DELAYED, format!("{of_recipe}; it is for fp8-delayed")));
        }
        if lacks(&[RecipeName::Fp8Block]) {
            reasons.push((&["precision.wgrad_blocks"], format!("{of_recipe}; it is for fp8-block")));
        }
        if recipe != RecipeName::Fp16 {
            reasons.push((OF_FP16, format!("{of_recipe}; it is for fp16")));
        }
        for (keys, reader, name) in [
            (&["training.decay_steps"][..], SchedulerType::WarmupStableDecay, "warmup_stable_decay"),
            (&["training.lr_num_cycles"], SchedulerType::CosineWithRestarts, "cosine_with_restarts"),
            (&["training.lr_power"], SchedulerType::Polynomial, "polynomial"),
        ] {
            if t.lr_scheduler_type != reader {
                reasons.push((keys, format!("with this `lr_scheduler_type`; it is for {name}")));
            }
        }
        if !t.lr_scheduler_type.has_minimum() {
            let text = "with this `lr_scheduler_type`, which has no lowest learning rate";
            reasons.push((&["training.min_learning_rate"], text.into()));
        }
        let name = self.optimizer.name;
        for (keys, readers) in [
            (OF_ADAMW, &[OptimizerName::Adamw, OptimizerName::Muon][..]),
            (OF_MUON, &[OptimizerName::Muon]),
            (OF_LION, &[OptimizerName::Lion]),
        ] {
            if !readers.contains(&name) {
                let readers: Vec<_> = readers.iter().map(|reader| reader.as_str()).collect();
                reasons.push((keys, format!("with optimizer {}; it is for {}", name.as_str(), readers.join(" and "))));
            }
        }
        if self.data.packing == Packing::Wrapped {
            let text = "with packing `wrapped`, which cuts documents at the ends of rows";
            reasons.push((&["data.excess_length_strategy"], text.into()));
        }
        if self.parallel.pipeline == 1 {
            reasons.push((OF_PIPELINE, "with `parallel.pipeline` = 1".into()));
        }
        if t.warmup_ratio > 0.0 {
            reasons.push((&["training.warmup_steps"], "where `warmup_ratio` is set".into()));
        }
        if self.datasets().iter().all(|set| !set.val_files.is_empty()) {
            reasons.push((&["data.val_set_size"], "where `val_files` are set".into()));
        }
        if self.data.on_bad_record == BadRecord::Error {
            reasons.push((&["data.max_bad_records"], "unless `on_bad_record` is \"skip\"".into()));
        }
        if t.early_stopping_patience == 0 {
            let text = "unless `early_stopping_patience` is above 0";
            reasons.push((&["training.early_stopping_threshold"], text.into()));
        }
        if !t.compares_evaluations() {
            let text = "unless `load_best_model_at_end` or `early_stopping_patience` is set";
            reasons.push((&["training.metric_for_best_model"], text.into()));
        }
        if t.max_steps > 0 {
            reasons.push((&["training.num_train_epochs"], "where `max_steps` is set".into()));
        }
        self.reasons_of_preference(&mut reasons);
        if self.sentinel.sentinel_steps == 0 {
            reasons.push((OF_SENTINEL, "while `sentinel_steps` is 0".into()));
            if self.debug.debug_steps.is_empty() {
                reasons.push((
                    &["sentinel.sentinel_sequences"],
                    "while `sentinel_steps` is 0, without `debug_steps`".into(),
                ));
            }
        } else if !matches!(self.sentinel.sentinel_policy, SentinelPolicy::Demote | SentinelPolicy::Bf16) {
            let text = "with this `sentinel_policy`; it is for demote and bf16";
            reasons.push((&["sentinel.sentinel_hold_steps"], text.into()));
        }
        let alarms = &self.alarms;
        if alarms.non_finite_steps == NonFiniteSteps::Stop && alarms.grad_norm_spike != AlarmPolicy::Skip {
            let text = "unless `non_finite_steps` or `grad_norm_spike` is \"skip\"";
            reasons.push((&["alarms.max_skipped_steps"], text.into()));
        }
        if !alarms.rolls_back() {
            reasons.push((OF_ROLLBACKS, "without an alarm that is \"rollback\"".into()));
        }
        if self.debug.debug_steps.is_empty() {
            reasons.push((&["debug.debug_tensors", "debug.dump_tensors"], "without `debug_steps`".into()));
        }
        if alarms.casts == AlarmPolicy::Off {
            reasons.push((OF_CAST_ALARMS, "while `casts` is \"off\"".into()));
        } else if self.training.cast_statistics_steps == 0 {
            reasons.push((OF_CAST_ALARMS, "while `training.cast_statistics_steps` is 0".into()));
        }
        if alarms.routers == AlarmPolicy::Off {
            reasons.push((&["alarms.collapsed_share"], "while `routers` is \"off\"".into()));
        } else if self.training.cast_statistics_steps == 0 {
            reasons.push((&["alarms.collapsed_share"], "while `training.cast_statistics_steps` is 0".into()));
        }
        if self.generation.prompts.is_empty() {
            let keys = &["generation.max_new_tokens", "generation.temperature", "generation.top_p"];
            reasons.push((keys, "without `generation.prompts`".into()));
        } else if self.generation.temperature == 0.0 {
            reasons.push((&["generation.top_p"], "with temperature 0, which takes the most likely token".into()));
        }
        reasons
    }
}

const OF_FP8: &[&str] = &[
    "precision.fp8_format",
    "precision.power_of_two_scales",
    "precision.fprop_accumulation",
    "precision.dgrad_accumulation",
    "precision.wgrad_accumulation",
    "precision.high_precision_products",
    "precision.high_precision_layers",
    "precision.first_layers_bf16",
    "precision.last_layers_bf16",
    "precision.skip_slow_linears",
    "memory.weight_codes",
    "training.cast_statistics_steps",
];

const OF_DELAYED: &[&str] = &[
    "precision.amax_history_len",
    "precision.amax_compute_algo",
    "precision.margin",
    "precision.interval",
    "precision.non_finite",
    "precision.first_step",
];

const OF_ADAMW: &[&str] = &["training.adam_beta1", "training.adam_beta2", "training.adam_epsilon"];

const OF_PIPELINE: &[&str] = &["parallel.pipeline_schedule", "parallel.pipeline_stages"];

const OF_MUON: &[&str] = &["training.muon_momentum", "training.muon_adjust_lr_fn"];

const OF_LION: &[&str] = &["training.lion_beta1", "training.lion_beta2"];

const OF_SENTINEL: &[&str] = &[
    "sentinel.sentinel_policy",
    "sentinel.sentinel_hold_steps",
    "sentinel.sentinel_loss_gap",
    "sentinel.sentinel_cosine",
];

const OF_ROLLBACKS: &[&str] = &["alarms.rollback_steps", "alarms.max_rollbacks"];

const OF_CAST_ALARMS: &[&str] = &["alarms.saturated_share", "alarms.underflowed_share", "alarms.amax_growth"];

const OF_FP16: &[&str] = &["precision.initial_loss_scale", "precision.loss_scale_window", "precision.min_loss_scale"];

#[cfg(test)]
mod tests {
    use super::super::objective::{OF_LOSSES, OF_REFERENCE};
    use super::*;

    #[test]
    fn every_key_is_a_setting() {
        let known = super::super::names::Known::new().0;
        let of_preferences = [OF_LOSSES.concat(), OF_REFERENCE.to_vec()].concat();
        let others = [OF_FP8, OF_DELAYED, OF_FP16, OF_ADAMW, OF_MUON, OF_LION, OF_PIPELINE, OF_SENTINEL].concat();
        let others = [others, [OF_ROLLBACKS, OF_CAST_ALARMS].concat()].concat();
        for key in others.into_iter().chain(of_preferences) {
            assert!(known.contains(&key.to_string()), "{key}");
        }
    }

    #[test]
    fn settings_without_effect_are_named_with_the_reason() {
        let mut config = RunConfig::default();
        assert_eq!(config.without_effect(), [""; 0]);
        config.precision.margin = 2;
        config.precision.first_layers_bf16 = 1;
        config.training.decay_steps = 5;
        config.training.lion_beta2 = 0.5;
        let told = |config: &RunConfig| config.without_effect().join("\n");
        let text = told(&config);
        assert!(text.contains("`precision.margin = 2` has no effect with recipe bf16"), "{text}");
        assert!(text.contains("`precision.first_layers_bf16 = 1` has no effect with recipe bf16, which casts nothing"));
        assert!(text.contains("`training.decay_steps = 5` has no effect with this `lr_scheduler_type`"));
        assert!(
            text.contains("`training.lion_beta2 = 0.5` has no effect with optimizer adamw; it is for lion"),
            "{text}"
        );
        config.optimizer.name = OptimizerName::Lion;
        config.training.adam_beta1 = 0.5;
        assert!(
            told(&config)
                .contains("`training.adam_beta1 = 0.5` has no effect with optimizer lion; it is for adamw and muon")
        );
        (config.optimizer.name, config.training.adam_beta1) = (OptimizerName::Adamw, 0.9);
        config.training.lion_beta2 = 0.99;
        config.precision.recipe = RecipeName::Fp8Current;
        assert!(
            told(&config)
                .contains("`precision.margin = 2` has no effect with recipe fp8-current; it is for fp8-delayed")
        );
        assert!(!told(&config).contains("first_layers"));
        config.precision.recipe = RecipeName::Fp8Delayed;
        config.training.lr_scheduler_type = SchedulerType::WarmupStableDecay;
        assert_eq!(config.without_effect(), [""; 0]);
    }
}
