//! Validation losses of a run: of each data set, and of all.

use crate::config::RunConfig;
use crate::data::{Batch, DataSet, EvalLoader, Packing, TrainingData, Windows, loader};
use crate::error::{Error, Result};
use crate::evaluate::{Evaluation, evaluate};
use crate::mode::StepPrecision;
use crate::run::Run;
use serde_json::{Map, Value, json};

/// Losses on the validation documents of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Validation {
    /// Of all documents.
    pub all: Evaluation,
    /// Of each data set that has a name, by name.
    pub sets: Vec<(String, Evaluation)>,
}

impl Validation {
    /// Evaluates each data set in `precision`, which ranks do together; `None` without validation documents.
    pub(super) fn measure(
        run: &mut Run,
        data: &TrainingData,
        config: &RunConfig,
        precision: StepPrecision,
    ) -> Result<Option<Validation>> {
        let rows = config.training.per_device_train_batch_size;
        let (mut sets, mut all) = (Vec::new(), Vec::new());
        for DataSet { name, dataset, split, .. } in data.sets.iter().filter(|set| set.split.validation_len() > 0) {
            let (layout, bytes) = (data.layout, loader::validation_bytes(dataset, split)?);
            let batches: Box<dyn Iterator<Item = Result<Batch>>> = match layout.packing {
                Packing::Wrapped | Packing::Auto => {
                    Box::new(EvalLoader::new(dataset.clone(), *split, Windows::blocks(layout.seq_len), rows)?)
                }
                Packing::Bfd | Packing::None => {
                    Box::new(loader::whole_validation(dataset.clone(), *split, layout, rows)?)
                }
            };
            let Run { model, step, .. } = &mut *run;
            let evaluation = evaluate(model, batches, bytes, precision, step.partition(), &mut |_| {})?;
            if !name.is_empty() {
                sets.push((name.clone(), evaluation));
            }
            all.push((evaluation, bytes));
        }
        Ok(match all.as_slice() {
            [] => None,
            [(one, _)] => Some(Validation { all: *one, sets }),
            all => Some(Validation { all: Evaluation::of_all(all), sets }),
        })
    }

    /// The metric of this name. Errors with [`Error::Config`] where there is none.
    pub(super) fn metric(&self, name: &str) -> Result<f64> {
        let metrics = self.metrics();
        metrics.get(name).and_then(Value::as_f64).ok_or_else(|| {
            let names: Vec<_> = metrics.keys().map(|name| format!("`{name}`")).collect();
            Error::Config(format!(
                "`training.metric_for_best_model` is {name:?}; an evaluation of this run has {}",
                names.join(", ")
            ))
        })
    }

    /// The metrics of an evaluation, by name.
    pub(super) fn metrics(&self) -> Map<String, Value> {
        let mut metrics = Map::new();
        let mut add = |name: String, evaluation: &Evaluation| {
            metrics.insert(format!("eval_{name}loss"), json!(evaluation.loss));
            match &evaluation.preference {
                None if evaluation.bits_per_byte.is_nan() => {}
                None => drop(metrics.insert(format!("eval_{name}bits_per_byte"), json!(evaluation.bits_per_byte))),
                Some(sums) => {
                    metrics.extend(
                        sums.metrics().into_iter().map(|(of, value)| (format!("eval_{name}{of}"), json!(value))),
                    );
                }
            }
        };
        add(String::new(), &self.all);
        self.sets.iter().for_each(|(name, evaluation)| add(format!("{name}_"), evaluation));
        metrics
    }
}
