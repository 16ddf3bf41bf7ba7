//! Checks of evaluations: of tasks, and of a run that compares its evaluations.

use crate::RunConfig;
use crate::demands::{Problems, from_zero};
use crate::interval::Interval;

impl RunConfig {
    /// Checks the settings that change the distribution of the model. Tasks compute likelihoods of this distribution.
    pub(super) fn check_tasks(&self, problems: &mut Problems) {
        if self.evaluation.tasks.is_empty() {
            return;
        }
        problems.demand(
            self.training.label_smoothing_factor == 0.0 || !self.objective().properties().smooths_labels,
            "`evaluation.tasks` computes likelihoods, and `training.label_smoothing_factor` smooths the losses of evaluations; set it to 0",
        );
        problems.demand(
            !self.preference.trains_reward_model(),
            "`evaluation.tasks` is for language models, and `preference.loss_type` trains a reward model; remove one of them",
        );
        let temperature = self.reinforcement.sampling.temperature;
        problems.demand(
            !self.reinforcement.is_on() || temperature == 1.0,
            format!("`evaluation.tasks` computes likelihoods at temperature 1, and `reinforcement.sampling.temperature` is {temperature}; set it to 1"),
        );
    }

    /// Checks the settings that comparing evaluations needs.
    pub(super) fn check_best(&self, problems: &mut Problems) {
        let e = &self.evaluation;
        if !e.compares() {
            return;
        }
        let key = if e.load_best_model_at_end { "load_best_model_at_end" } else { "early_stopping_patience" };
        problems.demand(
            e.eval_steps != Interval::End,
            format!("`evaluation.{key}` is set and `evaluation.eval_steps` is \"end\", which evaluates only at the start and the end; set it to the steps between evaluations"),
        );
        problems.demand(
            self.evaluates(),
            format!("`evaluation.{key}` is set, and the run has no validation documents; set `data.val_files` or `data.val_set_size`"),
        );
        let validated = self
            .datasets()
            .into_iter()
            .filter(|set| !set.name.is_empty() && (self.data.val_set_size > 0.0 || !set.val_files.is_empty()));
        let prefixes = [String::new()].into_iter().chain(validated.map(|set| format!("{}_", set.name)));
        // With label smoothing, the loss is not a likelihood of the text.
        let of_text = &["loss", "bits_per_byte"][..if self.training.label_smoothing_factor > 0.0 { 1 } else { 2 }];
        let metrics: Vec<String> =
            prefixes.flat_map(|of| of_text.iter().map(move |metric| format!("eval_{of}{metric}"))).collect();
        // The files of tasks say which metrics a task has. The run compares the names before its first step.
        let may_be_of_task = !e.tasks.is_empty() && e.metric_for_best_model.starts_with("eval_");
        problems.demand(
            metrics.contains(&e.metric_for_best_model) || may_be_of_task,
            format!(
                "`evaluation.metric_for_best_model` is {:?}; an evaluation of this run has {}",
                e.metric_for_best_model,
                metrics.join(", ")
            ),
        );
        problems.demand(
            from_zero(e.early_stopping_threshold),
            "`evaluation.early_stopping_threshold` must not be negative or infinite",
        );
    }
}
