//! The engine: what a request gets depends on nothing but the request.

pub mod adapters;
pub mod embeddings;
pub mod engine;
pub mod grammars;
pub mod invariant;
pub mod leading;
pub mod scoring;
pub mod speculative;
