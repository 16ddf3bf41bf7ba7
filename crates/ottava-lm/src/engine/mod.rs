//! Inference: requests for completions, which are computed together, and their text.

mod request;
mod text;

pub use request::{
    EngineOptions, EngineStats, Event, FinishReason, KvCacheDtype, Request, RequestId, Sampling, TokenLogprob,
};
pub use text::{TextPiece, TextStream};
