//! The progress of a run: the state that a checkpoint saves besides tensors, in its manifest.

use crate::Best;
use ottava_data::DataState;
use ottava_parallel::optim::LossScale;
use ottava_sentinel::{AlarmMemory, SentinelState};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The state of a run except its tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// The number of finished optimizer steps.
    pub step: u64,
    /// The number of tokens of documents that the run has trained on, without padding.
    pub tokens: u64,
    /// The position in the rows of the run.
    #[serde(flatten)]
    pub rows: RowsProgress,
    /// The resolved configuration of the run, as TOML.
    pub config: String,
    /// The names of the FP8 casts, in the order of the scaling arrays.
    pub scaling_slots: Vec<String>,
    /// The loss scale, with `fp16`.
    #[serde(default)]
    pub loss_scale: Option<LossScale>,
    /// The metrics of the step that are not written yet, because a signal interrupted its evaluation.
    #[serde(default)]
    pub pending: Option<Map<String, Value>>,
    /// The best evaluation so far.
    #[serde(default)]
    pub best: Option<Best>,
    /// The decisions of the sentinel, and the rollbacks of the run.
    #[serde(default)]
    pub sentinel: SentinelState,
    /// The history with which alarms compare the next step.
    #[serde(default)]
    pub alarms: AlarmMemory,
    /// Whether the checkpoint was saved only on a signal. Rollbacks do not return to such a checkpoint, and it does not count for `save_total_limit`.
    /// So the run continues as if it had not been interrupted.
    #[serde(default)]
    pub is_interruption: bool,
    /// Whether the checkpoint holds the model alone, so that no run can resume from it.
    #[serde(default)]
    pub is_model_only: bool,
}

/// The state that determines which rows a run reads next.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RowsProgress {
    /// The position in the data, and the seed of its order.
    pub loader: DataState,
    /// The hash of the prepared data: of its files, the tokenizer and the options.
    pub data: String,
    /// The SHA-256 of the log-probabilities of the reference model, if the run has stored them.
    #[serde(default)]
    pub reference: Option<String>,
    /// The rows that the model has already generated for later steps.
    #[serde(default)]
    pub unfinished: Option<Value>,
}

impl Progress {
    /// Returns the progress of a run before its first step. It reads its data from `loader` on.
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
            is_model_only: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ottava_data::LoaderState;
    use serde_json::json;

    /// The manifests of earlier versions have the keys of the rows among the other keys.
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
