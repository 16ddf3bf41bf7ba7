//! How a completion is drawn and where it ends: fields that both kinds of requests have.

use crate::body::Body;
use crate::error::{ApiError, Result};
use ottava_lm::engine::{Request, Sampling};
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

/// Completions of one prompt, at most.
const MOST_CHOICES: usize = 128;
/// Log-probabilities of a token, at most.
const MOST_LOGPROBS: usize = 100;

/// The fields of a request.
pub struct Params {
    /// Completions of each prompt.
    pub n: usize,
    /// Texts that end a completion.
    pub stops: Vec<String>,
    /// Whether special tokens are left out of texts.
    pub skip_special_tokens: bool,
    /// Whether the answer comes in pieces.
    pub stream: bool,
    /// Whether the last piece says how many tokens there were.
    pub include_usage: bool,
    /// New tokens before a stop token can be drawn.
    min_tokens: usize,
    stop_ids: Vec<u32>,
    sampling: Sampling,
}

impl Params {
    /// Reads the fields of `body`; `eos_ids` end a completion unless it says otherwise.
    pub fn read(body: &Body, eos_ids: &[u32]) -> Result<Params> {
        let n = body.count("n")?.unwrap_or(1);
        if n == 0 || n > MOST_CHOICES {
            return Err(ApiError::field("n", format!("`n` is {n}; it is from 1 to {MOST_CHOICES}")));
        }
        if body.count("best_of")?.is_some_and(|best_of| best_of != n) {
            return Err(ApiError::field("best_of", "`best_of` is not implemented; ask for `n` completions"));
        }
        let mut logit_bias = Vec::new();
        for (token, bias) in body.object("logit_bias")?.into_iter().flatten() {
            let entry = token.parse().ok().zip(bias.as_f64());
            let (token, bias) = entry.ok_or_else(|| {
                ApiError::field("logit_bias", format!("`logit_bias` has {token}: {bias}; it has numbers by token id"))
            })?;
            logit_bias.push((token, bias as f32));
        }
        // 0 and -1 are for all tokens, as in vLLM.
        let top_k = body.integer("top_k")?.and_then(|top_k| usize::try_from(top_k).ok()).filter(|&top_k| top_k > 0);
        let default = Sampling::default();
        let number = |name, default| Ok::<_, ApiError>(body.number(name)?.unwrap_or(default));
        let sampling = Sampling {
            temperature: number("temperature", 1.0)?,
            top_k,
            top_p: number("top_p", default.top_p)?,
            min_p: number("min_p", default.min_p)?,
            repetition_penalty: number("repetition_penalty", default.repetition_penalty)?,
            presence_penalty: number("presence_penalty", default.presence_penalty)?,
            frequency_penalty: number("frequency_penalty", default.frequency_penalty)?,
            logit_bias,
            seed: body.integer("seed")?.map_or_else(any_seed, |seed| seed as u64),
        };
        sampling.check().map_err(ApiError::of_request)?;
        let mut stop_ids = body.ids("stop_token_ids")?;
        if !body.flag("ignore_eos")? {
            stop_ids.extend(eos_ids);
        }
        let stream = body.flag("stream")?;
        let options = body.object("stream_options")?;
        if options.is_some() && !stream {
            return Err(ApiError::field("stream_options", "`stream_options` is for `stream: true`"));
        }
        let include_usage = options.and_then(|options| options.get("include_usage")?.as_bool()).unwrap_or(false);
        Ok(Params {
            n,
            stops: body.texts("stop")?,
            skip_special_tokens: body.flag_on("skip_special_tokens")?,
            stream,
            include_usage,
            min_tokens: body.count("min_tokens")?.unwrap_or(0),
            stop_ids,
            sampling,
        })
    }

    /// The request for completion `choice` of a prompt.
    ///
    /// Errors when prompt and completion are longer than `max_model_len`; without `max_tokens` the completion may fill it.
    pub fn request(
        &self,
        prompt: Vec<u32>,
        choice: usize,
        max_tokens: Option<usize>,
        max_model_len: usize,
    ) -> Result<Request> {
        let len = prompt.len();
        let fits = max_model_len.saturating_sub(len);
        if fits == 0 {
            return Err(ApiError::too_long(
                "prompt",
                format!("the prompt has {len} tokens; with one new token, the server has room for {max_model_len}"),
            ));
        }
        let max_new_tokens = max_tokens.unwrap_or(fits);
        if max_new_tokens > fits {
            return Err(ApiError::too_long(
                "max_tokens",
                format!(
                    "the prompt has {len} tokens and {max_new_tokens} are asked for; the server has room for {max_model_len} together"
                ),
            ));
        }
        let sampling = Sampling { seed: self.sampling.seed.wrapping_add(choice as u64), ..self.sampling.clone() };
        let (min_new_tokens, stop_ids) = (self.min_tokens, self.stop_ids.clone());
        Ok(Request { prompt, sampling, max_new_tokens, min_new_tokens, stop_ids, ..Request::default() })
    }

    /// Whether a drawn token ends the completion, and is no text.
    pub fn stops_at(&self, token: u32) -> bool {
        self.stop_ids.contains(&token)
    }
}

/// The number of log-probabilities beside each token in field `name`.
pub fn logprobs(body: &Body, name: &str) -> Result<Option<usize>> {
    match body.count(name)? {
        Some(count) if count > MOST_LOGPROBS => {
            Err(ApiError::field(name, format!("`{name}` is {count}; it is at most {MOST_LOGPROBS}")))
        }
        count => Ok(count),
    }
}

/// A seed for requests that name none.
fn any_seed() -> u64 {
    RandomState::new().hash_one(std::time::Instant::now())
}
