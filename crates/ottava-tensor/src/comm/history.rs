//! The last collectives of a rank, for messages.

use super::call::Call;
use super::fault::during;
use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Collectives that are remembered.
const REMEMBERED: usize = 64;

#[derive(Default)]
struct State {
    /// The number of the last call of the link.
    last: u64,
    /// The last calls; those of GPUs have no number.
    recent: VecDeque<(Option<u64>, Call)>,
    /// Calls of GPUs since they were last compared between ranks: their number, and a digest of all in order.
    gpu_calls: (u64, u64),
}

impl State {
    fn remember(&mut self, number: Option<u64>, call: &Call) {
        self.recent.push_back((number, call.clone()));
        if self.recent.len() > REMEMBERED {
            self.recent.pop_front();
        }
    }
}

/// Numbers the collectives of a rank and remembers the last ones.
#[derive(Default)]
pub(super) struct History(Mutex<State>);

impl History {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives `call` the next number, from 1 on, and runs `start` before any other call gets one.
    pub fn record<T>(&self, call: &Call, start: impl FnOnce(u64) -> T) -> (u64, T) {
        let mut state = self.lock();
        state.last += 1;
        let number = state.last;
        state.remember(Some(number), call);
        (number, start(number))
    }

    /// Remembers a call of GPUs. It gets no number, because ranks that replay a graph do not call what is in it, and ranks count alike.
    pub fn note(&self, call: &Call) {
        let mut state = self.lock();
        state.remember(None, call);
        let mut digest = DefaultHasher::new();
        (state.gpu_calls.1, call.to_string()).hash(&mut digest);
        state.gpu_calls = (state.gpu_calls.0 + 1, digest.finish());
    }

    /// The calls of GPUs since the last time, as "3 collectives, the last all_gather `layers.3` of 512 bfloat16, digest 0f…". Texts of ranks
    /// are equal if and only if their calls were, but for collisions of the digest.
    pub fn take_gpu_calls(&self) -> String {
        let mut state = self.lock();
        let (count, digest) = mem::take(&mut state.gpu_calls);
        let last = state.recent.iter().rev().find_map(|(number, call)| number.is_none().then_some(call));
        match last.filter(|_| count > 0) {
            None => "no collective".into(),
            Some(last) => format!("{count} collectives, the last {last}, digest {digest:016x}"),
        }
    }

    /// The last numbered call, as "barrier `save`, collective 17".
    pub fn last(&self) -> Option<String> {
        let state = self.lock();
        state.recent.iter().rev().find_map(|(number, call)| Some(during(call, (*number)?)))
    }

    /// The last collectives, oldest first, as "17: barrier `save`" or "GPU: all_gather `layers.3` of 512 bfloat16".
    pub fn recent(&self) -> Vec<String> {
        let name = |number: &Option<u64>| number.map_or("GPU".into(), |number| number.to_string());
        self.lock().recent.iter().map(|(number, call)| format!("{}: {call}", name(number))).collect()
    }
}
