//! Inference: requests for completions, which are computed together, and their text.
//!
//! ```
//! use ottava_engine::Sampling;
//!
//! let sampling = Sampling { temperature: 0.8, top_p: 0.95, seed: 7, ..Sampling::default() };
//! assert!(sampling.check().is_ok());
//! assert!(Sampling { top_p: 0.0, ..sampling }.check().is_err());
//! ```
//!
//! `examples/generate.rs` of `ottava-train` completes prompts.
//!
//! A request's keys and values are in blocks of a shared cache. In each step every running request gets a token, and prompts are read in
//! chunks beside them. No scale or draw of a request depends on the others: scales are static or of single tokens, and draws have a seed of
//! their own. On a CPU a request's text is the same bit for bit in any batch. On a GPU the shape of the batch chooses the kernels of
//! products, whose sums differ in their last bits, so a text can differ where two tokens are nearly as likely, unless
//! [`EngineOptions::batch_invariant`] is set.
//!
//! **A step.** `Engine` owns a `Decoder` and a `KvCache`. `Engine::step` asks `Engine::schedule` which tokens to compute, and for which requests, puts
//! the tokens in an `InferenceBatch`, whose tensors hold the request and position of each token, and calls `Decoder::hidden` and `Decoder::logits`.
//! Blocks run the same forward as in training, except attention: with a `PagedPass` in the `Context`, `Attention::attend_paged` calls `append_kv`,
//! which also applies RoPE, and `paged_attention`, instead of `rope` and `attention`. Casts run in `Mode::INFERENCE`, and `Decoder::scale_by_token`
//! ensures that no scale depends on other requests. The op `sample` draws the tokens on the model's device.
//!
//! **Blocks of the cache.** Attention layers with the same window form a `KvGroup` (`models/kv_cache.rs`), which has its own block tables, and its
//! own free blocks in `Pools` (`blocks.rs`). With a window, `Pools::extend` gives back the blocks that later tokens do not see. `BlockPool`
//! (`block_pool.rs`) lets sequences that begin with the same tokens share blocks. With several adapters, there is one pass per adapter, the key of
//! a shared block contains the adapter (`key_of_adapter`), and `DecodeSteps` has graphs for each adapter.
//!
//! **Kernels.** If all weights are stored, passes on a GPU run within `CudaDevice::with_constant_weights`: kernels may start before their
//! predecessor ends, and read weights before they wait (`ops/paged_attention/` of `ottava-tensor`). `DecodeSteps` (`decode.rs`) captures steps of
//! one token per row as CUDA graphs. `Engine::warm_up` runs steps of all sizes before a server is ready.
//!
//! **What surrounds a step.** A `Proposer` (`Ngram`, `Draft`) proposes tokens (`Sequence::proposed`), which a step computes behind the last token
//! of a request. `Engine::draw` (`drawing.rs`) draws from all of these rows, and `Engine::accept` keeps the drawn tokens up to the first token that
//! was not proposed. `Engine::pool_prompts` (`pooling.rs`) sums activations for embeddings. `Engine::score_prompts` (`scoring.rs`) computes
//! log-probabilities of prompts within the `PromptBudget` of a step. A `Grammar` bars tokens of a constrained request. `complete` converts the
//! engine's events to text for commands, by `TextStream`, which looks for stop strings in what `Detokenizer` (`data/detokenizer.rs`) makes of
//! tokens in the context of the tokens before.
//!
//! To add a parameter of sampling: a field of `Sampling` with its check (`request.rs`), a field of `Draw` with its meaning in the op (`ops/sample/`
//! of `ottava-tensor`), and the copy from one to the other in `draw` (`sampler.rs`). Then the command line has a flag in `commands/inference.rs`,
//! the server a field in `params.rs`, and a model's folder a suggestion in `generation_config.rs`.
#![forbid(unsafe_code)]

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
    AdapterId, EngineOptions, EngineStats, Event, FinishReason, KvCacheDtype, LogprobsMode, Pooling, Request,
    RequestId, Sampling, TokenLogprob,
};
pub use text::{TextPiece, TextStream};
