//! The interface of an engine that the server needs.

use ottava_engine::{AdapterId, Engine, EngineStats, Event, LoadAdapters, Request, RequestId};

/// Computes completions. Implemented by the engine and by a stand-in for tests.
pub trait Backend {
    /// Adds a request, like [`Engine::add`].
    fn add(&mut self, request: Request) -> ottava_common::Result<RequestId>;
    /// Cancels a request, like [`Engine::cancel`].
    fn cancel(&mut self, id: RequestId);
    /// Pauses a request, like [`Engine::hold`].
    fn hold(&mut self, id: RequestId);
    /// Resumes a request, like [`Engine::resume`].
    fn resume(&mut self, id: RequestId);
    /// Computes a step, like [`Engine::step`].
    fn step(&mut self) -> ottava_common::Result<Vec<Event>>;
    /// Whether no request can run, like [`Engine::is_idle`].
    fn is_idle(&self) -> bool;
    /// Returns the maximum number of running requests, like [`Engine::max_batch`].
    fn max_batch(&self) -> usize;
    /// Returns the state of the engine, like [`Engine::stats`].
    fn stats(&self) -> EngineStats;
    /// Loads adapters, like [`Engine::load_adapters`].
    fn load_adapters(&mut self, load: LoadAdapters) -> ottava_common::Result<AdapterId>;
    /// Frees adapters, like [`Engine::remove_adapters`].
    fn remove_adapters(&mut self, id: AdapterId);
    /// Ends the engine, like [`Engine::finish`].
    fn finish(&mut self) -> ottava_common::Result<()> {
        Ok(())
    }
}

/// A backend that is lent.
impl<B: Backend> Backend for &mut B {
    fn add(&mut self, request: Request) -> ottava_common::Result<RequestId> {
        (**self).add(request)
    }
    fn cancel(&mut self, id: RequestId) {
        (**self).cancel(id)
    }
    fn hold(&mut self, id: RequestId) {
        (**self).hold(id)
    }
    fn resume(&mut self, id: RequestId) {
        (**self).resume(id)
    }
    fn step(&mut self) -> ottava_common::Result<Vec<Event>> {
        (**self).step()
    }
    fn is_idle(&self) -> bool {
        (**self).is_idle()
    }
    fn max_batch(&self) -> usize {
        (**self).max_batch()
    }
    fn stats(&self) -> EngineStats {
        (**self).stats()
    }
    fn load_adapters(&mut self, load: LoadAdapters) -> ottava_common::Result<AdapterId> {
        (**self).load_adapters(load)
    }
    fn remove_adapters(&mut self, id: AdapterId) {
        (**self).remove_adapters(id)
    }
    fn finish(&mut self) -> ottava_common::Result<()> {
        (**self).finish()
    }
}

impl Backend for Engine {
    fn add(&mut self, request: Request) -> ottava_common::Result<RequestId> {
        Engine::add(self, request)
    }
    fn cancel(&mut self, id: RequestId) {
        Engine::cancel(self, id)
    }
    fn hold(&mut self, id: RequestId) {
        Engine::hold(self, id)
    }
    fn resume(&mut self, id: RequestId) {
        Engine::resume(self, id)
    }
    fn step(&mut self) -> ottava_common::Result<Vec<Event>> {
        Engine::step(self)
    }
    fn is_idle(&self) -> bool {
        Engine::is_idle(self)
    }
    fn max_batch(&self) -> usize {
        Engine::max_batch(self)
    }
    fn stats(&self) -> EngineStats {
        Engine::stats(self)
    }
    fn load_adapters(&mut self, load: LoadAdapters) -> ottava_common::Result<AdapterId> {
        Engine::load_adapters(self, load)
    }
    fn remove_adapters(&mut self, id: AdapterId) {
        Engine::remove_adapters(self, id)
    }
    fn finish(&mut self) -> ottava_common::Result<()> {
        Engine::finish(self)
    }
}
