//! Inference: requests for completions, which are computed together, and their text.
//!
//! A request's keys and values are in blocks of a shared cache. In each step every running request gets a token, and prompts are read in
//! chunks beside them. What a request gets never depends on the others: scales are static or of single tokens, and draws have a seed of
//! their own. On a CPU that holds bit for bit.

mod batching;
mod blocks;
mod capacity;
mod completion;
mod decode;
mod request;
mod sampler;
mod sequence;
mod text;
mod warm_up;

pub use batching::Engine;
pub use blocks::BLOCK_SIZE;
pub use completion::{Completion, TextRequest, complete};
pub use decode::{DecodeSteps, Scored};
pub use request::{
    EngineOptions, EngineStats, Event, FinishReason, KvCacheDtype, Request, RequestId, Sampling, TokenLogprob,
};
pub use text::{TextPiece, TextStream};
