//! Requests of an engine, and the events that it returns.

use crate::grammar::Grammar;
use ottava_common::error::{Error, Result};
use ottava_tensor::DType;
use serde::{Deserialize, Serialize};

/// Sampling of the tokens of a request. The default is greedy: always the most likely token, without penalties.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 always takes the most likely token; otherwise logits are divided by it.
    pub temperature: f64,
    /// Only this many of the most likely tokens can be drawn; `None` for all.
    pub top_k: Option<usize>,
    /// Only the most likely tokens that together have this probability can be drawn; 1 for all.
    pub top_p: f64,
    /// Only tokens whose probability is at least this share of the likeliest token's probability can be drawn (0.1: at least a tenth); 0 for all.
    pub min_p: f64,
    /// Logits of tokens in the prompt or the output are divided by it if positive, else multiplied (Keskar et al. 2019,
    /// arXiv:1909.05858); 1 for none.
    pub repetition_penalty: f64,
    /// Subtracted from the logits of tokens in the output.
    pub presence_penalty: f64,
    /// Subtracted from the logits of tokens in the output, for each time they are there.
    pub frequency_penalty: f64,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// The seed of the draws, which depend on nothing else: not on other requests.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl Sampling {
    /// Whether the most likely token by the unmodified logits is taken.
    pub(super) fn is_plain(&self) -> bool {
        *self
            == Sampling {
                seed: self.seed,
                top_k: self.top_k,
                top_p: self.top_p,
                min_p: self.min_p,
                ..Sampling::default()
            }
    }

    /// The first field with an unusable value, and the reason.
    pub fn problem(&self) -> Option<(&'static str, String)> {
        let Sampling { temperature, top_p, repetition_penalty, .. } = *self;
        let wrong = |is_wrong: bool, field, text: String| is_wrong.then_some((field, text));
        let from_to = |field, name, value: f64, range: std::ops::RangeInclusive<f64>| {
            let (from, to) = (range.start(), range.end());
            wrong(!range.contains(&value), field, format!("{name} is {value}; it is a number from {from} to {to}"))
        };
        let temperature_is = format!("temperature is {temperature}; it is a number from 0 up");
        let repetition_is = format!("repetition penalty is {repetition_penalty}; it is a number above 0");
        let top_p_is = format!("top-p is {top_p}; it is above 0 and at most 1");
        let top_k_is = "top-k is 0; it is a number of tokens from 1 up, or left out".into();
        wrong(!(temperature.is_finite() && temperature >= 0.0), "temperature", temperature_is)
            .or_else(|| wrong(self.top_k == Some(0), "top_k", top_k_is))
            .or_else(|| wrong(!(top_p > 0.0 && top_p <= 1.0), "top_p", top_p_is))
            .or_else(|| from_to("min_p", "min-p", self.min_p, 0.0..=1.0))
            .or_else(|| {
                let usable = repetition_penalty.is_finite() && repetition_penalty > 0.0;
                wrong(!usable, "repetition_penalty", repetition_is)
            })
            .or_else(|| from_to("presence_penalty", "presence penalty", self.presence_penalty, -100.0..=100.0))
            .or_else(|| from_to("frequency_penalty", "frequency penalty", self.frequency_penalty, -100.0..=100.0))
            .or_else(|| {
                let (token, bias) = self.logit_bias.iter().find(|(_, bias)| !bias.is_finite())?;
                Some(("logit_bias", format!("the bias of token {token} is {bias}; it is a number")))
            })
    }

    /// Errors with [`Error::Config`] for a value that cannot be used.
    pub fn check(&self) -> Result<()> {
        self.problem().map_or(Ok(()), |(_, text)| Err(Error::Config(text)))
    }
}

/// A completion to compute.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// The adapters of the model that compute it; `None` for the model without adapters.
    pub adapter: Option<AdapterId>,
    /// The tokens to complete, at least one.
    pub prompt: Vec<u32>,
    /// The sampling settings.
    pub sampling: Sampling,
    /// New tokens at most; fewer where the engine's `max_model_len` ends.
    pub max_new_tokens: usize,
    /// New tokens before any of `stop_ids` can be drawn.
    pub min_new_tokens: usize,
    /// Tokens that end the completion: the tokenizer's end of text and others. The one drawn is the last [`Event::Token`].
    pub stop_ids: Vec<u32>,
    /// What the text of the completion has to match; it ends where nothing can follow.
    #[serde(skip)]
    pub grammar: Option<Grammar>,
    /// Log-probabilities to return: of drawn tokens, and of this many of the most likely tokens at each position.
    pub logprobs: Option<usize>,
    /// The same for the tokens of the prompt.
    pub prompt_logprobs: Option<usize>,
    /// How the prompt becomes a vector, if one is asked for.
    pub pooling: Option<Pooling>,
}

/// How the activations of the tokens of a text, after the last norm, become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Pooling {
    /// The activations of the last token.
    Last,
    /// Their mean.
    Mean,
}

impl std::str::FromStr for Pooling {
    type Err = Error;
    fn from_str(text: &str) -> Result<Pooling> {
        match text {
            "last" => Ok(Pooling::Last),
            "mean" => Ok(Pooling::Mean),
            _ => Err(Error::Config(format!("there is no pooling `{text}`; the kinds are last, mean"))),
        }
    }
}

/// The number of adapters of an engine's model, in the order of [`Engine::add_adapters`](super::Engine::add_adapters).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AdapterId(pub usize);

/// Names a request of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RequestId(pub u64);

/// The log-probability of a token, as [`LogprobsMode`] says.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: u32,
    /// Its log-probability.
    pub logprob: f32,
    /// The most likely tokens at its position in descending order, the smaller id first among equals. A slice, so that it takes no more memory
    /// than these tokens.
    pub top: Box<[(u32, f32)]>,
}

