//! What a step leaves in the metrics.

use super::Trainer;
use super::report::StepReport;
use super::validation::Validation;
use crate::error::Result;
use crate::optim::LossScale;
use crate::step::PreferenceSums;
use serde_json::{Map, Value, json};

impl Trainer {
    /// The metrics of a step, without evaluation.
    pub(super) fn values(&self, done: &StepReport) -> Map<String, Value> {
        let mut values = json!({
            "loss": done.loss,
            "learning_rate": done.learning_rate,
            "grad_norm": done.grad_norm,
            "tokens": self.tokens,
            "tokens_per_second": done.tokens_per_second,
            "peak_memory_bytes": done.peak_memory_bytes,
        });
        for (name, value) in done.preference.iter().flat_map(PreferenceSums::metrics) {
            values[name] = json!(value);
        }
        for (name, value) in done.routers.iter().flat_map(|routers| routers.metrics()) {
            values[name] = json!(value);
        }
        if let Some(error) = done.reduce_error {
            values["reduce_error"] = json!(error);
        }
        if let Some(LossScale { scale, skipped_steps, .. }) = &done.loss_scale {
            values["loss_scale"] = json!(scale);
            values["skipped_steps"] = json!(skipped_steps);
        }
        if let Some(casts) = &done.casts {
            values["fp8_saturated"] = json!(casts.saturated);
            values["fp8_underflowed"] = json!(casts.underflowed);
            values["fp8_non_finite"] = json!(casts.non_finite.len());
        }
        match values {
            Value::Object(values) => values,
            _ => unreachable!("an object was made above"),
        }
    }

    pub(super) fn record(
        &mut self,
        step: u64,
        mut values: Map<String, Value>,
        evaluation: Option<&Validation>,
    ) -> Result<()> {
        let Some(files) = &mut self.files else { return Ok(()) };
        files.lock.check()?;
        let number = |key: &str| values.get(key).and_then(Value::as_f64);
        let sets = evaluation.iter().flat_map(|evaluation| &evaluation.sets);
        let sets: Vec<_> = sets.map(|(name, set)| (format!("eval/{name}_loss"), set.loss)).collect();
        let mut scalars: Vec<(&str, f64)> = sets.iter().map(|(tag, loss)| (tag.as_str(), *loss)).collect();
        for (tag, key) in
            [("train/loss", "loss"), ("train/learning_rate", "learning_rate"), ("train/grad_norm", "grad_norm")]
        {
            scalars.extend(number(key).map(|value| (tag, value)));
        }
        let named = values.iter().filter(|(name, _)| PreferenceSums::is_metric(name));
        let mut named: Vec<_> =
            named.filter_map(|(name, value)| Some((format!("train/{name}"), value.as_f64()?))).collect();
        self.losses.extend(number("loss").map(|loss| (step, loss)));
        if let Some(evaluation) = evaluation {
            values.extend(evaluation.metrics());
            scalars.push(("eval/loss", evaluation.all.loss));
            let rewards = evaluation.all.preference.iter().flat_map(PreferenceSums::metrics);
            named.extend(rewards.map(|(name, value)| (format!("eval/{name}"), value)));
            self.eval_losses.push((step, evaluation.all.loss));
        }
        scalars.extend(named.iter().map(|(tag, value)| (tag.as_str(), *value)));
        let values: Vec<(&str, Value)> = values.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
        files.metrics.append(step, &values)?;
        files.events.scalars(step, &scalars)
    }
}
