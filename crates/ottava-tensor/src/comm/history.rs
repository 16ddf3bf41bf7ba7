//! The last collectives of a rank, for messages.

use super::call::Call;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// Collectives that are remembered.
const REMEMBERED: usize = 64;

/// Numbers the collectives of a rank and remembers the last ones.
#[derive(Default)]
pub(super) struct History(Mutex<(u64, VecDeque<(u64, Call)>)>);

impl History {
    /// Gives `call` the next number, from 1 on, and runs `start` before any other call gets one.
    pub fn record<T>(&self, call: &Call, start: impl FnOnce(u64) -> T) -> (u64, T) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (last, recent) = &mut *state;
        *last += 1;
        recent.push_back((*last, call.clone()));
        if recent.len() > REMEMBERED {
            recent.pop_front();
        }
        (*last, start(*last))
    }

    /// The last collectives, oldest first, as "17: all_gather `layers.3` of 512 bfloat16".
    pub fn recent(&self) -> Vec<String> {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.1.iter().map(|(number, call)| format!("{number}: {call}")).collect()
    }
}
