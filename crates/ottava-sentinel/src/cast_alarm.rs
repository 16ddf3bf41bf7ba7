//! Alarms about the statistics of casts.

use ottava_recipe::scaling::{CastCounts, CastRecord};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::{self, Display};

/// The kind of an alarm about a cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CastAlarm {
    /// Too large a share of elements is beyond the largest finite value.
    Saturation,
    /// Too large a share of nonzero elements became zero.
    Underflow,
    /// The amax is too many powers of two above the median of earlier amaxes.
    AmaxGrowth,
    /// The scale is the largest scale of F32, or subnormal.
    ScaleLimit,
}

impl CastAlarm {
    /// Returns the name in files.
    pub fn as_str(self) -> &'static str {
        match self {
            CastAlarm::Saturation => "saturation",
            CastAlarm::Underflow => "underflow",
            CastAlarm::AmaxGrowth => "amax_growth",
            CastAlarm::ScaleLimit => "scale_limit",
        }
    }
}

/// The bounds beyond which a number is an alarm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CastBounds {
    /// The maximum share of elements that saturate.
    pub saturated: f64,
    /// The maximum share of elements that underflow.
    pub underflowed: f64,
    /// The maximum growth in powers of two.
    pub growth: f64,
}

/// The statistics of a cast since the last line of statistics.
#[derive(Clone, Debug, PartialEq)]
pub struct SeenCast {
    /// The name of the cast.
    pub name: String,
    /// The amax of the last step.
    pub amax: f64,
    /// The scale of the last step; `None` if it was computed from the tensor.
    pub scale: Option<f64>,
    /// The share of elements that saturated.
    pub saturated: f64,
    /// The share of elements that underflowed.
    pub underflowed: f64,
}

impl SeenCast {
    /// Returns the difference between the records `now` and the counts `before` of the same casts.
    pub fn since(before: &[CastCounts], now: &[CastRecord]) -> Vec<SeenCast> {
        let seen = now.iter().zip(before).map(|(CastRecord { name, amax, scale, counts, .. }, before)| {
            let CastCounts { elements, saturated, underflowed, .. } = counts.minus(*before);
            let share = |count: i64| count as f64 / elements.max(1) as f64;
            SeenCast {
                name: name.clone(),
                amax: f64::from(*amax),
                scale: scale.map(f64::from),
                saturated: share(saturated),
                underflowed: share(underflowed),
            }
        });
        seen.collect()
    }
}

/// A number of a cast beyond its bound.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CastFinding {
    /// The kind of the alarm.
    pub alarm: CastAlarm,
    /// The name of the cast.
    pub name: String,
    /// The number beyond its bound.
    pub value: f64,
}

impl Display for CastFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CastFinding { alarm, name, value } = self;
        match alarm {
            CastAlarm::Saturation => write!(f, "{:.2} % of the elements of `{name}` saturate", 100.0 * value),
            CastAlarm::Underflow => write!(f, "{:.1} % of the elements of `{name}` underflow", 100.0 * value),
            CastAlarm::AmaxGrowth => {
                write!(f, "the amax of `{name}` is {value:.1} powers of two above its median")
            }
            CastAlarm::ScaleLimit => write!(f, "the scale of `{name}` is {value:e}, at the limit of F32"),
        }
    }
}

/// The number of lines whose amaxes are compared with the next amax.
const WINDOW: usize = 50;

/// The number of lines before which growth does not raise an alarm.
const LEAST: usize = 5;

/// The history with which the next statistics of casts are compared.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CastHistory {
    /// The last amaxes of each cast that were finite and not zero.
    amaxes: BTreeMap<String, VecDeque<f64>>,
    /// The alarms of the last line. They are not reported again.
    found: BTreeSet<(CastAlarm, String)>,
}

/// A detector of casts with unusual statistics.
#[derive(Clone, Debug)]
pub struct CastDetector {
    bounds: CastBounds,
    history: CastHistory,
}

impl CastDetector {
    /// Makes a detector that has seen the lines of `history`.
    pub fn new(bounds: CastBounds, history: CastHistory) -> CastDetector {
        CastDetector { bounds, history }
    }

    /// Returns the history with which the next statistics are compared.
    pub fn history(&self) -> &CastHistory {
        &self.history
    }

