//! Inference: computes requests for completions together, and returns their text.
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
//! The keys and values of a request are in blocks of a shared cache. In each step, every running request gets a token, and prompts are read in
//! chunks. Requests do not affect each other: scales are static or of single tokens, and each request has its own seed for draws. On a CPU, a request
//! gets the same text, bit for bit, in any batch. On a GPU, the shape of the batch selects the kernels of products, and their sums differ in the last
//! bits. So a text can differ where two tokens are almost equally likely, unless [`EngineOptions::batch_invariant`] is set.
//!  **A step.** `Engine` owns a `Decoder` and a `KvCache`. `Engine::step` asks `Engine::schedule` which tokens to compute, and for which requests. It
//! puts these tokens in an `InferenceBatch`, whose tensors hold the request and position of each token, and calls `Decoder::hidden` and
//! `Decoder::logits`. Blocks run the same forward as in training, except attention: with a `PagedPass` in the `Context`, `Attention::attend_paged`
//! calls `append_kv`, which also applies RoPE, and `paged_attention`, instead of `rope` and `attention`. Casts run in `Mode::INFERENCE`, and with
//! `Decoder::scale_by_token` no scale depends on other requests. The op `sample` draws the tokens on the model's device.
//!
//! **Blocks of the cache.** Attention layers with the same window form a `KvGroup` (`models/kv_cache.rs`). Each group has its own block tables, and
//! its own free blocks in `Pools` (`blocks.rs`). With a window, `Pools::extend` returns the blocks that later tokens do not see. With `BlockPool`
//! (`block_pool.rs`), sequences that begin with the same tokens share blocks. With several adapters, there is one pass per adapter, the key of a
//! shared block contains the adapter (`key_of_adapter`), and `DecodeSteps` has graphs for each adapter.
//!
//! **Recurrent states.** Each running request has a slot for its states. `SavedStates` (`saved_states.rs`) has the places of copies: of the states at the
//! ends of cached blocks, with which requests share these blocks, and of the states before proposed tokens, to which a request returns when a token is
//! rejected. `StateMarks` (`state_marks.rs`) selects what is saved.
//!
//! **Kernels.** If all weights are stored, passes on a GPU run within `CudaDevice::with_constant_weights`: a kernel may start before the preceding
//! kernel ends, and may read weights before it waits for this kernel (`ops/paged_attention/` of `ottava-tensor`). `DecodeSteps` (`decode.rs`)
//! captures steps of one token per row as CUDA graphs. `Engine::warm_up` runs steps of all sizes before a server is ready.
//!
//! **Steps ahead.** With asynchronous scheduling, a decode step is launched before the host has read the tokens of the step before (`ahead.rs`, `flight.rs`).
//!
//! **Around a step.** A `Proposer` (`Ngram`, `Draft`) proposes tokens (`Sequence::proposed`), which a step computes after the last token of a
//! request. `Engine::draw` (`drawing.rs`) draws from all of these rows. `Engine::accept` keeps the drawn tokens up to the first token that was not
//! proposed. `Engine::pool_prompts` (`pooling.rs`) sums activations for embeddings. `Engine::score_prompts` (`scoring.rs`) computes log-probabilities
//! of prompts within the `PromptBudget` of a step. A `Grammar` bars tokens of a constrained request, but not within its
//! `Reasoning` (`reasoning.rs`). For commands, `complete` converts the engine's
//! events to text with `TextStream`. `TextStream` searches for stop strings in the text that `Detokenizer` (`data/detokenizer.rs`) decodes from the
//! tokens in their context.
//!
//! To add a sampling parameter, add a field of `Sampling`, its row in `Parameter::ALL` and its use in `Sampling::draw` (`sampling.rs`), and a field
//! of `Draw` with its meaning in the op (`ops/sample/` of `ottava-tensor`). Commands, the server and the suggestions of model folders read the table.
#![forbid(unsafe_code)]

mod adapters;
mod admission;
mod ahead;
mod batching;
mod block_pool;
mod blocks;
mod capacity;
mod completion;
mod decode;
mod draft;
mod drawing;
mod expression;
mod flight;
mod gbnf;
mod generation_config;
mod grammar;
mod grammar_limits;
mod leading;
mod masks;
mod ngram;
mod passes;
mod pooling;
mod proposer;
mod reasoning;
mod request;
mod resting;
mod sampler;
mod sampling;
mod saved_states;
mod scoring;
mod sequence;
mod state_marks;
mod states;
mod structural_tag;
mod text;
mod update;
mod warm_up;

pub use adapters::LoadAdapters;
pub use batching::Engine;
pub use block_pool::BLOCK_SIZE;
pub use completion::{Completion, TextRequest, complete};
pub use decode::{DecodeSteps, Scored};
pub use draft::{Draft, Wanted};
pub use expression::{Pattern, pattern};
pub use grammar::{Grammar, Grammars};
pub use ngram::Ngram;
pub use proposer::Proposer;
pub use reasoning::ReasoningMarks;
pub use request::{
    AdapterId, EngineOptions, EngineStats, Event, FinishReason, LogprobsMode, Pooling, Request, RequestId, TokenLogprob,
};
pub use sampling::{Field, Parameter, Range, Sampling, tokens};
pub use text::{TextPiece, TextStream};
