//! The report of a step.

use crate::objective::Validation;
use crate::step::Metrics;
use ottava_checkpoint::Saved;
use ottava_common::error::Error;
use ottava_parallel::optim::LossScale;
use ottava_recipe::scaling::{CastLosses, RouterMetrics};
use ottava_tensor::Device;

/// The results of a step.
#[derive(Clone, Debug)]
pub struct StepReport {
    /// The step, from 1.
    pub step: u64,
    /// Steps of the whole run.
    pub max_steps: u64,
    /// Mean of the losses of the step that count, before the update.
    pub loss: f64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// As [`StepResult::reduce_error`](crate::step::StepResult::reduce_error).
    pub reduce_error: Option<f64>,
    /// The learning rate used.
    pub learning_rate: f64,
    /// Tokens of documents per second in this step, of all ranks.
    pub tokens_per_second: f64,
    /// Model FLOP/s as a share of the GPUs' peak for BF16, if it is known ([`RunRecord::utilization`](crate::report::RunRecord::utilization)).
    pub mfu: Option<f64>,
    /// Largest memory held so far.
    pub peak_memory_bytes: u64,
    /// Losses of FP8 casts, if there are casts.
    pub casts: Option<CastLosses>,
    /// What the routers of a model with experts chose.
    pub routers: Option<RouterMetrics>,
    /// The loss scale after the step, with `fp16`.
    pub loss_scale: Option<LossScale>,
    /// Validation after this step, where it was due.
    pub evaluation: Option<Validation>,
    /// What the objective says of the step besides the loss.
    pub metrics: Metrics,
    /// Checkpoints that are complete since the last step, of this step or of earlier ones.
    pub saved: Vec<Saved>,
}

/// Names the casts with an infinite amax in `step`, at most a few.
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

/// Largest memory held so far: by tensors on a GPU, by the process on a CPU.
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
