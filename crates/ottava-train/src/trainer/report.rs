//! The report of a step.

use crate::objective::Validation;
use crate::step::{Metrics, StepResult};
use ottava_checkpoint::Saved;
use ottava_common::error::Error;
use ottava_parallel::optim::LossScale;
use ottava_recipe::scaling::{CastLosses, RouterLoad, RouterMetrics};
use ottava_tensor::Device;
use serde_json::{Map, Value, json};

/// The results of a step. Each phase of the step adds its own results.
#[derive(Clone, Debug, Default)]
pub struct StepReport {
    /// The number of the step, from 1.
    pub step: u64,
    /// The number of steps of the whole run.
    pub max_steps: u64,
    /// The loss, the gradient norm and the number of tokens.
    pub result: StepResult,
    /// The learning rate of the step.
    pub learning_rate: f64,
    /// The loss scale after the step, if the compute type is `fp16`.
    pub loss_scale: Option<LossScale>,
    /// The time and the memory of the step.
    pub cost: StepCost,
    /// The power and the load of the leading rank's GPU, by name, if they were read after this step.
    pub gpu: Map<String, Value>,
    /// The elements that FP8 casts have lost, if the model has such casts.
    pub casts: Option<CastLosses>,
    /// The loads of the routers of a model with experts.
    pub router_loads: Vec<RouterLoad>,
    /// The metrics of the step that the rows and the loss of the objective report.
    pub metrics: Metrics,
    /// The validation after this step, if one was due.
    pub evaluation: Option<Validation>,
    /// The checkpoints that were completed since the last step. A checkpoint can be of this step or of an earlier step.
    pub saved: Vec<Saved>,
}

/// The time and the memory of a step.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepCost {
    /// The number of tokens of documents per second in this step, summed over all ranks.
    pub tokens_per_second: f64,
    /// Model FLOP/s as a share of the GPUs' peak for BF16, if the peak is known ([`RunRecord::utilization`](crate::report::RunRecord::utilization)).
    pub mfu: Option<f64>,
    /// The peak of memory so far.
    pub peak_memory_bytes: u64,
}

impl StepReport {
    /// Returns the metrics of the step as a line of `metrics.jsonl`, without the evaluation. `tokens` is the number of tokens of the run so far.
    pub(super) fn values(&self, tokens: u64) -> Map<String, Value> {
        let StepReport { result, cost, .. } = self;
        let mut values = json!({
            "loss": result.loss,
            "learning_rate": self.learning_rate,
            "grad_norm": result.grad_norm,
            "tokens": tokens,
            "tokens_per_second": cost.tokens_per_second,
            "peak_memory_bytes": cost.peak_memory_bytes,
        });
        if let Some(mfu) = cost.mfu {
            values["mfu"] = json!(mfu);
        }
        for (name, value) in &self.metrics.named {
            values[&**name] = json!(value);
        }
        for (name, value) in RouterMetrics::of(&self.router_loads).into_iter().flat_map(RouterMetrics::metrics) {
            values[name] = json!(value);
        }
        if let Some(error) = result.reduce_error {
            values["reduce_error"] = json!(error);
        }
        if let Some(LossScale { scale, skipped_steps, .. }) = &self.loss_scale {
            values["loss_scale"] = json!(scale);
            values["skipped_steps"] = json!(skipped_steps);
        }
        if let Some(casts) = &self.casts {
            values["fp8_saturated"] = json!(casts.saturated);
            values["fp8_underflowed"] = json!(casts.underflowed);
            values["fp8_non_finite"] = json!(casts.non_finite.len());
        }
        match values {
            Value::Object(values) => values.into_iter().chain(self.gpu.clone()).collect(),
            _ => unreachable!("an object was made above"),
        }
    }
}

/// Warns of the casts whose amax was infinite in `step`. At most a few names are listed.
pub(super) fn warn_of_infinities(step: u64, names: &[String]) {
    const SHOWN: usize = 4;
    if names.is_empty() {
        return;
    }
    let shown = names.iter().take(SHOWN).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let rest = if names.len() > SHOWN { format!(" and {} more", names.len() - SHOWN) } else { String::new() };
    tracing::warn!("step {step}: values that are not finite were cast to FP8 in {shown}{rest}");
}

pub(super) fn not_finite(step: u64, loss: f64, bad_gradient: Option<String>) -> Error {
    let first = match bad_gradient {
        Some(name) => format!("the first gradient that is not finite is that of {name}"),
        None => "all gradients are finite but their norm is not".to_string(),
    };
    Error::NonFinite(format!(
        "step {step}: the loss is {loss}, and {first}. No weight was changed; resume from the last checkpoint with a lower `learning_rate`, or with `recipe = \"bf16\"` to see whether FP8 is the cause"
    ))
}

/// Returns the peak of memory so far: of tensors on a GPU, of the process on a CPU.
pub(super) fn peak_memory(device: &Device) -> u64 {
    match device {
        Device::Cuda(gpu) => gpu.memory().peak as u64,
        Device::Cpu | Device::DryCpu(_) => {
            let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
            let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
            let kilobytes = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
            kilobytes.unwrap_or(0) * 1024
        }
    }
}
