//! What the engine of rank 0 announces to the engines of other ranks that divide its model.

use crate::request::{EngineStats, FinishReason, Request, RequestId};
use crate::sampling::Sampling;
use ottava_parallel::Ranks;
use serde::{Deserialize, Serialize};
use std::rc::Rc;

/// The part of an engine among the engines of the ranks that divide its model.
pub enum Part {
    /// No rank divides the model, or all ranks make the same calls.
    Alone,
    /// Rank 0, and what it has not announced yet.
    Leads(Rc<Ranks>, Update),
    /// Another rank.
    Follows,
}

/// What has happened on rank 0 since its last announcement.
#[derive(Default, Serialize, Deserialize)]
pub struct Update {
    /// Tokens that the last step has drawn: number in `running`, and token.
    pub drawn: Vec<(usize, u32)>,
    /// Requests that their grammars have ended in that step.
    pub ends: Vec<(usize, FinishReason)>,
    /// The calls since that step, in their order.
    pub calls: Vec<Call>,
    /// The state after all of this, which must equal the state of the other ranks.
    pub stats: EngineStats,
}

/// A call of an engine.
#[derive(Serialize, Deserialize)]
pub enum Call {
    Add(Box<Request>),
    Cancel(RequestId),
    Hold(RequestId),
    Resume(RequestId),
    /// [`Engine::rest`](super::Engine::rest).
    Rest(Vec<RequestId>),
}

impl Call {
    /// [`Engine::add`](super::Engine::add), without what only draws and reports need.
    pub fn add(request: &Request) -> Call {
        let (sampling, grammar, logprobs) = (Sampling::default(), None, None);
        let prompt_logprobs = request.prompt_logprobs.map(|_| 0);
        Call::Add(Box::new(Request { sampling, grammar, logprobs, prompt_logprobs, ..request.clone() }))
    }
}

impl Part {
    /// Announces a call before the next step.
    pub fn tell(&mut self, call: impl FnOnce() -> Call) {
        if let Part::Leads(_, update) = self {
            update.calls.push(call());
        }
    }
}
