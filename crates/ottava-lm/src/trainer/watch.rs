//! The sentinel in a run: when it compares, what it writes, and what follows from its decisions.

use super::Trainer;
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::mode::StepPrecision;
use crate::report::sentinel_line;
use crate::sentinel::{Decision, Finding, Verdict};
use ottava_tensor::Device;

/// Findings that are named in the log of the program; all are in `sentinel.jsonl`.
const SHOWN: usize = 4;

impl Trainer {
    /// Compares the recipe with BF16 on the first rows of `batch`, the first micro-batch of `step`, if that is due, and decides what `step`
    /// and later steps compute in BF16.
    pub(super) fn watch(&mut self, step: u64, batch: &Batch) -> Result<()> {
        let config = self.config.sentinel.clone();
        if !config.is_due(step) {
            return self.follow_decisions(step);
        }
        // Periods end with a check, which tries the recipe again.
        self.follow_decisions(step)?;
        let rows = batch.first_rows(config.sentinel_sequences);
        let comparison = self.run.compare(&rows)?;
        let state = &mut self.sentinel.state;
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
                ("sentinel/findings", verdict.findings.len() as f64),
            ];
            files.events.scalars(step, &scalars)?;
        }
        self.follow_decisions(step)
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
        match self.run.repeat(batch, self.precision, deterministic)? {
            None => Ok(()),
            Some(tensor) => Err(Error::Corruption(format!(
                "step {step}: the same micro-batch gave other bits when it was computed again: the first difference is in the {tensor}. \
                 A memory or a compute unit of this device is not reliable; resume from the last checkpoint on another one"
            ))),
        }
    }

    /// Sets what `step` computes in BF16.
    fn follow_decisions(&mut self, step: u64) -> Result<()> {
        let check = self.config.sentinel.check_before(step);
        let demoted = self.sentinel.state.demoted_in(check);
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
        match self.sentinel.state.is_high_in(self.config.sentinel.check_before(step)) {
            true => StepPrecision::High,
            false => self.config.precision.precision_of(step),
        }
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
