//! The announcements of the engine of rank 0 to the engines of other ranks that divide its model.

use crate::flight::Pace;
use crate::request::{EngineStats, FinishReason, Request, RequestId};
use ottava_parallel::Ranks;
use serde::{Deserialize, Serialize};
use std::rc::Rc;

/// The role of an engine among the engines of the ranks that divide its model.
pub enum Part {
    /// No other rank takes part.
    Alone,
    /// The engine of one of the ranks that draw together. Each of them makes the same calls. The number counts questions for a stop.
    Together(Rc<Ranks>, usize),
    /// The engine of rank 0, with the update that it has not announced yet.
    Leads(Rc<Ranks>, Update),
    /// The engine of another rank.
    Follows,
}

/// The events on rank 0 since its last announcement.
#[derive(Default, Serialize, Deserialize)]
pub struct Update {
    /// The tokens that the last step has drawn: the number of the request in `running`, and the token.
    pub drawn: Vec<(usize, u32)>,
    /// The requests that their grammars have ended in this step.
    pub ends: Vec<(usize, FinishReason)>,
    /// The calls since this step, in their order.
    pub calls: Vec<Call>,
    /// The state after these events, which must equal the state of the other ranks.
    pub stats: EngineStats,
    /// The pace of the step that begins.
    pub pace: Pace,
}

/// A call of an engine.
#[derive(Serialize, Deserialize)]
pub enum Call {
    Add(Box<Request>),
    Cancel(RequestId),
    Hold(RequestId),
    Resume(RequestId),
    /// A call of [`Engine::rest`](super::Engine::rest).
    Rest(Vec<RequestId>),
}

impl Call {
    /// Returns a call of [`Engine::add`](super::Engine::add) without the settings that only reports need.
    pub fn add(request: &Request) -> Call {
        let prompt_logprobs = request.prompt_logprobs.map(|_| 0);
        Call::Add(Box::new(Request { grammar: None, logprobs: None, prompt_logprobs, ..request.clone() }))
    }
}

impl Part {
    /// Stores a call, which is announced before the next step.
    pub fn tell(&mut self, call: impl FnOnce() -> Call) {
        if let Part::Leads(_, update) = self {
            update.calls.push(call());
        }
    }
}
