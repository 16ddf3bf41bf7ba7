//! Checks of evaluations: of tasks, and of a run that compares its evaluations.

use crate::RunConfig;
use crate::demands::{Problems, from_zero};
use crate::interval::Interval;
use ottava_common::{Error, Result};

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
            format!("`evaluation.{key}` is set, and the run has no validation documents and no tasks; set `data.val_files`, `data.val_set_size` or `evaluation.tasks`"),
        );
        problems.demand(
            from_zero(e.early_stopping_threshold),
            "`evaluation.early_stopping_threshold` must not be negative or infinite",
        );
    }

    /// Checks the names of metrics in a run without tasks. The files of tasks say which metrics a task has, so [`RunConfig::expect_metrics`] checks the
    /// names in a run with tasks.
    pub(super) fn check_metrics(&self, problems: &mut Problems) {
        if self.validates() && self.evaluation.tasks.is_empty() {
            problems.0.extend(self.unknown_metrics(&[]));
        }
    }

    /// Checks the names of metrics in a run whose tasks have the metrics `of_tasks`.
    ///
    /// Errors with [`Error::Config`] for a metric by which the run cannot compare evaluations.
    pub fn expect_metrics(&self, of_tasks: &[String]) -> Result<()> {
        self.unknown_metrics(of_tasks).next().map_or(Ok(()), |problem| Err(Error::Config(problem)))
    }

    /// Returns a sentence for each setting that names a metric by which the run cannot compare evaluations.
    fn unknown_metrics(&self, of_tasks: &[String]) -> impl Iterator<Item = String> {
        let (e, s) = (&self.evaluation, &self.sentinel);
        let settings = [
            ("evaluation.metric_for_best_model", &e.metric_for_best_model, e.compares()),
            ("sentinel.sentinel_metric", &s.sentinel_metric, s.compares_metric()),
        ];
        let known = [self.metrics_of_rows(), of_tasks.to_vec()].concat();
        settings.into_iter().filter(|(_, _, is_read)| *is_read).filter_map(move |(key, name, _)| {
            let list = known.join(", ");
            (!known.contains(name)).then(|| format!("`{key}` is {name:?}; an evaluation of this run has {list}"))
        })
    }

    /// Returns the metrics of held-out rows by which the run can compare evaluations. Other metrics of held-out rows, such as
    /// margins, have no direction that is known.
    pub(super) fn metrics_of_rows(&self) -> Vec<String> {
        if !self.validates() {
            return Vec::new();
        }
        let properties = self.objective().properties();
        if !properties.evaluates_texts {
            let others = properties.metrics.iter().map(|(name, _)| *name);
            return ["loss"].into_iter().chain(others).map(|name| format!("eval_{name}")).collect();
        }
        let validated = self
            .datasets()
            .into_iter()
            .filter(|set| !set.name.is_empty() && (self.data.val_set_size > 0.0 || !set.val_files.is_empty()));
        let prefixes = [String::new()].into_iter().chain(validated.map(|set| format!("{}_", set.name)));
        // With label smoothing, the loss is not a likelihood of the text.
        let is_smoothed = properties.smooths_labels && self.training.label_smoothing_factor > 0.0;
        let of_text = &["loss", "bits_per_byte"][..if is_smoothed { 1 } else { 2 }];
        prefixes.flat_map(|of| of_text.iter().map(move |metric| format!("eval_{of}{metric}"))).collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::tests::{SMALL, load};

    #[test]
    fn tasks_need_likelihoods_and_the_metric_of_the_sentinel_needs_evaluations() {
        let set = |settings: &[&str]| load(SMALL, settings);
        let tasks = "tasks=[\"words.toml\"]";
        let best = ["load_best_model_at_end=true", "metric_for_best_model=eval_words_acc"];
        set(&[&[tasks, "val_set_size=0", "eval_steps=5"][..], &best].concat()).unwrap();
        let watched = ["recipe=fp8-row", "eval_steps=5", "sentinel_metric=eval_words_acc", "sentinel_policy=bf16"];
        let config = set(&[&[tasks][..], &watched].concat()).unwrap();
        assert_eq!(config.without_effect(), [""; 0]);
        let unread = set(&["sentinel_metric_gap=0.5"]).unwrap().without_effect();
        assert!(unread[0].contains("`sentinel.sentinel_metric_gap = 0.5` has no effect without"), "{unread:?}");
        let smoothed = ["metric_for_best_model=eval_bits_per_byte", "label_smoothing_factor=0.1"];
        for (settings, expected) in [
            (
                &[&[tasks, "label_smoothing_factor=0.1"][..], &[]],
                "`training.label_smoothing_factor` smooths the losses",
            ),
            (&[&[tasks, "preference.loss_type=bradley_terry"][..], &[]], "trains a reward model"),
            (&[&["val_set_size=0", "eval_steps=5"][..], &best], "the run has no validation documents"),
            (&[&watched[..], &["recipe=bf16"]], "nothing in FP8 to compare with BF16"),
            (&[&watched[..], &["eval_steps=end"]], "the run evaluates only at its start and end or not at all"),
            (&[&watched[..], &["val_set_size=0"]], "the run evaluates only at its start and end or not at all"),
            (&[&watched[..], &["sentinel_metric_return=0.5"]], "the bound of a return is at most as large"),
            (
                &[&["recipe=fp8-row", "eval_steps=5", "sentinel_metric=eval_margins"][..], &[]],
                "`sentinel.sentinel_metric` is \"eval_margins\"; an evaluation of this run has eval_loss, eval_bits_per_byte",
            ),
            (
                &[&smoothed[..], &["eval_steps=5", "load_best_model_at_end=true"]],
                "is \"eval_bits_per_byte\"; an evaluation of this run has eval_loss",
            ),
        ] {
            let error = set(&settings.concat()).unwrap_err().to_string();
            assert!(error.contains(expected), "{settings:?}: {error}");
        }
        let rewards = format!("{SMALL}[[reinforcement.rewards]]\ntype = \"math\"\n");
        let error = load(&rewards, &["recipe=fp8-row", "eval_steps=5", "sentinel_metric=eval_loss"]).unwrap_err();
        assert!(
            error.to_string().contains("evaluations of held-out prompts draw completions in one precision"),
            "{error}"
        );
        let of_tasks = ["eval_words_acc".to_string()];
        config.expect_metrics(&of_tasks).unwrap();
        let error = config.expect_metrics(&[]).unwrap_err().to_string();
        assert!(
            error.contains("`sentinel.sentinel_metric` is \"eval_words_acc\"; an evaluation of this run"),
            "{error}"
        );
    }
}
