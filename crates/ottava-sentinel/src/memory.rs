//! What alarms remember between steps, as checkpoints save it.

use crate::{CastHistory, RolloutHistory};
use ottava_recipe::scaling::{CastCounts, CastRecord};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// What the detectors of a run have seen.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AlarmMemory {
    /// The losses that the next one is compared with.
    pub losses: VecDeque<f64>,
    /// The gradient norms that the next one is compared with.
    pub grad_norms: VecDeque<f64>,
    /// The statistics of casts that the next ones are compared with.
    pub casts: CastHistory,
    /// What the alarms about completions remember.
    pub rollouts: RolloutHistory,
    /// What casts have counted since the last line of their log.
    pub counted: CountedSince,
}

/// What casts have counted since a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CountedSince {
    /// The step.
    pub since: u64,
    /// Counts by cast.
    pub counts: BTreeMap<String, CastCounts>,
}

/// The last line of the log of casts: its step, and what each cast of this process had counted then.
#[derive(Clone, Debug)]
pub struct LastLine {
    /// The step.
    pub step: u64,
    /// Counts in the order of the casts.
    pub counts: Vec<CastCounts>,
}

impl LastLine {
    /// The last line of a run that goes on after a checkpoint with these counts `saved`. What the casts of this process have counted until `now`
    /// belongs to no line.
    pub fn before(saved: &CountedSince, now: &[CastRecord]) -> LastLine {
        let base = |record: &CastRecord| {
            let own = saved.counts.get(&record.name).copied().unwrap_or_default();
            record.counts.minus(own)
        };
        LastLine { step: saved.since, counts: now.iter().map(base).collect() }
    }

    /// What casts have counted between the line and `now`.
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
        // The next process has counted 7 elements while it was loading, and casts that are new have counted nothing.
        let resumed = LastLine::before(&saved, &[record("a", 7), record("b", 5)]);
        let next = resumed.until(&[record("a", 27), record("b", 9)]);
        assert_eq!((next.since, next.counts["a"].elements, next.counts["b"].elements), (6, 50, 4));
    }
}
