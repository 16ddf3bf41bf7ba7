//! Why completions end, as clients read it.

use crate::json::ObjectText;
use serde::Serialize;

/// What ended a completion, as vLLM's `stop_reason` tells it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(untagged)]
pub enum StopReason {
    /// The end of the text, or a limit.
    #[default]
    None,
    /// A token of `stop_token_ids`.
    Token(u32),
    /// A text of `stop`.
    Text(String),
}

/// Why a completion ended, as clients read it.
#[derive(Clone, Debug, PartialEq)]
pub struct Finish {
    /// `finish_reason`.
    pub reason: &'static str,
    /// `stop_reason`.
    pub stop: StopReason,
}

impl Finish {
    /// Adds the fields of a finish that is there or still to come to a choice.
    pub fn write(finish: Option<Finish>, object: ObjectText) -> ObjectText {
        let (reason, stop) = finish.map_or((None, StopReason::None), |finish| (Some(finish.reason), finish.stop));
        object.field("finish_reason", &reason).field("stop_reason", &stop)
    }
}
