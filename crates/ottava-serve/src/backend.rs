//! The interface of an engine that the server needs.

use ottava_engine::{Engine, EngineStats, Event, Request, RequestId};

/// Computes completions: the engine, or a stand-in for tests.
pub trait Backend {
    /// As [`Engine::add`].
    fn add(&mut self, request: Request) -> ottava_common::Result<RequestId>;
    /// As [`Engine::cancel`].
    fn cancel(&mut self, id: RequestId);
    /// As [`Engine::hold`].
    fn hold(&mut self, id: RequestId);
    /// As [`Engine::resume`].
    fn resume(&mut self, id: RequestId);
    /// As [`Engine::step`].
    fn step(&mut self) -> ottava_common::Result<Vec<Event>>;
    /// As [`Engine::is_idle`].
    fn is_idle(&self) -> bool;
    /// As [`Engine::max_batch`].
    fn max_batch(&self) -> usize;
    /// As [`Engine::stats`].
    fn stats(&self) -> EngineStats;
    /// As [`Engine::finish`].
    fn finish(&mut self) -> ottava_common::Result<()> {
        Ok(())
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
    fn finish(&mut self) -> ottava_common::Result<()> {
        Engine::finish(self)
    }
}
