//! The step in flight: a decode step whose tokens the host has not read yet. `ahead.rs` launches such steps.

use crate::request::RequestId;
use ottava_tensor::{Snapshot, Tensor};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// What a step of the engine launches and reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pace {
    /// Launches passes, and reads their tokens.
    #[default]
    Whole,
    /// Launches a decode step, which is then in flight.
    Begin,
    /// Launches the decode step after the step in flight, and then reads the tokens of the step in flight.
    Continue,
    /// Reads the tokens of the step in flight.
    End,
}

/// The step in flight, and the memory that steps in flight use in turns.
#[derive(Default)]
pub(super) struct Ahead {
    pub flight: Option<Flight>,
    pub memory: Option<Memory>,
    /// The number of steps that were launched.
    pub launched: usize,
}

pub(super) struct Memory {
    /// The tokens of the step that was launched last, I32.
    pub tokens: Tensor,
    /// The copies of the results of the last two steps.
    pub results: [Snapshot; 2],
}

/// A decode step whose tokens were not read yet.
pub(super) struct Flight {
    /// The requests of its rows, in the order of `running`.
    pub requests: Vec<RequestId>,
    /// The number of its results in `Memory::results`.
    pub number: usize,
    /// The places of the results: I32 likeliest tokens, I32 drawn tokens, and F32 log-probabilities of drawn tokens, which may be empty.
    pub results: [Range<usize>; 3],
    /// Whether its requests count the tokens that it computes as computed. They do not count tokens that the host does not know yet.
    pub is_counted: bool,
}

impl Flight {
    /// Returns the number of each request of this step in `running`, with its row. Requests that have ended are left out.
    pub fn places<'a>(
        &'a self,
        running: impl Iterator<Item = RequestId> + 'a,
    ) -> impl Iterator<Item = (usize, usize)> + 'a {
        // Both have the same order.
        let mut rows = self.requests.iter().enumerate();
        running.enumerate().filter_map(move |(at, id)| Some((at, rows.find(|(_, request)| **request == id)?.0)))
    }
}
