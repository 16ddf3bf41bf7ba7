//! Inference: requests for completions, which are computed together, and their text.
//!
//! A request's keys and values are in blocks of a shared cache. In each step every running request gets a token, and prompts are read in
//! chunks beside them. No scale or draw of a request depends on the others: scales are static or of single tokens, and draws have a seed of
//! their own. On a CPU a request's text is the same bit for bit in any batch. On a GPU the shape of the batch chooses the kernels of
//! products, whose sums differ in their last bits, so a text can differ where two tokens are nearly as likely, unless
//! [`EngineOptions::batch_invariant`] is set.

mod admission;
mod batching;
mod block_pool;
mod blocks;
mod capacity;
mod completion;
mod decode;
mod draft;
mod drawing;
mod generation_config;
mod grammar;
mod leading;
mod masks;
mod ngram;
mod passes;
mod pooling;
mod proposer;
mod request;
mod resting;
mod sampler;
mod scoring;
mod sequence;
mod text;
mod update;
mod warm_up;

pub use batching::Engine;
pub use block_pool::BLOCK_SIZE;
pub use completion::{Completion, TextRequest, complete};
pub use decode::{DecodeSteps, Scored};
pub use draft::{Draft, Wanted};
pub use grammar::{Grammar, Grammars};
pub use ngram::Ngram;
pub use proposer::Proposer;
pub use request::{
    AdapterId, EngineOptions, EngineStats, Event, FinishReason, KvCacheDtype, Pooling, Request, RequestId, Sampling,
    TokenLogprob,
};
pub use text::{TextPiece, TextStream};
