//! Checks of `[sentinel]`.

use crate::RunConfig;
use crate::demands::Problems;
use crate::interval::Interval;
use ottava_recipe::RecipeName;

impl RunConfig {
    /// Checks `[sentinel]`.
    pub(super) fn check_sentinel(&self, problems: &mut Problems) {
        let s = &self.sentinel;
        let compares_passes = self.objective().properties().compares_passes;
        problems.demand(
            s.sentinel_steps == 0 || self.precision.recipes().any(|recipe| RecipeName::FP8.contains(&recipe)),
            format!(
                "`sentinel.sentinel_steps` is {}, and recipe {} has nothing in FP8 to compare with BF16; set it to 0, or choose an FP8 recipe",
                s.sentinel_steps,
                self.precision.recipe.as_str()
            ),
        );
        problems.demand(
            s.sentinel_steps == 0 || compares_passes,
            "`sentinel.sentinel_steps` is set, and the sentinel does not compare losses of preferences; set it to 0",
        );
        problems.demand(
            s.repeat_steps == 0 || compares_passes,
            "`sentinel.repeat_steps` is set, and losses of preferences are not computed twice; set it to 0",
        );
        problems.demand(
            self.debug.debug_steps.is_empty() || compares_passes,
            "`debug.debug_steps` is set, and tensors of losses of preferences are not recorded; leave it empty",
        );
        if s.compares_metric() {
            problems.demand(
                self.precision.recipes().any(|recipe| RecipeName::FP8.contains(&recipe)),
                format!(
                    "`sentinel.sentinel_metric` is set, and recipe {} has nothing in FP8 to compare with BF16; remove it, or choose an FP8 recipe",
                    self.precision.recipe.as_str()
                ),
            );
            problems.demand(
                self.evaluates() && self.evaluation.eval_steps != Interval::End,
                "`sentinel.sentinel_metric` is set, and the run evaluates only at its start and end or not at all; set `evaluation.eval_steps` to a number of steps, and `evaluation.tasks`, `data.val_files` or `data.val_set_size`",
            );
            problems.demand(
                !self.reinforcement.is_on() || !self.metrics_of_rows().contains(&s.sentinel_metric),
                format!(
                    "`sentinel.sentinel_metric` is {:?}, and evaluations of held-out prompts draw completions in one precision; name a metric of a task",
                    s.sentinel_metric
                ),
            );
            problems.demand(
                s.sentinel_metric_gap > 0.0 && s.sentinel_metric_return <= s.sentinel_metric_gap,
                format!(
                    "`sentinel.sentinel_metric_gap` is {} and `sentinel_metric_return` {}; the gap is above 0, and the bound of a return is at most as large",
                    s.sentinel_metric_gap, s.sentinel_metric_return
                ),
            );
        }
        let rows = self.training.per_device_train_batch_size;
        problems.demand(
            (1..=rows).contains(&s.sentinel_sequences),
            format!(
                "`sentinel.sentinel_sequences` is {}; a micro-batch has {rows} sequences (`per_device_train_batch_size`), of which a comparison reads 1 or more",
                s.sentinel_sequences
            ),
        );
        problems.demand(
            s.sentinel_hold_steps >= s.sentinel_steps.max(1),
            format!(
                "`sentinel.sentinel_hold_steps` is {}, and a comparison follows after {} steps (`sentinel_steps`); hold for at least as many",
                s.sentinel_hold_steps, s.sentinel_steps
            ),
        );
        problems.demand(
            s.sentinel_loss_gap > 0.0,
            format!("`sentinel.sentinel_loss_gap` is {}; it is a number of nats above 0", s.sentinel_loss_gap),
        );
        problems.demand(
            (-1.0..1.0).contains(&s.sentinel_cosine),
            format!("`sentinel.sentinel_cosine` is {}; it is a cosine from -1 to below 1", s.sentinel_cosine),
        );
    }
}
