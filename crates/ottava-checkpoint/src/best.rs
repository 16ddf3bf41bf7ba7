//! The best evaluation of a run.

use serde::{Deserialize, Serialize};

/// The evaluation with the lowest value of a metric so far, which checkpoints save.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    /// The number of steps before the evaluation.
    pub step: u64,
    /// The name of the metric.
    pub metric: String,
    /// The value of the metric.
    pub value: f64,
    /// The number of consecutive evaluations, up to now, that did not improve the previous best value by more than a threshold.
    pub without_improvement: u64,
}

/// Which values of a metric are better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// Lower values, such as of a loss.
    Lower,
    /// Higher values, such as of an accuracy.
    Higher,
}

impl Best {
    /// Compares `value` of `metric`, evaluated after `step`, with the `best` so far. If `value` is better, or if `best` has another metric, it becomes
    /// the best. Returns whether it became the best.
    ///
    /// If an evaluation is not better by more than `threshold`, it counts as an evaluation without improvement, as in transformers'
    /// `EarlyStoppingCallback`.
    pub fn update(
        best: &mut Option<Best>,
        step: u64,
        metric: &str,
        (value, better): (f64, Better),
        threshold: f64,
    ) -> bool {
        let Some(before) = best.as_mut().filter(|before| before.metric == metric) else {
            *best = Some(Best { step, metric: metric.to_string(), value, without_improvement: 0 });
            return true;
        };
        let better_by = match better {
            Better::Lower => before.value - value,
            Better::Higher => value - before.value,
        };
        before.without_improvement = if better_by > threshold { 0 } else { before.without_improvement + 1 };
        if better_by > 0.0 {
            (before.step, before.value) = (step, value);
        }
        better_by > 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_value_is_kept_and_small_improvements_count_as_none() {
        let mut best = None;
        let evaluations =
            [(3.0, true, 0), (2.0, true, 0), (1.95, true, 1), (2.5, false, 2), (1.94, true, 3), (1.5, true, 0)];
        for (step, (value, is_best, without)) in (1..).zip(evaluations) {
            assert_eq!(Best::update(&mut best, step, "eval_loss", (value, Better::Lower), 0.1), is_best, "{value}");
            let best = best.as_ref().unwrap();
            assert_eq!((best.step == step, best.without_improvement), (is_best, without), "{value}");
        }
        let last = best.clone().unwrap();
        assert_eq!((last.step, last.value, last.without_improvement), (6, 1.5, 0));
        // An equal value is not an improvement, whatever the threshold is.
        assert!(!Best::update(&mut best, 7, "eval_loss", (1.5, Better::Lower), 0.0));
        assert_eq!(best.as_ref().unwrap().without_improvement, 1);
        // Values of different metrics are not compared.
        assert!(Best::update(&mut best, 8, "eval_words_acc", (0.5, Better::Higher), 0.0));
        assert!(!Best::update(&mut best, 9, "eval_words_acc", (0.4, Better::Higher), 0.0));
        assert!(Best::update(&mut best, 10, "eval_words_acc", (0.6, Better::Higher), 0.0));
        assert_eq!(best.unwrap().value, 0.6);
    }
}
