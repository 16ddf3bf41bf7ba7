//! Masks of constrained requests: the tokens that may come next. A mask of a long or recursive grammar takes tens of milliseconds, so background
//! threads compute masks.

use crate::grammar::{Allowed, Grammar, Place};
use crate::request::RequestId;
use ottava_common::background::Background;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::LazyLock;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

static THREADS: LazyLock<Background> = LazyLock::new(|| Background::new("masks"));

/// The maximum time that a step waits for masks. A mask that is computed within this time is quick.
pub const PATIENCE: Duration = Duration::from_millis(2);

/// A channel through which threads send computed masks to the engine.
pub struct Masks {
    sender: Sender<(RequestId, Computed)>,
    receiver: Receiver<(RequestId, Computed)>,
}

impl Default for Masks {
    fn default() -> Masks {
        let (sender, receiver) = channel();
        Masks { sender, receiver }
    }
}

impl Masks {
    /// Lets threads compute the next mask of request `id`, unless they already do.
    pub fn begin(&self, id: RequestId, constraint: &mut Constraint) {
        constraint.mask = match std::mem::replace(&mut constraint.mask, Mask::Pending) {
            Mask::Due(mut grammar) => {
                let sender = self.sender.clone();
                THREADS.run(move || {
                    let start = Instant::now();
                    let allowed = catch_unwind(AssertUnwindSafe(|| grammar.allowed())).unwrap_or(Err(Place::Stuck));
                    let is_quick = start.elapsed() <= PATIENCE;
                    // The engine may have been dropped.
                    let _ = sender.send((id, Computed { grammar: *grammar, allowed, is_quick }));
                });
                Mask::Pending
            }
            other => other,
        };
    }

    /// Returns the next computed mask, with its request. Waits for it until `end`.
    pub fn next(&self, end: Instant) -> Option<(RequestId, Computed)> {
        self.receiver.recv_timeout(end.saturating_duration_since(Instant::now())).ok()
    }
}

/// A grammar, and the tokens that it allows next. If it allows no token, how the completion ends.
pub struct Computed {
    pub grammar: Grammar,
    pub allowed: Result<Allowed, Place>,
    /// Whether the mask took at most [`PATIENCE`] to compute.
    is_quick: bool,
}

/// The state of the next mask of a request. It also holds the grammar.
pub enum Mask {
    /// The computation of the next mask has not begun.
    Due(Box<Grammar>),
    /// Threads compute the next mask, and hold the grammar.
    Pending,
    /// The mask of the next token.
    Ready(Box<Computed>),
}

/// The constraint of a request in progress.
pub struct Constraint {
    pub mask: Mask,
    /// Whether the last mask was quick. It is false before the first mask, which is often slow.
    is_quick: bool,
}

impl Constraint {
    /// Makes the constraint of a completion that has not begun.
    pub fn new(grammar: Grammar) -> Constraint {
        Constraint { mask: Mask::Due(Box::new(grammar)), is_quick: false }
    }

    /// Returns whether speculation may compute masks after proposed tokens.
    pub fn is_quick(&self) -> bool {
        self.is_quick
    }

    /// Returns whether the mask of the next token is not computed yet.
    pub fn is_pending(&self) -> bool {
        !matches!(self.mask, Mask::Ready(_))
    }

    /// Stores its next mask.
    pub fn set(&mut self, computed: Computed) {
        self.is_quick = computed.is_quick;
        self.mask = Mask::Ready(Box::new(computed));
    }

    /// Advances the grammar by a token that was allowed.
    pub fn push(&mut self, token: u32) -> Place {
        let mut grammar = match std::mem::replace(&mut self.mask, Mask::Pending) {
            Mask::Due(grammar) => grammar,
            Mask::Ready(computed) => Box::new(computed.grammar),
            Mask::Pending => unreachable!("tokens are drawn by masks"),
        };
        let place = grammar.push(token);
        self.mask = Mask::Due(grammar);
        place
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Grammars;
    use ottava_data::Tokenizer;
    use std::path::Path;
    use std::sync::{Arc, Barrier};

    #[test]
    fn a_mask_is_computed_beside_other_work() {
        let tokenizer = Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer")).unwrap();
        let grammars = Grammars::new(&tokenizer, 4100).unwrap();
        let grammar = || grammars.choice(&["line", "lion"]).unwrap();
        let [line, other] = ["line", "a"].map(|text| tokenizer.encode(text).unwrap()[0]);
        let (masks, mut constraint) = (Masks::default(), Constraint::new(grammar()));
        // All threads are blocked, as by a slow grammar.
        let barrier = Arc::new(Barrier::new(Background::threads() + 1));
        for _ in 0..Background::threads() {
            let barrier = barrier.clone();
            THREADS.run(move || {
                barrier.wait();
            });
        }
        masks.begin(RequestId(7), &mut constraint);
        assert!(masks.next(Instant::now()).is_none() && constraint.is_pending());
        barrier.wait();
        let (id, mask) = masks.next(Instant::now() + Duration::from_secs(60)).unwrap();
        let expected = grammar().allowed().unwrap_or_else(|_| panic!("it begins"));
        let found = mask.allowed.as_ref().unwrap_or_else(|_| panic!("it begins"));
        assert_eq!((id, found.allows(line), found.allows(other)), (RequestId(7), true, false));
        assert!((0..4100).all(|token| found.allows(token) == expected.allows(token)));
        constraint.set(mask);
        assert!(!constraint.is_pending());
        constraint.push(line);
        assert!(constraint.is_pending(), "the token after needs another mask");
    }
}
