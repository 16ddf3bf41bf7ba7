//! The decisions of the sentinel: the products that a run computes in BF16 because of earlier findings.

use crate::{Finding, Measure, MetricBounds, SentinelPolicy, Verdict};
use ottava_data::DataState;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// A linear whose products read BF16 operands for some steps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Demotion {
    /// The name of the linear.
    pub linear: String,
    /// The first step in which the linear is tried again. The linear is demoted in all steps before.
    pub until: u64,
    /// The number of times that the linear was demoted. Each demotion lasts twice as long as the one before.
    pub times: u32,
}

/// The decisions so far, which checkpoints save.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SentinelState {
    /// The step before which all products read BF16 operands.
    pub high_until: u64,
    /// The number of times that the run changed to BF16.
    pub high_times: u32,
    /// Whether all products read BF16 operands because a metric of evaluations was worse by the recipe.
    #[serde(default)]
    pub high_by_metric: bool,
    /// The linears that are demoted now or were demoted before.
    pub demoted: Vec<Demotion>,
    /// The number of consecutive steps, up to now, whose updates an alarm skipped.
    #[serde(default)]
    pub skipped_in_a_row: u64,
    /// The number of all steps whose updates an alarm skipped.
    #[serde(default)]
    pub skipped_steps: u64,
    /// The rollbacks of the run to earlier checkpoints, in their order.
    #[serde(default)]
    pub rollbacks: Vec<Rollback>,
}

/// A return to an earlier checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rollback {
    /// The last step before the rollback.
    pub from: u64,
    /// The step of the checkpoint.
    pub to: u64,
    /// The message of the alarm.
    pub reason: String,
    /// The position in the data from which the run continued. The rows of the steps between are skipped.
    pub data: DataState,
}

/// The decision after a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// Nothing changes.
    None,
    /// The run saves a checkpoint after the step and ends.
    Pause,
    /// These linears are computed in BF16.
    Demote(Vec<String>),
    /// All products are computed in BF16.
    Bf16,
    /// All products are computed by the recipe again.
    Recipe,
}

/// The maximum number of times that a period is doubled.
const DOUBLINGS: u32 = 10;

impl SentinelState {
    /// Returns the linears that are demoted in `step`.
    pub fn demoted_in(&self, step: u64) -> BTreeSet<String> {
        self.demoted.iter().filter(|one| one.until > step).map(|one| one.linear.clone()).collect()
    }

    /// Returns whether all products read BF16 operands in `step`.
    pub fn is_high_in(&self, step: u64) -> bool {
        self.high_until > step || self.high_by_metric
    }

    /// Returns the linears that were demoted before and are computed by the recipe in `step`.
    pub fn tried_in(&self, step: u64) -> Vec<String> {
        self.demoted.iter().filter(|one| one.until <= step).map(|one| one.linear.clone()).collect()
    }

    /// Returns whether the run was in BF16 before and is computed by the recipe in `step`.
    pub fn is_tried_in(&self, step: u64) -> bool {
        self.high_times > 0 && !self.is_high_in(step)
    }

    /// Decides what follows from the `verdict` of a check before `step`, by `policy`. The decision holds for `hold` steps, or longer if it is
    /// repeated.
    pub fn decide(&mut self, policy: SentinelPolicy, verdict: &Verdict, step: u64, hold: u64) -> Decision {
        if verdict.findings.is_empty() {
            return Decision::None;
        }
        match policy {
            SentinelPolicy::Report => Decision::None,
            SentinelPolicy::Pause => Decision::Pause,
            SentinelPolicy::Bf16 if self.is_high_in(step) => Decision::None,
            SentinelPolicy::Bf16 => {
                self.high_until = step.saturating_add(period(hold, self.high_times));
                self.high_times += 1;
                Decision::Bf16
            }
            SentinelPolicy::Demote => {
                let demoted = self.demoted_in(step);
                let mut named: Vec<String> = Vec::new();
                for linear in verdict.findings.iter().filter_map(|finding| finding.linear()) {
                    if !demoted.contains(linear) && !named.iter().any(|name| name == linear) {
                        named.push(linear.to_string());
                    }
                }
                if named.is_empty() {
                    let is_loss = verdict.findings.iter().any(|finding| finding.measure == Measure::LossGap);
                    let ranking = if is_loss { &verdict.loss_costs } else { &verdict.ranking };
                    let worst = ranking.iter().map(|(name, _)| name).find(|name| !demoted.contains(*name));
                    named.extend(worst.cloned());
                }
                named.iter().for_each(|linear| self.demote(linear, step, hold));
                if named.is_empty() { Decision::None } else { Decision::Demote(named) }
            }
        }
    }

    /// Decides what follows from an evaluation whose metric is worse by `gap` by the recipe than in BF16, and returns the finding if the gap is beyond its
    /// bound. A metric names no linear, so the policy `Demote` computes all products in BF16 as well. They stay in BF16 until an evaluation is within the
    /// bound of a return.
    pub fn decide_by_metric(
        &mut self,
        policy: SentinelPolicy,
        gap: f64,
        bounds: MetricBounds,
    ) -> (Option<Finding>, Decision) {
        if self.high_by_metric {
            self.high_by_metric = gap > bounds.to_return || gap.is_nan();
            return (None, if self.high_by_metric { Decision::None } else { Decision::Recipe });
        }
        if gap <= bounds.gap {
            return (None, Decision::None);
        }
        let decision = match policy {
            SentinelPolicy::Report => Decision::None,
            SentinelPolicy::Pause => Decision::Pause,
            SentinelPolicy::Demote | SentinelPolicy::Bf16 => {
                self.high_by_metric = true;
                Decision::Bf16
            }
        };
        (Some(Finding { tensor: None, measure: Measure::MetricGap, value: gap, bound: bounds.gap }), decision)
    }

