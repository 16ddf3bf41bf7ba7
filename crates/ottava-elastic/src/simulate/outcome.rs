//! The results of simulations.

use serde::Serialize;

/// The outcome of one simulated job. Times are in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Outcome {
    /// The simulated time.
    pub wall: f64,
    /// The time in which all hosts would have trained the steps of the job without any failure.
    pub useful: f64,
    /// The time of work that was lost and trained again.
    pub lost: f64,
    /// The time in which no step was trained.
    pub down: f64,
    /// The part of `down` in which the job waited for hosts.
    pub waited: f64,
    /// The number of failures.
    pub failures: u64,
    /// The largest number of steps that one failure lost.
    pub most_lost_steps: u64,
    /// How often no spare was left.
    pub exhausted: u64,
    /// How often both copies of a snapshot were lost.
    pub copies_lost: u64,
    /// How often the job ended, and the launcher started it again.
    pub ended: u64,
    /// How often the host of the hub was lost.
    pub hubs_lost: u64,
    /// The number of slow hosts.
    pub stragglers: u64,
}

impl Outcome {
    /// Returns the share of the time that trained new steps.
    pub fn goodput(&self) -> f64 {
        self.useful / self.wall
    }
}

/// The mean of a number over seeds, with its extremes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The mean.
    pub mean: f64,
    /// The smallest value.
    pub least: f64,
    /// The largest value.
    pub most: f64,
}

impl Spread {
    fn new(values: impl Iterator<Item = f64> + Clone) -> Spread {
        let count = values.clone().count().max(1) as f64;
        Spread {
            mean: values.clone().sum::<f64>() / count,
            least: values.clone().fold(f64::INFINITY, f64::min),
            most: values.fold(f64::NEG_INFINITY, f64::max),
        }
    }
}

/// The outcomes of several seeds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// The share of the time that trained new steps.
    pub goodput: Spread,
    /// Failures per day.
    pub failures_per_day: f64,
    /// The share of the time in which the job waited for hosts.
    pub waited: f64,
    /// The share of the time of work that was lost.
    pub lost: f64,
    /// The largest number of steps that one failure lost.
    pub most_lost_steps: u64,
    /// How often no spare was left, per 30 days.
    pub exhausted: f64,
    /// How often both copies of a snapshot were lost, per 30 days.
    pub copies_lost: f64,
    /// How often the job ended, per 30 days.
    pub ended: f64,
}

impl Summary {
    pub(super) fn new(outcomes: &[Outcome]) -> Summary {
        let days = outcomes.iter().map(|outcome| outcome.wall).sum::<f64>() / super::inputs::DAY;
        let per_month = |count: fn(&Outcome) -> u64| {
            let all: u64 = outcomes.iter().map(count).sum();
            all as f64 / days * 30.0
        };
        let share = |time: fn(&Outcome) -> f64| Spread::new(outcomes.iter().map(|o| time(o) / o.wall)).mean;
        Summary {
            goodput: Spread::new(outcomes.iter().map(Outcome::goodput)),
            failures_per_day: per_month(|outcome| outcome.failures) / 30.0,
            waited: share(|outcome| outcome.waited),
            lost: share(|outcome| outcome.lost),
            most_lost_steps: outcomes.iter().map(|outcome| outcome.most_lost_steps).max().unwrap_or(0),
            exhausted: per_month(|outcome| outcome.exhausted),
            copies_lost: per_month(|outcome| outcome.copies_lost),
            ended: per_month(|outcome| outcome.ended),
        }
    }
}
