//! The progress of a run: what a checkpoint saves besides tensors, in its manifest.

use crate::Best;
use ottava_data::DataState;
use ottava_parallel::optim::LossScale;
use ottava_sentinel::{AlarmMemory, SentinelState};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The state of a run other than its tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Optimizer steps done.
    pub step: u64,
    /// Tokens of documents trained on; padding is none.
    pub tokens: u64,
    /// The rows that come next.
    #[serde(flatten)]
    pub rows: RowsProgress,
    /// The resolved configuration of the run, as TOML.
    pub config: String,
    /// Names of the FP8 casts, in the order of the scaling arrays.
    pub scaling_slots: Vec<String>,
    /// The loss scale, with `fp16`.
    #[serde(default)]
    pub loss_scale: Option<LossScale>,
    /// Metrics of the step that are not written yet, because a signal interrupted its evaluation.
    #[serde(default)]
    pub pending: Option<Map<String, Value>>,
    /// The best evaluation so far.
    #[serde(default)]
    pub best: Option<Best>,
    /// The decisions of the sentinel, and the rollbacks of the run.
    #[serde(default)]
    pub sentinel: SentinelState,
    /// What alarms compare the next step with.
    #[serde(default)]
    pub alarms: AlarmMemory,
    /// Whether only a signal asked for the checkpoint. Rollbacks do not return to it, and it does not count for `save_total_limit`, so that the run
    /// goes on as if nothing had stopped it.
    #[serde(default)]
    pub is_interruption: bool,
}

/// What decides about the rows that a run reads next.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RowsProgress {
    /// Position in the data, and the seed of its order.
    pub loader: DataState,
    /// Hash of the prepared data: of files, tokenizer and options.
    pub data: String,
    /// SHA-256 of the log-probabilities of the reference model, if the run has stored them.
    #[serde(default)]
    pub reference: Option<String>,
    /// What later steps read of rows that the model has made already.
    #[serde(default)]
    pub unfinished: Option<Value>,
}

impl Progress {
    /// A run before its first step, which reads its data from `loader` on.
    pub fn start(loader: DataState) -> Progress {
        Progress {
            step: 0,
            tokens: 0,
            rows: RowsProgress { loader, data: String::new(), reference: None, unfinished: None },
            config: String::new(),
            scaling_slots: Vec::new(),
            loss_scale: None,
            pending: None,
            best: None,
            sentinel: SentinelState::default(),
            alarms: AlarmMemory::default(),
            is_interruption: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ottava_data::LoaderState;
    use serde_json::json;

    /// The manifests of earlier versions have the keys of the rows among the others.
    #[test]
    fn the_keys_of_the_rows_are_among_the_others() {
        let state = LoaderState { seed: u64::MAX, ..LoaderState::start(0) };
        let mut progress = Progress::start(DataState::One(state));
        progress.rows.data = "key".into();
        let written = serde_json::to_value(&progress).unwrap();
        assert_eq!((&written["data"], &written["loader"]["seed"]), (&json!("key"), &json!(u64::MAX)));
        let earlier = json!({
            "step": 0, "tokens": 0, "loader": written["loader"], "data": "key", "config": "", "scaling_slots": [],
        });
        assert_eq!(serde_json::from_value::<Progress>(earlier).unwrap(), progress);
        assert_eq!(serde_json::from_value::<Progress>(written).unwrap(), progress);
    }
}
