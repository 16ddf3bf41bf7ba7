//! The engine: the result of a request depends only on the request.

pub mod adapters;
pub mod ahead;
pub mod embeddings;
pub mod engine;
pub mod grammars;
pub mod invariant;
pub mod leading;
pub mod packed;
pub mod recurrent;
pub mod scoring;
pub mod shared_keys;
pub mod speculative;
