//! What a run watches: comparisons with BF16 and what follows from them, repeated passes, spikes, and steps that are not finite.
//!
//! `SpikeDetector` and `CastDetector` (`sentinel/`) are functions of numbers that all ranks have alike; `Trainer::raise` logs an alarm and notes
//! what its policy asks for. A step may have a limit of the gradient norm in device memory (`limit_norm`): above the limit, the update sees an
//! infinite norm, and changes nothing. `Trainer::roll_back` (`rollback.rs`) builds the run anew from an earlier checkpoint, as a resumed process
//! does, and keeps the position in the data; `rollbacks.jsonl` is ahead of the checkpoints.
//!
//! To add an alarm: a detector in `sentinel/alarm.rs`, `sentinel/cast_alarm.rs` or `sentinel/router_alarm.rs`, a key in `settings/alarms.rs`, and a
//! call in `Trainer::look_for_spikes`, `Trainer::look_at_casts` or `Trainer::look_at_routers`.

use super::Trainer;
use super::files::DUMPS;
use crate::report::{TensorStatistics, sentinel_line};
use crate::step::Repeated;
use ottava_checkpoint::write_file;
use ottava_common::error::{Error, Result};
use ottava_common::fs::{RealFs, create_dirs};
use ottava_data::Batch;
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::scaling::{CastRecord, Quantity, RouterLoad};
use ottava_sentinel::{CollapsedRouter, Decision, Finding, NonFiniteSteps, NormAlarmPolicy, Verdict};
use ottava_settings::AlarmsConfig;
use ottava_tensor::Device;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// Findings that are named in the log of the program; all are in `sentinel.jsonl`.
const SHOWN: usize = 4;

impl Trainer {
    /// Compares the recipe with BF16 on the first rows of `batch`, the first micro-batch of `step`, if that is due, and decides what `step`
    /// and later steps compute in BF16.
    pub(super) fn watch(&mut self, step: u64, batch: &Batch) -> Result<()> {
        let config = self.config.sentinel.clone();
        if !config.is_due(step) {
            return Ok(());
        }
        let rows = batch.first_rows(config.sentinel_sequences);
        let comparison = self.run.compare(&rows)?;
        let state = &mut self.progress.sentinel;
        let verdict = Verdict::of(&comparison, config.bounds(), &state.tried_in(step), state.is_tried_in(step));
        let decision = state.decide(config.sentinel_policy, &verdict, step, config.sentinel_hold_steps);
        if self.ranks.leads() {
            warn(step, &verdict.findings, &decision, config.sentinel_hold_steps);
        }
        if decision == Decision::Pause {
            let found: Vec<_> = verdict.findings.iter().take(SHOWN).map(Finding::to_string).collect();
            self.sentinel.pause = Some(found.join("; "));
        }
        if let Some(files) = &mut self.files {
            if let Some(log) = &mut files.sentinel {
                log.append(step, &sentinel_line(&comparison, &verdict, &decision))?;
            }
            let worst = verdict.ranking.first().map_or(0.0, |(_, error)| *error);
            let scalars = [
                ("sentinel/loss_gap", verdict.loss_gap),
                ("sentinel/gradient_cosine", verdict.cosine),
                ("sentinel/gradient_norm_ratio", verdict.norm_ratio),
                ("sentinel/worst_cast_error", worst),
                ("sentinel/loss_cost", verdict.loss_costs.iter().map(|(_, cost)| cost).sum()),
                ("sentinel/findings", verdict.findings.len() as f64),
            ];
            files.events.scalars(step, &scalars)?;
        }
        self.follow_decisions(step)
    }

    /// Records tensors of the first rows of `batch`, the first micro-batch of `step`, if that is due: statistics of the tensors of the
    /// leading rank, and files of each rank.
    pub(super) fn debug(&mut self, step: u64, batch: &Batch) -> Result<()> {
        let config = self.config.debug.clone();
        if !config.is_due(step) {
            return Ok(());
        }
        let rows = batch.first_rows(self.config.sentinel.sentinel_sequences);
        let (comparison, tensors) = self.run.observe(&rows, &config.debug_tensors)?;
        let casts = comparison.tensors.iter().filter(|compared| compared.quantity == Quantity::Cast);
        let errors: HashMap<&str, f64> = casts.map(|compared| (compared.name.as_str(), compared.error())).collect();
        if let Some(log) = self.files.as_mut().and_then(|files| files.tensors.as_mut()) {
            let mut all = Map::new();
            for (name, tensor) in &tensors {
                let statistics = TensorStatistics::of(tensor, errors.get(name.as_str()).copied())?;
                all.insert(name.clone(), json!(statistics));
            }
            log.append(step, &[("tensors", Value::Object(all))])?;
        }
        if config.dump_tensors {
            let folder = self.config.output_dir.join(DUMPS);
            let name = match self.ranks.size() {
                1 => format!("step-{step}.safetensors"),
                _ => format!("step-{step}-rank-{}.safetensors", self.ranks.rank()),
            };
            let write = || create_dirs(&RealFs, &folder).and_then(|()| write_file(&folder.join(name), &tensors));
            self.ranks.together("files of tensors", write())?;
        }
        Ok(())
    }

