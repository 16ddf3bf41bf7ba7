//! Summarizes a run's `metrics.jsonl`.

use super::metrics::MAX_METRICS_BYTES;
use ottava_common::error::{Error, Result};
use ottava_common::input;
use serde::Serialize;
use serde_json::Value;
use std::path::Path;

/// A summary of a run's metrics.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// The last step with metrics.
    pub step: u64,
    /// The number of tokens that the run has trained on.
    pub tokens: u64,
    /// The training loss of the first step and of the last step, each with its step.
    pub loss: Option<[(u64, f64); 2]>,
    /// The first and the last validation loss, each with its step.
    pub eval_loss: Option<[(u64, f64); 2]>,
    /// The elements that FP8 casts have lost; `None` if the run has no such casts.
    pub casts: Option<CastSummary>,
}

/// The elements that all FP8 casts of a run have lost.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CastSummary {
    /// The share of elements beyond the largest finite value after scaling.
    pub saturated: Share,
    /// The share of nonzero elements that became zero.
    pub underflowed: Share,
    /// The steps in which the input of a cast was infinite.
    pub non_finite_steps: Vec<u64>,
}

/// A share of all elements that a run casts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Share {
    /// The mean share over all steps.
    pub mean: f64,
    /// The largest share of a step.
    pub highest: f64,
    /// The step of the largest share.
    pub step: u64,
}

impl Summary {
    /// Reads a `metrics.jsonl`. An incomplete last line is ignored.
    pub fn read(path: &Path) -> Result<Summary> {
        let text = input::read_text(path, MAX_METRICS_BYTES).map_err(Error::io(path))?;
        let mut lines = Vec::new();
        for (number, line) in text.split_inclusive('\n').filter(|line| line.ends_with('\n')).enumerate() {
            let value: Option<Value> = serde_json::from_str(line).ok();
            let step = value.as_ref().and_then(|value| value["step"].as_u64());
            let (Some(step), Some(value)) = (step, value) else {
                return Err(Error::Data(format!(
                    "{}:{}: not a line of metrics with a step; is the file another program's?",
                    path.display(),
                    number + 1
                )));
            };
            lines.push((step, value));
        }
        let series = |key: &str| -> Vec<(u64, f64)> {
            lines.iter().filter_map(|(step, line)| Some((*step, line[key].as_f64()?))).collect()
        };
        let ends = |series: Vec<(u64, f64)>| Some([*series.first()?, *series.last()?]);
        let share = |series: Vec<(u64, f64)>| {
            let mean = series.iter().map(|(_, share)| share).sum::<f64>() / series.len() as f64;
            let highest = series.into_iter().reduce(|best, next| if next.1 > best.1 { next } else { best })?;
            Some(Share { mean, highest: highest.1, step: highest.0 })
        };
        let infinite = series("fp8_non_finite").into_iter().filter(|(_, casts)| *casts > 0.0).map(|(step, _)| step);
        let non_finite_steps = infinite.collect();
        let casts = share(series("fp8_saturated")).zip(share(series("fp8_underflowed")));
        Ok(Summary {
            step: lines.iter().map(|(step, _)| *step).max().unwrap_or(0),
            tokens: lines.iter().filter_map(|(_, line)| line["tokens"].as_u64()).max().unwrap_or(0),
            loss: ends(series("loss")),
            eval_loss: ends(series("eval_loss")),
            casts: casts.map(|(saturated, underflowed)| CastSummary { saturated, underflowed, non_finite_steps }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_has_ends_means_and_worst_steps() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let step = |step: u64, loss: f64, saturated: f64, infinite: u64| {
            format!(
                r#"{{"step":{step},"loss":{loss},"tokens":{},"fp8_saturated":{saturated},"fp8_underflowed":0.5,"fp8_non_finite":{infinite}}}"#,
                100 * step
            )
        };
        let lines = [
            r#"{"step":0,"eval_loss":9.0}"#.to_string(),
            step(1, 8.0, 0.0, 0),
            step(2, 6.0, 0.3, 2),
            step(3, 5.0, 0.0, 0),
            "{\"st".to_string(),
        ];
        std::fs::write(&path, lines.join("\n")).unwrap();
        let summary = Summary::read(&path).unwrap();
        assert_eq!((summary.step, summary.tokens), (3, 300));
        assert_eq!(summary.loss, Some([(1, 8.0), (3, 5.0)]));
        assert_eq!(summary.eval_loss, Some([(0, 9.0), (0, 9.0)]));
        let casts = summary.casts.unwrap();
        assert_eq!(casts.underflowed, Share { mean: 0.5, highest: 0.5, step: 1 });
        assert_eq!(casts.non_finite_steps, [2]);
        // A third of 0.3 in F64 has two roundings of 2⁻⁵³.
        assert!((casts.saturated.mean - 0.1).abs() < 1e-12);
        assert_eq!((casts.saturated.highest, casts.saturated.step), (0.3, 2));
        std::fs::write(&path, "{\"loss\":1}\n").unwrap();
        assert!(Summary::read(&path).unwrap_err().to_string().contains("metrics.jsonl:1: not a line of metrics"));
    }
}
