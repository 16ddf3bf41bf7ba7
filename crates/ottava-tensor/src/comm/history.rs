//! The last calls of a rank, for error messages, and a digest of its GPU calls, for comparison between ranks.

use super::call::{Call, Channel};
use super::members::Members;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The number of calls that are remembered.
const REMEMBERED: usize = 64;

#[derive(Default)]
struct State {
    /// The number of the last call of each channel of the link.
    last: BTreeMap<Channel, u64>,
    /// The last call, with its number.
    last_numbered: Option<String>,
    /// The last calls of all groups.
    recent: VecDeque<String>,
    gpu_calls: BTreeMap<Channel, GpuCalls>,
}

/// The GPU calls of a rank in one channel since the last comparison. They must be equal on all ranks of the channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GpuCalls {
    /// The ranks that must make the calls.
    pub ranks: Vec<usize>,
    /// The description of the channel, which follows the number of calls.
    pub of: String,
    count: u64,
    last: String,
    /// The hash of all calls in order.
    digest: u64,
}

impl GpuCalls {
    fn new(ranks: Vec<usize>, of: String) -> GpuCalls {
        GpuCalls { ranks, of, count: 0, last: String::new(), digest: 0 }
    }

    /// Returns the entry of a rank that has made no call in the channel of `others`.
    pub fn none(others: &GpuCalls) -> GpuCalls {
        GpuCalls::new(others.ranks.clone(), others.of.clone())
    }

    /// Describes the calls, for example "3 collectives, the last all_gather `layers.3` of 512 bfloat16, digest 0f…".
    pub fn describe(&self) -> String {
        let GpuCalls { count, of, last, digest, .. } = self;
        match count {
            0 => format!("no {of}"),
            _ => format!("{count} {of}, the last {last}, digest {digest:016x}"),
        }
    }
}

impl State {
    fn remember(&mut self, call: String) {
        self.recent.push_back(call);
        if self.recent.len() > REMEMBERED {
            self.recent.pop_front();
        }
    }
}

/// Numbers the calls of a rank, and remembers the last calls.
#[derive(Default)]
pub(super) struct History(Mutex<State>);

impl History {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives `call` of `rank` the next number in its channel, counting from 1, and runs `start` before another call gets a number. Returns
    /// the text of [`Call::numbered`] and the result of `start`.
    pub fn record<T>(&self, group: &Members, rank: usize, call: &Call, start: impl FnOnce(u64) -> T) -> (String, T) {
        let mut state = self.lock();
        let number = state.last.entry(call.channel(rank, group)).or_default();
        *number += 1;
        let number = *number;
        let of = if group.id == 0 { String::new() } else { format!(" of group `{}`", group.name) };
        state.remember(format!("{number}{of}: {call}"));
        let numbered = call.numbered(number, group);
        state.last_numbered = Some(numbered.clone());
        (numbered, start(number))
    }

    /// Records a GPU call of `rank` without a number. A rank that replays a captured graph does not make the graph's calls again, so its count
    /// would differ from the counts of ranks that make these calls.
    pub fn note(&self, group: &Members, rank: usize, call: &Call) {
        let mut state = self.lock();
        let of = if group.id == 0 { String::new() } else { format!(", group `{}`", group.name) };
        state.remember(format!("GPU{of}: {call}"));
        let channel = call.channel(rank, group);
        let calls = state.gpu_calls.entry(channel).or_insert_with(|| match channel.pair {
            None => GpuCalls::new(group.ranks.clone(), format!("collectives{group}")),
            Some((from, to)) => GpuCalls::new(vec![from, to], format!("messages from rank {from} to rank {to}{group}")),
        });
        // Both sides of a message have the same description.
        let described = call.counterpart(channel.pair.map_or(rank, |(_, to)| to), rank);
        let mut digest = DefaultHasher::new();
        (calls.digest, described.to_string()).hash(&mut digest);
        (calls.count, calls.last, calls.digest) = (calls.count + 1, described.to_string(), digest.finish());
    }

    /// Takes the GPU calls since the last comparison.
    pub fn take_gpu_calls(&self) -> Vec<(Channel, GpuCalls)> {
        mem::take(&mut self.lock().gpu_calls).into_iter().collect()
    }

    /// Returns the last numbered call, for example "barrier `save`, collective 17".
    pub fn last(&self) -> Option<String> {
        self.lock().last_numbered.clone()
    }

    /// Returns the last calls, oldest first, for example "17: barrier `save`", "3 of group `tensor`: barrier `save`" or "GPU: all_gather `layers.3`
    /// of 512 bfloat16".
    pub fn recent(&self) -> Vec<String> {
        self.lock().recent.iter().cloned().collect()
    }
}
