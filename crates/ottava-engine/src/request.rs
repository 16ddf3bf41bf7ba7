//! Requests of an engine, and the events that it returns.

use crate::grammar::Grammar;
use crate::sampling::Sampling;
use ottava_common::error::{Error, Result};
use ottava_recipe::KvCacheDtype;
use serde::{Deserialize, Serialize};

/// A request for a completion.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// The adapters of the model that compute the completion; `None` for the model without adapters.
    pub adapter: Option<AdapterId>,
    /// The tokens to complete. There must be at least one.
    pub prompt: Vec<u32>,
    /// The sampling settings.
    pub sampling: Sampling,
    /// The maximum number of new tokens. The completion also ends at the engine's `max_model_len`.
    pub max_new_tokens: usize,
    /// The number of new tokens before any of `stop_ids` can be drawn.
    pub min_new_tokens: usize,
    /// The tokens that end the completion: the tokenizer's end of text, and further stop tokens. The drawn stop token is the last [`Event::Token`].
    pub stop_ids: Vec<u32>,
    /// The grammar that the text of the completion must match. The completion ends where nothing can follow.
    #[serde(skip)]
    pub grammar: Option<Grammar>,
    /// The number of most likely tokens at each position whose log-probabilities are returned, besides the drawn token; `None` to return no
    /// log-probabilities.
    pub logprobs: Option<usize>,
    /// The number of most likely tokens at each position of the prompt whose log-probabilities are returned, besides the prompt's token; `None` to
    /// return none.
    pub prompt_logprobs: Option<usize>,
    /// The pooling of the prompt for an embedding; `None` for no embedding.
    pub pooling: Option<Pooling>,
}

/// The pooling of the activations of a text, after the last norm, to one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Pooling {
    /// The vector is the activations of the last token.
    Last,
    /// The vector is the mean of the activations.
    Mean,
    /// The vector is the activations of the first token, of an encoder.
    Cls,
    /// The vector is the scores of the labels of a classifier, as the head computes them: at the last token, or at the first token of an encoder.
    Scores,
}

impl Pooling {
    /// Returns the pooling of a model whose folder names none: the last token, or the mean of an encoder.
    pub fn default_for(is_encoder: bool) -> Pooling {
        if is_encoder { Pooling::Mean } else { Pooling::Last }
    }
}

impl std::str::FromStr for Pooling {
    type Err = Error;
    fn from_str(text: &str) -> Result<Pooling> {
        match text {
            "last" => Ok(Pooling::Last),
            "mean" => Ok(Pooling::Mean),
            "cls" => Ok(Pooling::Cls),
            _ => Err(Error::Config(format!("there is no pooling `{text}`; the kinds are last, mean, cls"))),
        }
    }
}

/// The index of adapters of an engine's model, in the order in which [`Engine::add_adapters`](super::Engine::add_adapters) added them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AdapterId(pub usize);

/// The id of a request of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RequestId(pub u64);

/// The log-probability of a token, as [`LogprobsMode`] says.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: u32,
    /// The log-probability of the token.
    pub logprob: f32,
    /// The most likely tokens at the same position in descending order. Among equals, the smaller id is first. A boxed slice takes no more memory
    /// than these tokens.
    pub top: Box<[(u32, f32)]>,
}

/// The reason why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop token was drawn, a stop string was reached, or the grammar is complete.
    Stop,
    /// The completion reached the requested number of tokens or the limit of the model.
    Length,
    /// The grammar allows no further token, or its parser has reached its limits. The text does not match the grammar.
    Stuck,
    /// The request was cancelled.
    Cancelled,
}

/// The result of a step of the engine for a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The prompt was read and scored. Reported once, before the first token, for requests with `prompt_logprobs`.
    Prompt {
        /// The request.
        id: RequestId,
        /// The log-probability of each token of the prompt. It is `None` for the first token, which follows nothing.
        logprobs: Vec<Option<TokenLogprob>>,
    },
    /// The prompt was read and pooled. Reported once, before the first token, for requests with `pooling`.
    Embedding {
        /// The request.
        id: RequestId,
        /// The pooled activations divided by their norm, one value per channel of the model; for [`Pooling::Scores`], the scores.
        values: Vec<f32>,
    },
    /// A token was drawn.
    Token {
        /// The request.
        id: RequestId,
        /// The token.
        token: u32,
        /// The log-probability of the token, for requests with `logprobs`.
        logprob: Option<TokenLogprob>,
        /// The number of tokens of the prompt that were in the cache when the request began.
        cached_tokens: usize,
    },
    /// The completion ended. This is the last event of a request.
    Finished {
        /// The request.
        id: RequestId,
        /// The reason why the completion ended.
        reason: FinishReason,
        /// The number of tokens of the prompt that were in the cache when the request began; 0 for a cancelled request.
        cached_tokens: usize,
    },
}

