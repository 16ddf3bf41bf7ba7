//! The memory of alarms between steps, which checkpoints save.

use crate::{CastHistory, RolloutHistory};
use ottava_recipe::scaling::{CastCounts, CastRecord};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// The memory of the detectors of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AlarmMemory {
    /// The losses with which the next loss is compared.
    pub losses: VecDeque<f64>,
    /// The gradient norms with which the next norm is compared.
    pub grad_norms: VecDeque<f64>,
    /// The statistics of casts with which the next statistics are compared.
    pub casts: CastHistory,
    /// The memory of the alarms about completions.
    pub rollouts: RolloutHistory,
    /// The counts of casts since the last line of their log.
    pub counted: CountedSince,
}

/// The counts of casts since a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CountedSince {
    /// The step from which the counts begin.
    pub since: u64,
    /// The counts by cast.
    pub counts: BTreeMap<String, CastCounts>,
}

/// The last line of the log of casts: its step, and the counts of each cast of this process at that time.
#[derive(Clone, Debug)]
pub struct LastLine {
    /// The step of the line.
    pub step: u64,
    /// The counts, in the order of the casts.
    pub counts: Vec<CastCounts>,
}

impl LastLine {
    /// Returns the last line of a run that continues from a checkpoint with these counts `saved`. The counts of this process until `now` do not
    /// belong to any line.
    pub fn before(saved: &CountedSince, now: &[CastRecord]) -> LastLine {
        let base = |record: &CastRecord| {
            let own = saved.counts.get(&record.name).copied().unwrap_or_default();
            record.counts.minus(own)
        };
        LastLine { step: saved.since, counts: now.iter().map(base).collect() }
    }

    /// Returns the counts between the line and `now`.
    pub fn until(&self, now: &[CastRecord]) -> CountedSince {
        let counted = now.iter().zip(&self.counts);
        let counts = counted.map(|(record, before)| (record.name.clone(), record.counts.minus(*before)));
        CountedSince { since: self.step, counts: counts.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(name: &str, elements: i64) -> CastRecord {
        let counts = CastCounts { elements, ..CastCounts::default() };
        CastRecord { name: name.into(), largest: 448.0, amax: 1.0, scale: None, counts }
    }

    #[test]
    fn a_process_that_goes_on_counts_from_the_last_line() {
        let line = LastLine { step: 6, counts: vec![record("a", 100).counts] };
        let saved = line.until(&[record("a", 130)]);
        assert_eq!((saved.since, saved.counts["a"].elements), (6, 30));
        // The next process has counted 7 elements while it was loading. A cast that is new starts at zero.
        let resumed = LastLine::before(&saved, &[record("a", 7), record("b", 5)]);
        let next = resumed.until(&[record("a", 27), record("b", 9)]);
        assert_eq!((next.since, next.counts["a"].elements, next.counts["b"].elements), (6, 50, 4));
    }
}