/// Why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop token was drawn, a stop string was reached, or its grammar is complete.
    Stop,
    /// It has reached the requested number of tokens or the limit of the model.
    Length,
    /// Its grammar allows no further token, or the parser of the grammar has reached its limits; the text does not match.
    Stuck,
    /// It was cancelled.
    Cancelled,
}

/// The result of a step of the engine for a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The prompt was read. Comes once, before the first token, for requests with `prompt_logprobs`.
    Prompt {
        /// Whose.
        id: RequestId,
        /// For each token of the prompt; `None` for the first, which follows nothing.
        logprobs: Vec<Option<TokenLogprob>>,
    },
    /// The prompt was read. Comes once, before the first token, for requests with `pooling`.
    Embedding {
        /// Whose.
        id: RequestId,
        /// The pooled activations divided by their norm, as many as the model has channels.
        values: Vec<f32>,
    },
    /// A token was drawn.
    Token {
        /// Whose.
        id: RequestId,
        /// The token.
        token: u32,
        /// For requests with `logprobs`.
        logprob: Option<TokenLogprob>,
    },
    /// The completion ended; the last event of a request.
    Finished {
        /// Whose.
        id: RequestId,
        /// Why.
        reason: FinishReason,
    },
}

/// The format of the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KvCacheDtype {
    /// The model's compute type.
    #[default]
    Auto,
    /// BF16.
    Bfloat16,
    /// E4M3 with one F32 scale per token and head: 1.03 bytes per value at heads of 128.
    Fp8,
}

impl KvCacheDtype {
    /// The type of the cache of a model that computes in `compute`.
    pub fn resolve(self, compute: DType) -> DType {
        match self {
            KvCacheDtype::Auto => compute,
            KvCacheDtype::Bfloat16 => DType::BF16,
            KvCacheDtype::Fp8 => DType::E4M3,
        }
    }
}

impl std::str::FromStr for KvCacheDtype {
    type Err = Error;
    fn from_str(text: &str) -> Result<KvCacheDtype> {
        match text {
            "auto" => Ok(KvCacheDtype::Auto),
            "bfloat16" => Ok(KvCacheDtype::Bfloat16),
            "fp8" => Ok(KvCacheDtype::Fp8),
            _ => {
                Err(Error::Config(format!("there is no KV cache of type `{text}`; the types are auto, bfloat16, fp8")))
            }
        }
    }
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
    /// Tokens of prompt and completion together, at most.
    pub max_model_len: usize,
    /// Requests computed at once, at most.
    pub max_batch: usize,
    /// Tokens of all requests together that the KV cache has room for, rounded up to whole blocks.
    pub kv_cache_tokens: usize,
    /// Tokens of a step, at most: longer prompts are read in chunks, between which other requests get their tokens.
    pub prefill_chunk: usize,
    /// The format of the KV cache.
    pub kv_cache_dtype: KvCacheDtype,
    /// Whether requests that begin with the same tokens share the blocks of the KV cache that hold them, also blocks of ended requests. A
    /// model with a window in some layer shares none.
    pub prefix_caching: bool,
    /// Whether, on a GPU too, what a request gets has the same bits in any batch, in any chunks of its prompt, and with or without prefix
    /// caching and preemption. On a CPU it always has.
    pub batch_invariant: bool,
    /// The log-probabilities that requests get of drawn tokens, and of the likeliest tokens beside them. Log-probabilities of prompts are always raw.
    pub logprobs_mode: LogprobsMode,
}

/// The state of an engine, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineStats {
    /// Requests that have memory in the KV cache.
    pub running: usize,
    /// Requests that wait for memory or a place in the batch.
    pub waiting: usize,
    /// Requests that are held.
    pub held: usize,
    /// Blocks of the KV cache.
    pub kv_blocks: usize,
    /// Used blocks of the KV cache.
    pub used_kv_blocks: usize,
    /// Tokens of prompts read so far. Tokens read again after a preemption count, tokens found in the KV cache do not.
    pub prompt_tokens: u64,
    /// Tokens of requests that were looked for in the KV cache, including tokens of preempted requests.
    pub prefix_queries: u64,
    /// Tokens of these that were found.
    pub prefix_hits: u64,
    /// Tokens drawn so far.
    pub generated_tokens: u64,
    /// Number of preemptions: requests that freed their memory for others, to be recomputed.
    pub preemptions: u64,
    /// Number of proposals of tokens for a request.
    pub proposals: u64,
    /// Tokens of these.
    pub proposed_tokens: u64,
    /// Tokens of these that were drawn.
    pub accepted_tokens: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_cannot_be_used_are_errors() {
        Sampling::default().check().unwrap();
        let default = Sampling::default;
        for (wrong, name) in [
            (Sampling { temperature: -1.0, ..default() }, "temperature is -1"),
            (Sampling { temperature: f64::NAN, ..default() }, "temperature is NaN"),
            (Sampling { top_k: Some(0), ..default() }, "top-k is 0"),
            (Sampling { top_p: 0.0, ..default() }, "top-p is 0"),
            (Sampling { min_p: 1.5, ..default() }, "min-p is 1.5; it is a number from 0 to 1"),
            (Sampling { repetition_penalty: 0.0, ..default() }, "repetition penalty is 0"),
            (Sampling { presence_penalty: f64::NAN, ..default() }, "presence penalty is NaN"),
            (Sampling { frequency_penalty: f64::INFINITY, ..default() }, "frequency penalty is inf"),
            (Sampling { logit_bias: vec![(3, f32::NAN)], ..default() }, "the bias of token 3 is NaN"),
        ] {
            let error = wrong.check().unwrap_err().to_string();
            assert!(error.starts_with(name), "{error}");
        }
    }
}
