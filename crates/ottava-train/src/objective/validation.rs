//! What an evaluation of a run says.

use crate::step::Metrics;
use ottava_common::error::{Error, Result};
use serde_json::{Map, Value, json};

/// The evaluation of rows that are held out.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// The mean loss.
    pub loss: f64,
    /// What its objective has besides the loss.
    pub metrics: Metrics,
}

/// The evaluation of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Validation {
    /// The evaluation of all rows.
    pub all: Evaluation,
    /// The evaluation of each data set that has a name, by name.
    pub sets: Vec<(String, Evaluation)>,
}

impl Validation {
    /// The evaluation of the only data set, which has no name.
    pub fn of_one(all: Evaluation) -> Validation {
        Validation { all, sets: Vec::new() }
    }

    /// The metric of this name. Errors with [`Error::Config`] where there is none.
    pub fn metric(&self, name: &str) -> Result<f64> {
        let metrics = self.metrics();
        metrics.get(name).and_then(Value::as_f64).ok_or_else(|| {
            let names: Vec<_> = metrics.keys().map(|name| format!("`{name}`")).collect();
            Error::Config(format!(
                "`evaluation.metric_for_best_model` is {name:?}; an evaluation of this run has {}",
                names.join(", ")
            ))
        })
    }

    /// All metrics by the names under which they are recorded.
    pub fn metrics(&self) -> Map<String, Value> {
        let mut metrics = Map::new();
        let mut add = |prefix: String, Evaluation { loss, metrics: of }: &Evaluation| {
            let all = [("loss", *loss)].into_iter().chain(of.named.iter().map(|(name, value)| (&**name, *value)));
            metrics.extend(all.map(|(name, value)| (format!("eval_{prefix}{name}"), json!(value))));
        };
        add(String::new(), &self.all);
        self.sets.iter().for_each(|(name, evaluation)| add(format!("{name}_"), evaluation));
        metrics
    }
}