    /// Computes `batch`, the first micro-batch of `step`, twice, if that is due.
    ///
    /// Errors with [`Error::Corruption`] on all ranks if any bit differs.
    pub(super) fn repeat(&mut self, step: u64, batch: &Batch) -> Result<()> {
        if !self.config.sentinel.repeats(step) {
            return Ok(());
        }
        // On a GPU, the order of sums in attention's backward may change from run to run.
        let is_cpu = matches!(self.run.model.device(), Device::Cpu | Device::DryCpu(_));
        let deterministic = is_cpu || self.config.precision.deterministic;
        let Repeated { different, digests } = self.run.repeat(batch, self.precision, deterministic)?;
        if let Some(log) = self.files.as_mut().and_then(|files| files.digests.as_mut()) {
            let digests = digests.into_iter().map(|(name, bits)| (name, json!(format!("{bits:016x}")))).collect();
            log.append(step, &[("digests", Value::Object(digests))])?;
        }
        match different {
            None => Ok(()),
            Some(tensor) => Err(Error::Corruption(format!(
                "step {step}: the same micro-batch gave other bits when it was computed again: the first difference is in the {tensor}. \
                 A memory or a compute unit of this device is not reliable; resume from the last checkpoint on another one"
            ))),
        }
    }

    /// Sets what `step` computes in BF16, after the checks so far. Periods end with a check, which tries the recipe again.
    pub(super) fn follow_decisions(&mut self, step: u64) -> Result<()> {
        let check = self.config.sentinel.check_before(step);
        let demoted = self.progress.sentinel.demoted_in(check);
        if demoted != self.sentinel.demoted {
            self.run.set_high_precision(&demoted);
            if self.ranks.leads() {
                let back: Vec<_> = self.sentinel.demoted.difference(&demoted).map(String::as_str).collect();
                if !back.is_empty() {
                    tracing::info!("step {step}: the recipe is tried again in {}", back.join(", "));
                }
            }
            self.sentinel.demoted = demoted;
        }
        self.choose_precision(step);
        Ok(())
    }

    /// What the products of `step` read.
    pub(super) fn precision_of(&self, step: u64) -> StepPrecision {
        match self.progress.sentinel.is_high_in(self.config.sentinel.check_before(step)) {
            true => StepPrecision::High,
            false => self.config.precision.precision_of(step),
        }
    }

    /// Looks for spikes in what `step` gave, and acts on them. All ranks see the same numbers. If the step `was_skipped`, no weight has changed.
    pub(super) fn look_for_spikes(&mut self, step: u64, loss: f64, grad_norm: f64, was_skipped: bool) -> Result<()> {
        if !loss.is_finite() || !grad_norm.is_finite() {
            return Ok(());
        }
        let AlarmsConfig { loss_spike, grad_norm_spike, .. } = self.config.alarms;
        let window = self.config.alarms.spikes.spike_window;
        let seen = [
            ("loss", "loss_spike", loss_spike.into(), self.alarms.loss.see(loss)),
            ("gradient norm", "grad_norm_spike", grad_norm_spike, self.alarms.grad_norm.see(grad_norm)),
        ];
        for (name, alarm, policy, spike) in seen {
            let Some(spike) = spike else { continue };
            let then = match policy {
                NormAlarmPolicy::Skip if was_skipped => "; no weight was changed",
                NormAlarmPolicy::Skip => {
                    "; as many steps in a row as `max_skipped_steps` were skipped, so this one was not"
                }
                _ => "",
            };
            let text = format!("the {name} {spike} of the last {window} steps{then}");
            self.raise(step, policy, alarm, &[], spike.value, text)?;
        }
        Ok(())
    }

    /// Looks for casts whose statistics up to `step` are out of the ordinary, and acts on them. All ranks see the same statistics.
    pub(super) fn look_at_casts(&mut self, step: u64, measured: &[CastRecord]) -> Result<()> {
        let (policy, found) = (self.config.alarms.casts, self.alarms.see_casts(step, measured));
        for of_alarm in found.chunk_by(|a, b| a.alarm == b.alarm) {
            let text = listed(of_alarm, "casts");
            let names: Vec<_> = of_alarm.iter().map(|finding| finding.name.as_str()).collect();
            let largest = of_alarm.iter().map(|finding| finding.value).fold(f64::NEG_INFINITY, f64::max);
            self.raise(step, policy.into(), of_alarm[0].alarm.as_str(), &names, largest, text)?;
        }
        Ok(())
    }