    fn demote(&mut self, linear: &str, step: u64, hold: u64) {
        match self.demoted.iter_mut().find(|one| one.linear == linear) {
            Some(one) => {
                one.until = step.saturating_add(period(hold, one.times));
                one.times += 1;
            }
            None => self.demoted.push(Demotion { linear: linear.into(), until: step.saturating_add(hold), times: 1 }),
        }
    }
}

/// Returns the number of steps for which a decision holds that was made `times` times before.
fn period(hold: u64, times: u32) -> u64 {
    hold.saturating_mul(1 << times.min(DOUBLINGS))
}

#[cfg(test)]
mod tests {
    use super::super::Finding;
    use super::*;

    fn verdict(linears: &[&str], global: bool) -> Verdict {
        let of = |tensor: Option<String>| Finding { tensor, measure: Measure::LossGap, value: 1.0, bound: 0.0 };
        let mut findings: Vec<_> = linears.iter().map(|name| of(Some(name.to_string()))).collect();
        findings.extend(global.then(|| of(None)));
        let ranked = |names: [&str; 2]| names.map(|name| (name.to_string(), 0.1)).to_vec();
        let (ranking, loss_costs) = (ranked(["second", "worst"]), ranked(["worst", "second"]));
        Verdict { loss_gap: 1.0, cosine: 1.0, norm_ratio: 1.0, findings, ranking, loss_costs }
    }

    #[test]
    fn a_linear_is_demoted_tried_again_and_demoted_for_longer() {
        let mut state = SentinelState::default();
        let decided = state.decide(SentinelPolicy::Demote, &verdict(&["a", "b", "a"], false), 10, 100);
        assert_eq!(decided, Decision::Demote(vec!["a".into(), "b".into()]));
        assert_eq!(state.demoted_in(109).len(), 2);
        assert!(state.demoted_in(110).is_empty());
        assert_eq!(state.tried_in(110), ["a", "b"]);
        assert_eq!(state.decide(SentinelPolicy::Demote, &verdict(&[], false), 110, 100), Decision::None);
        let decided = state.decide(SentinelPolicy::Demote, &verdict(&["a"], false), 210, 100);
        assert_eq!(decided, Decision::Demote(vec!["a".into()]));
        assert_eq!(state.demoted[0], Demotion { linear: "a".into(), until: 410, times: 2 });
    }

    #[test]
    fn findings_of_the_whole_model_demote_the_worst_linear_that_is_not_demoted() {
        let mut state = SentinelState::default();
        let mut decide = |step| state.decide(SentinelPolicy::Demote, &verdict(&[], true), step, 100);
        assert_eq!(decide(1), Decision::Demote(vec!["worst".into()]));
        assert_eq!(decide(2), Decision::Demote(vec!["second".into()]));
        assert_eq!(decide(3), Decision::None);
    }

    #[test]
    fn a_run_goes_to_bf16_and_back_and_for_longer() {
        let mut state = SentinelState::default();
        let mut decide = |step, found| {
            let verdict = verdict(&[], found);
            let decision = state.decide(SentinelPolicy::Bf16, &verdict, step, 50);
            (decision, state.is_high_in(step), state.is_tried_in(step))
        };
        assert_eq!(decide(1, false), (Decision::None, false, false));
        assert_eq!(decide(11, true), (Decision::Bf16, true, false));
        assert_eq!(decide(21, true), (Decision::None, true, false));
        assert_eq!(decide(61, false), (Decision::None, false, true));
        assert_eq!(decide(71, true), (Decision::Bf16, true, false));
        assert!(state.is_high_in(170) && !state.is_high_in(171));
    }

    #[test]
    fn a_metric_leaves_the_recipe_above_one_bound_and_returns_below_the_other() {
        let bounds = MetricBounds { gap: 0.1, to_return: 0.04 };
        let mut state = SentinelState::default();
        let mut decide = |gap: f64| {
            let (finding, decision) = state.decide_by_metric(SentinelPolicy::Bf16, gap, bounds);
            (finding.map(|finding| finding.value), decision, state.is_high_in(7))
        };
        assert_eq!(decide(0.1), (None, Decision::None, false));
        assert_eq!(decide(0.11), (Some(0.11), Decision::Bf16, true));
        assert_eq!(decide(0.09), (None, Decision::None, true));
        assert_eq!(decide(f64::NAN).1, Decision::None);
        assert_eq!(decide(0.04), (None, Decision::Recipe, false));
        assert_eq!(decide(0.09), (None, Decision::None, false));
        assert_eq!(decide(f64::NAN).1, Decision::Bf16);
        let mut paused = SentinelState::default();
        let pause = |policy| SentinelState::default().decide_by_metric(policy, 1.0, bounds).1;
        assert_eq!([SentinelPolicy::Report, SentinelPolicy::Pause].map(pause), [Decision::None, Decision::Pause]);
        let (finding, _) = paused.decide_by_metric(SentinelPolicy::Pause, 1.0, bounds);
        assert_eq!(finding.unwrap().to_string(), "the metric is worse by 1.0000 than in BF16 (bound 0.1)");
        assert_eq!(paused, SentinelState::default());
    }

    #[test]
    fn reports_and_pauses_change_nothing() {
        let mut state = SentinelState::default();
        assert_eq!(state.decide(SentinelPolicy::Report, &verdict(&["a"], true), 1, 9), Decision::None);
        assert_eq!(state.decide(SentinelPolicy::Pause, &verdict(&["a"], true), 1, 9), Decision::Pause);
        assert_eq!(state, SentinelState::default());
    }
}
