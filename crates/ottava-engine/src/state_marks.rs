//! Where the recurrent states of a request are saved, and how they return to the token before rejected proposals.
//!
//! **Prefixes.** A pass ends where a state is to be saved (`Sequence::next_stop`): at the end of the last full block of a prompt; at the end of the cached
//! blocks, if there is no state there, since other requests have the same beginning; each [`PROMPT_INTERVAL`] tokens of a prompt, if a place is free;
//! and each [`COMPLETION_INTERVAL`] tokens of a completion, where the state replaces the preceding state of the completion.
//!
//! **Proposals.** A pass with proposed tokens leaves the states after the last of them. The states before the pass are saved first. If a proposed token is
//! rejected, they are restored, and the next pass computes the accepted tokens again before the next token is drawn.

use crate::block_pool::{BLOCK_SIZE, BlockKey};
use crate::saved_states::SavedStates;

/// The number of tokens between saved states in a prompt.
const PROMPT_INTERVAL: usize = 2048;

/// The number of tokens between saved states in a completion.
const COMPLETION_INTERVAL: usize = 256;

/// A place in a prompt at which states are saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stop {
    /// The number of tokens before it.
    tokens: usize,
    /// Whether the states are saved only in a free place.
    only_free: bool,
}

/// The states before proposed tokens.
#[derive(Clone, Copy, Debug)]
pub struct Backup {
    /// The place of the saved states.
    pub place: usize,
    /// The number of tokens before the saved states.
    pub before: usize,
    /// The number of tokens before the states after the pass, including all proposed tokens.
    pub after: usize,
}

/// The saved states of a request.
#[derive(Debug, Default)]
pub struct StateMarks {
    /// Whether states are saved for other requests.
    saves: bool,
    /// The places in the prompt at which states are saved, ascending.
    stops: Vec<Stop>,
    /// The key of the states that were saved last in the completion.
    latest: Option<BlockKey>,
    /// The states before the proposed tokens of this step.
    pub backup: Option<Backup>,
    /// The number of tokens that are computed again before the next token is drawn.
    pub repeated: usize,
}

/// Returns the places at which states are saved in a prompt of `tokens` tokens. The blocks of its first `cached` tokens were found, and the states after
/// its first `computed` tokens.
fn stops(tokens: usize, computed: usize, cached: usize) -> Vec<Stop> {
    let whole = (tokens - 1) / BLOCK_SIZE * BLOCK_SIZE;
    let intervals = (1..).map(|number| number * PROMPT_INTERVAL).take_while(|&at| at < whole);
    let mut stops: Vec<Stop> = intervals.map(|tokens| Stop { tokens, only_free: tokens != cached }).collect();
    stops.extend([cached, whole].map(|tokens| Stop { tokens, only_free: false }));
    stops.retain(|stop| stop.tokens > computed);
    stops.sort_by_key(|stop| stop.tokens);
    stops.dedup();
    stops
}

impl StateMarks {
    /// Selects the places at which the states of a prompt of `tokens` tokens are saved. See [`stops`].
    pub fn begin(&mut self, tokens: usize, computed: usize, cached: usize) {
        (self.saves, self.stops) = (true, stops(tokens, computed, cached));
    }

    /// Returns the first place after `computed` tokens at which states are saved.
    pub fn next_stop(&self, computed: usize) -> usize {
        let stop = self.stops.iter().map(|stop| stop.tokens).find(|&stop| stop > computed);
        let of_completion = || (computed + 1).next_multiple_of(COMPLETION_INTERVAL);
        if self.saves { stop.unwrap_or_else(of_completion) } else { usize::MAX }
    }

    /// Returns whether states are saved after `computed` tokens.
    pub fn saves_at(&self, computed: usize) -> bool {
        let is_beyond = self.stops.last().is_none_or(|stop| computed > stop.tokens);
        let is_stop = self.stops.iter().any(|stop| stop.tokens == computed);
        self.saves && (is_stop || (is_beyond && computed > 0 && computed.is_multiple_of(COMPLETION_INTERVAL)))
    }

    /// Returns the place to which the states after `computed` tokens must be copied, if they are not saved yet and there is a place. `key` is the key of
    /// the block that ends there.
    pub fn place(&mut self, computed: usize, key: BlockKey, saved: &mut SavedStates) -> Option<usize> {
        if let Some(&Stop { only_free, .. }) = self.stops.iter().find(|stop| stop.tokens == computed) {
            return saved.save(key, only_free);
        }
        if let Some(earlier) = self.latest.take_if(|earlier| *earlier != key) {
            saved.forget(&earlier);
        }
        let place = saved.save(key, false);
        // A state that another request has saved is not replaced later.
        self.latest = self.latest.or(place.map(|_| key));
        place
    }

    /// Forgets everything but the key of the last saved state, when a request returns its memory.
    pub fn put_back(&mut self, saved: &mut SavedStates) {
        let StateMarks { latest, backup, .. } = std::mem::take(self);
        backup.into_iter().for_each(|backup| saved.put_back(backup.place));
        self.latest = latest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_saved_where_other_requests_find_them() {
        let of = |tokens, computed, cached| -> Vec<_> {
            stops(tokens, computed, cached).into_iter().map(|stop| (stop.tokens, stop.only_free)).collect()
        };
        assert_eq!(of(1, 0, 0), []);
        assert_eq!((of(32, 0, 0), of(33, 0, 0)), (vec![], vec![(32, false)]), "the last token is always computed");
        assert_eq!(of(100, 32, 64), [(64, false), (96, false)]);
        assert_eq!(of(100, 96, 96), []);
        assert_eq!(of(5000, 0, 4096), [(2048, true), (4096, false), (4992, false)]);
        assert_eq!(of(4097, 0, 0), [(2048, true), (4096, false)]);
    }

    #[test]
    fn a_completion_replaces_its_saved_state() {
        let mut states = StateMarks::default();
        assert_eq!(states.next_stop(100), usize::MAX);
        states.begin(100, 32, 64);
        let stops = [32, 64, 95, 96, 255, 256].map(|computed| states.next_stop(computed));
        assert_eq!(stops, [64, 96, 96, 256, 256, 512]);
    }
}
