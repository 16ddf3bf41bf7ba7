//! What a step leaves in the metrics.

use super::Trainer;
use super::report::StepReport;
use crate::objective::Validation;
use crate::plan::ResolvedRun;
use crate::report::{RunEnd, RunOutcome, RunRecord};
use crate::run::Run;
use ottava_common::error::{Error, Result};
use ottava_parallel::Ranks;
use ottava_parallel::optim::LossScale;
use ottava_settings::RunConfig;
use ottava_tensor::Device;
use serde_json::{Map, Value, json};

impl Trainer {
    /// What `run.json` says of a run of `max_steps` that begins or goes on now.
    pub(super) fn run_record(
        config: &RunConfig,
        resolved: &ResolvedRun,
        run: &Run,
        ranks: &Ranks,
        max_steps: u64,
    ) -> RunRecord {
        let model = run.model.description();
        let (device, peak, planned) = match run.model.device() {
            Device::Cuda(gpu) => {
                (gpu.model().name.clone(), gpu.model().peak_bf16_flops(), Some(resolved.memory.peak_bytes))
            }
            Device::Cpu | Device::DryCpu(_) => ("CPU".to_string(), None, None),
        };
        RunRecord {
            started: RunRecord::now(),
            device,
            ranks: ranks.size(),
            mesh: ranks.shape().to_string(),
            recipe: config.precision.recipe.as_str().to_string(),
            parameters: model.parameters,
            max_steps,
            tokens_per_step: config.tokens_per_step(),
            flops_per_token: model.flops_per_token(config.data.max_length),
            peak_flops: peak.map(|flops| flops * ranks.size() as f64),
            planned_memory_bytes: planned,
            end: None,
        }
    }

    /// The metrics of a step, without evaluation.
    pub(super) fn values(&self, done: &StepReport) -> Map<String, Value> {
        let mut values = json!({
            "loss": done.loss,
            "learning_rate": done.learning_rate,
            "grad_norm": done.grad_norm,
            "tokens": self.progress.tokens,
            "tokens_per_second": done.tokens_per_second,
            "peak_memory_bytes": done.peak_memory_bytes,
        });
        if let Some(mfu) = done.mfu {
            values["mfu"] = json!(mfu);
        }
        for (name, value) in &done.metrics.named {
            values[*name] = json!(value);
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
        self.losses.extend(number("loss").map(|loss| (step, loss)));
        let tagged = |group: &str, (name, value): (&String, &Value)| Some((format!("{group}/{name}"), value.as_f64()?));
        let mut scalars: Vec<_> = values.iter().filter_map(|entry| tagged("train", entry)).collect();
        if let Some(evaluation) = evaluation {
            let metrics = evaluation.metrics();
            let named = metrics.iter().map(|(name, value)| (name.trim_start_matches("eval_").to_string(), value));
            scalars.extend(named.filter_map(|(name, value)| tagged("eval", (&name, value))));
            values.extend(metrics);
            self.eval_losses.push((step, evaluation.all.loss));
        }
        let scalars: Vec<_> = scalars.iter().map(|(tag, value)| (tag.as_str(), *value)).collect();
        let values: Vec<(&str, Value)> = values.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
        files.metrics.append(step, &values)?;
        files.events.scalars(step, &scalars)
    }

    /// Writes into `run.json` that the run has ended, with `error` if it did not finish.
    pub(super) fn record_end(&mut self, error: Option<&Error>) {
        let outcome = match error {
            None => RunOutcome::Finished,
            Some(error) if error.is_stop() => RunOutcome::Stopped,
            Some(_) => RunOutcome::Failed,
        };
        let message = error.map_or(String::new(), Error::to_string);
        self.record.end = Some(RunEnd { time: RunRecord::now(), step: self.progress.step, outcome, message });
        // Of a folder that another run has taken, nothing is written; and the result of the run does not depend on this file.
        let Some(files) = &self.files else { return };
        if let Err(error) = files.lock.check().and_then(|()| self.record.write(&self.config.output_dir)) {
            tracing::warn!("the end of the run is not recorded: {error}");
        }
    }
}
