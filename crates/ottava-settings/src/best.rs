//! Checks of a run that compares its evaluations.

use crate::RunConfig;
use crate::demands::{Problems, from_zero};
use crate::interval::Interval;

impl RunConfig {
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
            self.validates(),
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
        problems.demand(
            metrics.contains(&e.metric_for_best_model),
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
