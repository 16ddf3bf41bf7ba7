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

/// A metric of evaluations by the recipe and in BF16, with the same weights.
#[derive(Clone, Debug, PartialEq)]
pub struct ComparedMetric {
    /// The name of the metric.
    pub metric: String,
    /// The metric by the recipe.
    pub by_recipe: f64,
    /// The metric in BF16.
    pub high: f64,
    /// How much worse the metric is by the recipe; negative if it is better.
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
    /// The metric of the sentinel, if the run has one.
    pub compared: Option<ComparedMetric>,
}

impl Validation {
    /// Compares `metric`, whose setting is `key`, by the recipe and in high precision. Errors as [`Validation::metric`].
    pub fn compare(by_recipe: &Validation, high: &Validation, key: &str, metric: &str) -> Result<ComparedMetric> {
        let ((by_recipe, better), (high, _)) = (by_recipe.metric(key, metric)?, high.metric(key, metric)?);
        let gap = match better {
            Better::Lower => by_recipe - high,
            Better::Higher => high - by_recipe,
        };
        Ok(ComparedMetric { metric: metric.into(), by_recipe, high, gap })
    }

    /// The evaluation of the only data set, which has no name.
    pub fn of_one(all: Evaluation) -> Validation {
        Validation { all: Some(all), ..Validation::default() }
    }

    /// The metric `name`, which the setting `key` names, and which values of it are better. Errors with [`Error::Config`] where there is none.
    pub fn metric(&self, key: &str, name: &str) -> Result<(f64, Better)> {
        let metrics = self.metrics();
        let value = metrics.get(name).and_then(Value::as_f64).ok_or_else(|| {
            let names: Vec<_> = metrics.keys().map(|name| format!("`{name}`")).collect();
            Error::Config(format!("`{key}` is {name:?}; an evaluation of this run has {}", names.join(", ")))
        })?;
        let is_higher =
            |(task, measured): (&str, &Measured)| name == name_of(task, measured) && measured.higher_is_better;
        Ok((value, if self.measured().any(is_higher) { Better::Higher } else { Better::Lower }))
    }

    /// All metrics by the names under which they are recorded.
    pub fn metrics(&self) -> Map<String, Value> {
        let mut metrics = Map::new();
        let mut add = |prefix: String, Evaluation { loss, metrics: of }: &Evaluation| {
            let all = [("loss", *loss)].into_iter().chain(of.named.iter().map(|(name, value)| (&**name, *value)));
            metrics.extend(all.map(|(name, value)| (format!("eval_{prefix}{name}"), json!(value))));
        };
        self.all.iter().for_each(|all| add(String::new(), all));
        self.sets.iter().for_each(|(name, evaluation)| add(format!("{name}_"), evaluation));
        for (task, measured) in self.measured() {
            let name = name_of(task, measured);
            let stderr = measured.stderr.map(|stderr| (format!("{name}_stderr"), json!(stderr)));
            metrics.insert(name, json!(measured.value));
            metrics.extend(stderr);
        }
        if let Some(compared) = &self.compared {
            metrics.insert("eval_sentinel_metric_gap".into(), json!(compared.gap));
        }
        metrics
    }

    /// The metrics of all tasks, each with the name of its task.
    fn measured(&self) -> impl Iterator<Item = (&str, &Measured)> {
        self.tasks.iter().flat_map(|(task, all)| all.iter().map(move |measured| (task.as_str(), measured)))
    }
}

/// The name under which a metric of a task is recorded.
fn name_of(task: &str, measured: &Measured) -> String {
    format!("eval_{task}_{}", measured.name)
}