/// What log-probabilities of drawn tokens are of. The names are vLLM's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogprobsMode {
    /// `raw_logprobs`: of the model's own distribution, before penalties, biases and temperature.
    #[default]
    Raw,
    /// `processed_logprobs`: of the distribution that tokens are drawn from, after penalties, biases, constraints, temperature and truncation. With
    /// temperature 0, after penalties, biases and constraints.
    Processed,
    /// As [`LogprobsMode::Raw`], by the op that computes the loss of training, so that both have the same bits from the same logits. The likeliest tokens
    /// beside a drawn one are not affected.
    Loss,
}

impl std::str::FromStr for LogprobsMode {
    type Err = Error;
    fn from_str(text: &str) -> Result<LogprobsMode> {
        match text {
            "raw_logprobs" => Ok(LogprobsMode::Raw),
            "processed_logprobs" => Ok(LogprobsMode::Processed),
            _ => Err(Error::Config(format!(
                "there is no log-probability mode `{text}`; the modes are raw_logprobs, processed_logprobs"
            ))),
        }
    }
}

/// The sizes of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// The maximum number of tokens of a request, prompt and completion together.
    pub max_model_len: usize,
    /// The maximum number of requests that are computed at once.
    pub max_batch: usize,
    /// The number of tokens that fit into the KV cache, over all requests. It is rounded up to whole blocks.
    pub kv_cache_tokens: usize,
    /// The maximum number of tokens of a step. Longer prompts are read in chunks, and other requests get tokens between the chunks.
    pub prefill_chunk: usize,
    /// The format of the KV cache.
    pub kv_cache_dtype: KvCacheDtype,
    /// Whether requests that begin with the same tokens share the blocks of the KV cache with these tokens. Blocks of ended requests are also shared.
    /// A model with a window in some layer does not share blocks. A model with recurrent layers shares blocks up to a saved state.
    pub prefix_caching: bool,
    /// The number of saved copies of a sequence's recurrent states, for prefix caching and for speculation. Without recurrent layers, it has no effect.
    pub saved_states: usize,
    /// Whether a GPU computes the same bits for a request in any batch, in any chunks of its prompt, and with or without prefix caching and
    /// preemption. A CPU always does.
    pub batch_invariant: bool,
    /// Whether decode steps are launched before the host has read the tokens of the step before, where the settings of all running requests allow it.
    pub async_scheduling: bool,
    /// The distribution whose log-probabilities requests get for drawn tokens and for the likeliest tokens. The log-probabilities of prompts are always
    /// raw.
    pub logprobs_mode: LogprobsMode,
}

/// The state of an engine, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineStats {
    /// The number of requests that have memory in the KV cache.
    pub running: usize,
    /// The number of requests that wait for memory or for a place in the batch.
    pub waiting: usize,
    /// The number of held requests.
    pub held: usize,
    /// The number of blocks of the KV cache.
    pub kv_blocks: usize,
    /// The number of used blocks of the KV cache.
    pub used_kv_blocks: usize,
    /// The number of prompt tokens read so far. It includes tokens that were read again after a preemption, but not tokens that were found in the KV
    /// cache.
    pub prompt_tokens: u64,
    /// The number of tokens of requests that were looked up in the KV cache, including tokens of preempted requests.
    pub prefix_queries: u64,
    /// The number of these tokens that were found.
    pub prefix_hits: u64,
    /// The number of tokens drawn so far.
    pub generated_tokens: u64,
    /// The number of preemptions. A preempted request frees its memory for other requests, and is recomputed later.
    pub preemptions: u64,
    /// The number of proposals.
    pub proposals: u64,
    /// The number of proposed tokens.
    pub proposed_tokens: u64,
    /// The number of proposed tokens that were drawn.
    pub accepted_tokens: u64,
}
