//! The sentinel: compares the recipe with BF16, and decides what later steps compute in BF16.

use super::contract::{Observer, SHOWN, Watched};
use crate::objective::LoadedRows;
use crate::report::sentinel_line;
use ottava_common::error::Result;
use ottava_sentinel::{Decision, Finding, Verdict};

/// Compares the recipe with BF16 on the first rows of the step, where that is due.
pub(super) struct Comparison;

impl Observer for Comparison {
    fn before_step(&mut self, step: u64, rows: &LoadedRows, watched: &mut Watched) -> Result<()> {
        let environment = watched.environment;
        let config = &environment.config.sentinel;
        let Some(first) = rows.first.as_ref().filter(|_| config.is_due(step)) else { return Ok(()) };
        let comparison = watched.run.compare(&first.first_rows(config.sentinel_sequences))?;
        let state = &mut watched.progress.sentinel;
        let verdict = Verdict::of(&comparison, config.bounds(), &state.tried_in(step), state.is_tried_in(step));
        let decision = state.decide(config.sentinel_policy, &verdict, step, config.sentinel_hold_steps);
        if environment.ranks.leads() {
            warn(step, &verdict.findings, &decision, config.sentinel_hold_steps);
        }
        if decision == Decision::Pause {
            let found: Vec<_> = verdict.findings.iter().take(SHOWN).map(Finding::to_string).collect();
            watched.requests.pause = Some(found.join("; "));
        }
        if let Some(files) = &mut watched.files {
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
        watched.run.follow(step, &watched.progress.sentinel, environment);
        Ok(())
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
        Decision::Recipe => unreachable!("only a metric of evaluations returns to the recipe"),
    }
}
