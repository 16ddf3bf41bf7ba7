//! What an evaluation of a run says.

use crate::step::Metrics;
use ottava_checkpoint::Better;
use ottava_common::error::{Error, Result};
use ottava_tasks::Measured;
use serde_json::{Map, Value, json};

/// The evaluation of rows that are held out.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// The mean loss.
    pub loss: f64,
    /// What its objective has besides the loss.
    pub metrics: Metrics,
}

/// The metrics of held-out rows by which evaluations are compared, and which values are better.
const OF_ROWS: [(&str, Better); 7] = [
    ("loss", Better::Lower),
    ("bits_per_byte", Better::Lower),
    ("accuracy", Better::Higher),
    ("f1", Better::Higher),
    ("pearson", Better::Higher),
    ("mse", Better::Lower),
    ("mrr", Better::Higher),
];

/// The prefix of metrics of the average of the weights.
const OF_AVERAGE: &str = "ema_";

/// A metric of evaluations by the recipe and in BF16, with the same weights.
#[derive(Clone, Debug, PartialEq)]
pub struct ComparedMetric {
    /// The name of the metric.
    pub metric: String,
    /// The metric by the recipe; NaN if losses by the recipe are not finite.
    pub by_recipe: f64,
    /// The metric in BF16.
    pub high: f64,
    /// How much worse the metric is by the recipe: negative if it is better, and infinite if it is not finite.
    pub gap: f64,
}

/// The evaluation of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Validation {
    /// The evaluation of all rows; `None` if no rows are held out.
    pub all: Option<Evaluation>,
    /// The evaluation of each data set that has a name, by name.
    pub sets: Vec<(String, Evaluation)>,
    /// The metrics of each task, by name.
    pub tasks: Vec<(String, Vec<Measured>)>,
    /// The evaluation of all rows by the average of the weights, if the run has one.
    pub average: Option<Evaluation>,
    /// The metric of the sentinel, if the run has one.
    pub compared: Option<ComparedMetric>,
}

impl Validation {
    /// Compares `metric`, whose setting is `key`, by the recipe and in high precision. `by_recipe` is `None` if losses by the recipe are not finite.
    ///
    /// Errors as [`Validation::finite_metric`] of `high`.
    pub fn compare(
        by_recipe: Option<&Validation>,
        high: &Validation,
        key: &str,
        metric: &str,
    ) -> Result<ComparedMetric> {
        let (high, better) = high.finite_metric(key, metric)?;
        let by_recipe = by_recipe.map_or(Ok(f64::NAN), |found| found.metric(key, metric).map(|(value, _)| value))?;
        let gap = match better {
            _ if !by_recipe.is_finite() => f64::INFINITY,
            Better::Lower => by_recipe - high,
            Better::Higher => high - by_recipe,
        };
        Ok(ComparedMetric { metric: metric.into(), by_recipe, high, gap })
    }

    /// Whether the evaluation has metrics besides the metric of the sentinel.
    pub fn has_values(&self) -> bool {
        self.all.is_some() || !self.tasks.is_empty()
    }

    /// The evaluation of the only data set, which has no name.
    pub fn of_one(all: Evaluation) -> Validation {
        Validation { all: Some(all), ..Validation::default() }
    }

    /// Returns the metric `name`, which the setting `key` names, and says which values of it are better.
    ///
    /// Errors with [`Error::Config`] if evaluations cannot be compared by the metric, and with [`Error::NonFinite`] if its value is infinite or NaN.
    pub fn finite_metric(&self, key: &str, name: &str) -> Result<(f64, Better)> {
        let (value, better) = self.metric(key, name)?;
        match value.is_finite() {
            true => Ok((value, better)),
            false => Err(Error::NonFinite(format!(
                "{name}, which `{key}` names, is {value}, so evaluations cannot be compared by it; choose another metric, or lower the learning rate"
            ))),
        }
    }

    /// Returns the metric `name`, which may be infinite or NaN.
    fn metric(&self, key: &str, name: &str) -> Result<(f64, Better)> {
        let known = self.compared_metrics();
        let found = known.iter().find(|(known, ..)| known == name).map(|(_, value, better)| (*value, *better));
        found.ok_or_else(|| {
            let names: Vec<_> = known.iter().map(|(name, ..)| name.as_str()).collect();
            Error::Config(format!("`{key}` is {name:?}; an evaluation of this run has {}", names.join(", ")))
        })
    }