    /// Adds the statistics of all casts. Returns the numbers that are beyond their bounds and were within them the last time, sorted by alarm.
    pub fn see(&mut self, casts: &[SeenCast]) -> Vec<CastFinding> {
        let mut all = Vec::new();
        for cast in casts {
            let mut check = |alarm, value: f64, is_beyond: bool| {
                if is_beyond {
                    all.push(CastFinding { alarm, name: cast.name.clone(), value });
                }
            };
            check(CastAlarm::Saturation, cast.saturated, cast.saturated > self.bounds.saturated);
            check(CastAlarm::Underflow, cast.underflowed, cast.underflowed > self.bounds.underflowed);
            if let Some(scale) = cast.scale {
                let within = scale >= f64::from(f32::MIN_POSITIVE) && scale < f64::from(f32::MAX);
                check(CastAlarm::ScaleLimit, scale, !within);
            }
            if cast.amax > 0.0 {
                let before = self.history.amaxes.entry(cast.name.clone()).or_default();
                if before.len() >= LEAST {
                    let growth = (cast.amax / super::alarm::median(before.iter().copied().collect())).log2();
                    check(CastAlarm::AmaxGrowth, growth, growth > self.bounds.growth);
                }
                // The JSON of a checkpoint cannot represent an infinity, and an infinity would not raise a finite median.
                before.extend(cast.amax.is_finite().then_some(cast.amax));
                if before.len() > WINDOW {
                    before.pop_front();
                }
            }
        }
        let now = all.iter().map(|finding| (finding.alarm, finding.name.clone())).collect();
        let last = std::mem::replace(&mut self.history.found, now);
        all.retain(|finding| !last.contains(&(finding.alarm, finding.name.clone())));
        all.sort_by_key(|finding| finding.alarm);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: CastBounds = CastBounds { saturated: 0.01, underflowed: 0.5, growth: 8.0 };

    fn seen(name: &str, amax: f64, scale: f64, saturated: f64, underflowed: f64) -> SeenCast {
        SeenCast { name: name.into(), amax, scale: Some(scale), saturated, underflowed }
    }

    #[test]
    fn each_alarm_names_its_tensor_once() {
        let mut detector = CastDetector::new(BOUNDS, CastHistory::default());
        let calm = |amax| vec![seen("a", amax, 8.0, 0.001, 0.1), seen("b", 2.0 * amax, 4.0, 0.0, 0.3)];
        // The amaxes stay within the spread of a run, and grow slowly.
        for line in 0..200 {
            assert_eq!(detector.see(&calm(1.0 + 0.05 * f64::from(line) + 3.0 * f64::from(line % 7))), []);
        }
        let cases = [
            (seen("a", 1.0, 8.0, 0.02, 0.1), CastAlarm::Saturation, "2.00 % of the elements of `a` saturate"),
            (seen("a", 1.0, 8.0, 0.0, 0.6), CastAlarm::Underflow, "60.0 % of the elements of `a` underflow"),
            (seen("a", 1e6, 8.0, 0.0, 0.1), CastAlarm::AmaxGrowth, "the amax of `a` is 1"),
            (seen("a", f64::INFINITY, 8.0, 0.0, 0.1), CastAlarm::AmaxGrowth, "the amax of `a` is inf powers"),
            (seen("a", 1.0, f64::from(f32::MAX), 0.0, 0.1), CastAlarm::ScaleLimit, "the scale of `a` is 3.4"),
            (seen("a", 1.0, 1e-40, 0.0, 0.1), CastAlarm::ScaleLimit, "the scale of `a` is 1e-40, at the limit"),
        ];
        for (cast, alarm, words) in cases {
            let mut detector = detector.clone();
            let found = detector.see(std::slice::from_ref(&cast));
            assert_eq!(found.iter().map(|finding| finding.alarm).collect::<Vec<_>>(), [alarm], "{words}");
            assert!(found[0].to_string().starts_with(words), "{}", found[0]);
            assert_eq!(detector.see(std::slice::from_ref(&cast)), [], "it is found once");
            detector.see(&calm(1.0));
            assert_eq!(detector.see(&[cast]).len(), 1, "it is found again after it was gone");
        }
    }

    #[test]
    fn shares_are_those_since_the_last_line() {
        let counts = |elements, saturated| CastCounts { elements, saturated, underflowed: 0, non_finite: 0 };
        let record = CastRecord { name: "a".into(), largest: 448.0, amax: 2.0, scale: None, counts: counts(300, 30) };
        let seen = SeenCast::since(&[counts(100, 20)], &[record]);
        assert_eq!((seen[0].saturated, seen[0].underflowed, seen[0].scale), (0.05, 0.0, None));
    }
}
