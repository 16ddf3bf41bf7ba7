//! What becomes of batches that could not be scored.

use crate::reward::Scores;
use crate::sample::Sample;
use ottava_common::{Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What happens to the samples of a batch that could not be scored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnError {
    /// The run ends with the error.
    #[default]
    Stop,
    /// They score 0.
    Zero,
    /// They are not scored.
    Skip,
}

/// Numbers for the log, by their names.
type Metrics = BTreeMap<String, f64>;

/// Why a batch has no scores.
#[derive(Debug)]
pub(super) enum Failure {
    /// All work ends: a request to stop, or the deadline of the whole batch.
    Ended(Error),
    /// All attempts failed. A sentence without a full stop.
    Failed(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Ended(error)
    }
}

impl OnError {
    /// What `result` is under this policy: `otherwise`, with a warning, where a failure does not end the run. `None` tells that it failed.
    fn settle<T>(self, result: Result<T, Failure>) -> Result<Option<T>> {
        match (result, self) {
            (Ok(value), _) => Ok(Some(value)),
            (Err(Failure::Ended(error)), _) => Err(error),
            (Err(Failure::Failed(words)), OnError::Stop) => Err(Error::External(words)),
            (Err(Failure::Failed(words)), OnError::Zero | OnError::Skip) => {
                tracing::warn!("{words}");
                Ok(None)
            }
        }
    }

    /// The reward of a sample whose batch failed.
    pub(super) fn reward(self) -> Option<f64> {
        if self == OnError::Zero { Some(0.0) } else { None }
    }

    /// The scores of consecutive batches, with metrics as [`OnError::merge`] has them.
    pub(super) fn scores(self, batches: &[&[Sample]], results: Vec<Result<Scores, Failure>>) -> Result<Scores> {
        let answers = results.into_iter().map(|result| result.map(|scores| (scores.rewards, scores.metrics)));
        let (rewards, metrics) = self.merge(batches, answers, self.reward())?;
        Ok(Scores { rewards, metrics })
    }

    /// The answers to consecutive batches; the samples of a batch that failed get `otherwise`. Each metric is the mean over the samples whose batches
    /// returned it; `failed` is the share of samples whose batches failed.
    pub(super) fn merge<S, T: Clone>(
        self,
        batches: &[&[S]],
        results: impl IntoIterator<Item = Result<(Vec<T>, Metrics), Failure>>,
        otherwise: T,
    ) -> Result<(Vec<T>, Metrics)> {
        let (mut merged, mut failed) = (Vec::new(), 0);
        let mut sums: BTreeMap<String, (f64, f64)> = BTreeMap::new();
        for (batch, result) in batches.iter().zip(results) {
            let Some((answers, metrics)) = self.settle(result)? else {
                failed += batch.len();
                merged.extend(batch.iter().map(|_| otherwise.clone()));
                continue;
            };
            merged.extend(answers);
            for (metric, value) in metrics {
                let (sum, count) = sums.entry(metric).or_default();
                *sum += value * batch.len() as f64;
                *count += batch.len() as f64;
            }
        }
        let mut metrics: Metrics = sums.into_iter().map(|(metric, (sum, count))| (metric, sum / count)).collect();
        metrics.insert("failed".into(), failed as f64 / merged.len().max(1) as f64);
        Ok((merged, metrics))
    }
}