    /// The metrics by which evaluations are compared, with their names, and which values are better.
    fn compared_metrics(&self) -> Vec<(String, f64, Better)> {
        // The average of the weights begins after some steps, so it is not compared.
        let of_rows = self.numbers().filter(|(prefix, ..)| prefix != OF_AVERAGE).filter_map(|(prefix, name, value)| {
            let (_, better) = OF_ROWS.into_iter().find(|(known, _)| *known == name)?;
            Some((format!("eval_{prefix}{name}"), value, better))
        });
        let of_tasks = self.measured().map(|(task, measured)| {
            let better = if measured.higher_is_better { Better::Higher } else { Better::Lower };
            (metric_of_task(task, measured.name), measured.value, better)
        });
        of_rows.chain(of_tasks).collect()
    }

    /// All metrics by the names under which they are recorded.
    pub fn metrics(&self) -> Map<String, Value> {
        let of_rows = self.numbers().map(|(prefix, name, value)| (format!("eval_{prefix}{name}"), json!(value)));
        let mut metrics: Map<String, Value> = of_rows.collect();
        for (task, measured) in self.measured() {
            let name = metric_of_task(task, measured.name);
            let stderr = measured.stderr.map(|stderr| (format!("{name}_stderr"), json!(stderr)));
            metrics.insert(name, json!(measured.value));
            metrics.extend(stderr);
        }
        if let Some(compared) = &self.compared {
            metrics.insert("eval_sentinel_metric_gap".into(), json!(compared.gap));
        }
        metrics
    }

    /// The numbers of held-out rows: the prefix of all rows or of a data set, the name, and the value.
    fn numbers(&self) -> impl Iterator<Item = (String, &str, f64)> {
        let of_sets = self.sets.iter().map(|(name, evaluation)| (format!("{name}_"), evaluation));
        let of_average = self.average.iter().map(|average| (OF_AVERAGE.to_string(), average));
        let evaluations = self.all.iter().map(|all| (String::new(), all)).chain(of_sets).chain(of_average);
        evaluations.flat_map(|(prefix, Evaluation { loss, metrics })| {
            let named = metrics.named.iter().map(|(name, value)| (&**name, *value));
            [("loss", *loss)].into_iter().chain(named).map(move |(name, value)| (prefix.clone(), name, value))
        })
    }

    /// The metrics of all tasks, each with the name of its task.
    fn measured(&self) -> impl Iterator<Item = (&str, &Measured)> {
        self.tasks.iter().flat_map(|(task, all)| all.iter().map(move |measured| (task.as_str(), measured)))
    }
}

/// Returns the name under which a metric of a task is recorded.
pub fn metric_of_task(task: &str, metric: &str) -> String {
    format!("eval_{task}_{metric}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn validation(loss: f64, acc: f64) -> Validation {
        let measured = |name, value| Measured { name, value, stderr: Some(0.1), higher_is_better: true };
        let metrics = Metrics::new([("bits_per_byte", 2.0), ("margins", 1.0)], "");
        let tasks = vec![("words".to_string(), vec![measured("acc", acc)])];
        Validation { tasks, ..Validation::of_one(Evaluation { loss, metrics }) }
    }

    #[test]
    fn evaluations_are_compared_by_metrics_with_a_direction() {
        let own = validation(3.0, 0.5);
        let metric = |name: &str| own.finite_metric("k", name).map_err(|error| error.to_string());
        assert_eq!(metric("eval_loss"), Ok((3.0, Better::Lower)));
        assert_eq!(metric("eval_bits_per_byte"), Ok((2.0, Better::Lower)));
        assert_eq!(metric("eval_words_acc"), Ok((0.5, Better::Higher)));
        for unknown in ["eval_margins", "eval_words_acc_stderr"] {
            let error = metric(unknown).unwrap_err();
            assert!(error.ends_with("has eval_loss, eval_bits_per_byte, eval_words_acc"), "{error}");
        }
        assert_eq!(own.metrics().keys().len(), 5);
    }

    #[test]
    fn values_that_are_not_finite_are_worse_by_the_recipe_and_errors_in_high_precision() {
        let gap = |by_recipe: Option<&Validation>, high, metric| {
            Validation::compare(by_recipe, &high, "k", metric).map(|compared| compared.gap)
        };
        let own = validation(3.0, 0.5);
        assert_eq!(gap(Some(&own), validation(2.0, 0.75), "eval_loss").unwrap(), 1.0);
        assert_eq!(gap(Some(&own), validation(2.0, 0.75), "eval_words_acc").unwrap(), 0.25);
        assert_eq!(gap(None, own.clone(), "eval_loss").unwrap(), f64::INFINITY);
        assert_eq!(gap(Some(&validation(f64::NAN, 0.5)), own.clone(), "eval_loss").unwrap(), f64::INFINITY);
        let error = gap(Some(&own), validation(f64::INFINITY, 0.5), "eval_loss").unwrap_err();
        assert!(matches!(error, Error::NonFinite(_)) && error.to_string().contains("eval_loss"), "{error}");
    }
}
