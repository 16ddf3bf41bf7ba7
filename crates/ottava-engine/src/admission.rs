//! Adds requests to an engine, and cancels, holds and resumes them.

use crate::batching::Engine;
use crate::request::{AdapterId, Request, RequestId};
use crate::sequence::Sequence;
use crate::update::Call;
use ottava_common::error::{Error, Result};

impl Engine {
    /// Returns the maximum number of tokens of a request, prompt and completion together. It is the smaller of `max_model_len` of the options and the
    /// number of tokens that the KV cache holds.
    pub fn max_model_len(&self) -> usize {
        self.options.max_model_len.min(self.pools.room())
    }

    /// Adds a request, which later steps compute.
    ///
    /// Errors with [`Error::Config`] for settings that cannot be used, for an unknown adapter, for an empty prompt, and for a prompt without room for
    /// another token. Errors with [`Error::Data`] for a token that the model does not have.
    pub fn add(&mut self, request: Request) -> Result<RequestId> {
        request.sampling.check()?;
        let has = |id: &AdapterId| self.adapters.get(id.0).is_some_and(Option::is_some);
        if let Some(AdapterId(number)) = request.adapter.filter(|id| !has(id)) {
            let count = self.adapters.iter().flatten().count();
            return Err(Error::Config(format!("there is no adapter number {number}; the engine has {count}")));
        }
        if self.model().config().is_encoder() && (request.pooling.is_none() || request.max_new_tokens > 0) {
            return Err(Error::Config(
                "the model is an encoder, which writes no text; ask for embeddings or scores".into(),
            ));
        }
        let room = self.max_model_len();
        let prompt = request.prompt.len();
        if prompt == 0 {
            return Err(Error::Config("the prompt is empty; give at least one token".into()));
        }
        if prompt >= room {
            return Err(Error::Config(format!("the prompt has {prompt} tokens; the model has room for {room}")));
        }
        let vocabulary = self.model().config().vocabulary;
        if let Some(id) = request.prompt.iter().find(|&&id| id as usize >= vocabulary) {
            return Err(Error::Data(format!(
                "the prompt has token {id}, the model's vocabulary ends at {vocabulary}: tokenizer and model do not belong together"
            )));
        }
        self.part.tell(|| Call::add(&request));
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let max_len = prompt.saturating_add(request.max_new_tokens).min(room);
        self.waiting.push_back(Sequence::new(id, request, max_len));
        Ok(id)
    }

    /// Ends a request: the next step reports [`FinishReason::Cancelled`](super::FinishReason::Cancelled). Ignores a request that is finished or
    /// unknown.
    pub fn cancel(&mut self, id: RequestId) {
        self.part.tell(|| Call::Cancel(id));
        if self.take(id).is_some() {
            self.cancelled.push(id);
        }
    }

    /// Excludes a request from all steps until [`Engine::resume`], and frees its memory and its place in the batch. Ignores a request that is
    /// finished or unknown.
    pub fn hold(&mut self, id: RequestId) {
        self.part.tell(|| Call::Hold(id));
        let sequence = self.take(id);
        self.held.extend(sequence);
    }

    /// Resumes a held request before all waiting requests. Its tokens so far are recomputed, as after a preemption.
    pub fn resume(&mut self, id: RequestId) {
        self.part.tell(|| Call::Resume(id));
        if let Some(at) = self.held.iter().position(|sequence| sequence.id == id) {
            self.waiting.push_front(self.held.swap_remove(at));
        }
    }

    /// Removes a request from the engine, after freeing its memory.
    fn take(&mut self, id: RequestId) -> Option<Sequence> {
        let is_it = |sequence: &Sequence| sequence.id == id;
        if let Some(at) = self.waiting.iter().position(is_it) {
            return self.waiting.remove(at);
        }
        if let Some(at) = self.held.iter().position(is_it) {
            return Some(self.held.swap_remove(at));
        }
        let mut sequence = self.running.remove(self.running.iter().position(is_it)?);
        sequence.put_back(&mut self.pools);
        Some(sequence)
    }
}