    /// Looks for routers that have collapsed in `step`, if its statistics are logged. All ranks see the same numbers.
    pub(super) fn look_at_routers(&mut self, step: u64, loads: &[RouterLoad]) -> Result<()> {
        let every = self.config.logging.cast_statistics_steps;
        if every == 0 || !step.is_multiple_of(every) {
            return Ok(());
        }
        let AlarmsConfig { routers: policy, collapsed_share, .. } = self.config.alarms;
        let found = CollapsedRouter::among(loads, collapsed_share);
        let Some(worst) = found.iter().map(|router| router.share).reduce(f64::max) else { return Ok(()) };
        let names: Vec<_> = found.iter().map(|router| router.name.as_str()).collect();
        self.raise(step, policy.into(), "router_collapse", &names, worst, listed(&found, "routers"))
    }

    /// Logs an alarm of `step`, and does what its `policy` says after the step.
    fn raise(
        &mut self,
        step: u64,
        policy: NormAlarmPolicy,
        alarm: &str,
        tensors: &[&str],
        value: f64,
        text: String,
    ) -> Result<()> {
        if policy == NormAlarmPolicy::Off {
            return Ok(());
        }
        if self.ranks.leads() {
            tracing::warn!("step {step}: {text}");
        }
        if let Some(files) = &mut self.files {
            let fields = [
                ("alarm", json!(alarm)),
                ("tensors", json!(tensors)),
                ("value", json!(value)),
                ("policy", json!(policy.as_str())),
                ("text", json!(text)),
            ];
            files.log_alarm(&self.config.output_dir, step, &fields)?;
        }
        let asked = match policy {
            NormAlarmPolicy::Off | NormAlarmPolicy::Warn | NormAlarmPolicy::Skip => return Ok(()),
            NormAlarmPolicy::Rollback => &mut self.sentinel.rollback,
            NormAlarmPolicy::Pause => &mut self.sentinel.pause,
            NormAlarmPolicy::Stop => &mut self.sentinel.stop,
        };
        asked.get_or_insert(text);
        Ok(())
    }

    /// Sets the largest norm of gradients by which the next step updates.
    pub(super) fn limit_norm(&mut self) {
        let may_skip = self.progress.sentinel.skipped_in_a_row < self.config.alarms.max_skipped_steps;
        let limit = if may_skip { self.alarms.grad_norm.limit() } else { f64::INFINITY };
        self.run.step.set_norm_limit(limit);
    }

    /// Whether a step whose gradient norm is not finite is skipped; then no weight has changed.
    pub(super) fn skips_non_finite(&mut self, step: u64) -> Result<bool> {
        let AlarmsConfig { non_finite_steps, max_skipped_steps, .. } = self.config.alarms;
        if non_finite_steps == NonFiniteSteps::Stop || self.progress.sentinel.skipped_in_a_row >= max_skipped_steps {
            return Ok(false);
        }
        self.skip_step()?;
        if self.ranks.leads() {
            tracing::warn!(
                "step {step}: gradients are not finite and no weight was changed; the step is skipped, number {} of at most \
                 {max_skipped_steps} in a row",
                self.progress.sentinel.skipped_in_a_row
            );
        }
        Ok(true)
    }

    /// Counts a step that has changed no weight, and casts the weights as a resumed run does: the update has measured none.
    pub(super) fn skip_step(&mut self) -> Result<()> {
        self.progress.sentinel.skipped_in_a_row += 1;
        self.progress.sentinel.skipped_steps += 1;
        self.run.optimizer.skip_step();
        self.run.quantize_weights()?;
        self.run.step.forget_captures();
        Ok(())
    }
}

/// The first of `found`, and how many more `things` there are.
fn listed<T: ToString>(found: &[T], things: &str) -> String {
    let shown = found.iter().take(SHOWN).map(T::to_string).collect::<Vec<_>>().join("; ");
    match found.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown}; and {more} more {things}"),
    }
}

fn warn(step: u64, findings: &[Finding], decision: &Decision, hold: u64) {
    for finding in findings.iter().take(SHOWN) {
        tracing::warn!("step {step}: sentinel: {finding}");
    }
    if findings.len() > SHOWN {
        tracing::warn!("step {step}: sentinel: {} more findings are in sentinel.jsonl", findings.len() - SHOWN);
    }
    match decision {
        Decision::None => {}
        Decision::Pause => tracing::warn!("step {step}: sentinel: the run saves after this step and ends"),
        Decision::Demote(linears) => {
            tracing::warn!("step {step}: sentinel: in BF16 for {hold} steps or more: {}", linears.join(", "));
        }
        Decision::Bf16 => tracing::warn!("step {step}: sentinel: all products in BF16 for {hold} steps or more"),
    }
}
