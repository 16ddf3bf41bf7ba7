//! Spikes of the loss and of the gradient norm.

use super::contract::{Alarm, Observer, Watched};
use crate::objective::LoadedRows;
use crate::step::StepResult;
use crate::trainer::report::StepReport;
use ottava_common::error::Result;
use ottava_recipe::scaling::CastRecord;
use ottava_sentinel::{AlarmMemory, AlarmPolicy, NormAlarmPolicy, SpikeDetector};
use ottava_settings::{AlarmsConfig, Spikes as Bounds};

/// Looks for spikes in loss and gradient norm of each step. Before the step, it sets the norm above which the update changes no weight: the limit is in
/// device memory, and the update sees an infinite norm.
pub(super) struct Spikes {
    loss: SpikeDetector,
    grad_norm: SpikeDetector,
}

impl Spikes {
    pub(super) fn new(Bounds { spike_window, spike_threshold }: Bounds, memory: &AlarmMemory) -> Spikes {
        Spikes {
            loss: SpikeDetector::of_losses(spike_window, spike_threshold).after(&memory.losses),
            grad_norm: SpikeDetector::of_norms(spike_window, spike_threshold).after(&memory.grad_norms),
        }
    }
}

impl Observer for Spikes {
    fn before_step(&mut self, _: u64, _: &LoadedRows, watched: &mut Watched) -> Result<()> {
        let most = watched.environment.config.alarms.max_skipped_steps;
        let may_skip = watched.progress.sentinel.skipped_in_a_row < most;
        let limit = if may_skip { self.grad_norm.limit() } else { f64::INFINITY };
        watched.run.step.set_norm_limit(limit);
        Ok(())
    }

    fn after_step(&mut self, done: &StepReport, watched: &mut Watched) -> Result<()> {
        let StepResult { loss, grad_norm, is_skipped, .. } = done.result;
        if !done.result.is_finite() {
            return Ok(());
        }
        let config = &watched.environment.config;
        let AlarmsConfig { loss_spike, grad_norm_spike, spikes: Bounds { spike_window, .. }, .. } = config.alarms;
        let loss_spike = if config.objective().properties().loss_falls { loss_spike } else { AlarmPolicy::Off };
        let seen = [
            ("loss", "loss_spike", loss_spike.into(), self.loss.see(loss)),
            ("gradient norm", "grad_norm_spike", grad_norm_spike, self.grad_norm.see(grad_norm)),
        ];
        for (number, name, policy, spike) in seen {
            let Some(spike) = spike else { continue };
            let then = match policy {
                NormAlarmPolicy::Skip if is_skipped => "; no weight was changed",
                NormAlarmPolicy::Skip => {
                    "; as many steps in a row as `max_skipped_steps` were skipped, so this one was not"
                }
                _ => "",
            };
            let text = format!("the {number} {spike} of the last {spike_window} steps{then}");
            watched.raise(done.step, policy, Alarm { name, tensors: &[], value: spike.value, text })?;
        }
        Ok(())
    }

    fn remember(&self, _: &[CastRecord], memory: &mut AlarmMemory) {
        memory.losses = self.loss.values().clone();
        memory.grad_norms = self.grad_norm.values().clone();
    }
}
