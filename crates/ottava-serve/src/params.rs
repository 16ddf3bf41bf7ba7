//! Fields of both kinds of requests: sampling, and the end of completions.

use crate::body::Body;
use crate::constraint;
use crate::error::{ApiError, Result};
use crate::finish::StopReason;
use crate::logprobs::Spelling;
use crate::models::ServedModel;
use crate::served::Served;
use crate::truncation;
use ottava_data::Tokenizer;
use ottava_engine::{Field, Parameter, Request, Sampling, tokens};
use serde_json::{Map, Value};
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;

/// Completions of one prompt, at most.
const MOST_CHOICES: usize = 128;
/// Completions of one request, at most: of all its prompts.
const MOST_COMPLETIONS: usize = 1024;
/// Log-probabilities of a token, at most.
const MOST_LOGPROBS: usize = 100;
/// Log-probabilities and repeated tokens of prompts, or values of embeddings, in one answer, at most.
pub const MOST_IN_ANSWER: usize = 4 << 20;
/// Stop strings, and bytes of each, at most.
const MOST_STOPS: usize = 16;
const MOST_STOP_BYTES: usize = 1024;
/// Entries of `stop_token_ids`, at most.
const MOST_STOP_IDS: usize = 128;
/// Entries of `logit_bias`, at most, and their range; and wrong keys that an error names.
const MOST_BIASES: usize = 1024;
const MOST_NAMED: usize = 8;
const BIASES: std::ops::RangeInclusive<f64> = -100.0..=100.0;
/// The range of penalties, as in OpenAI's API.
const PENALTIES: std::ops::RangeInclusive<f64> = -2.0..=2.0;

/// Fields that are read, besides the numbers of sampling ([`Parameter::ALL`]).
const READ: &[&str] = &[
    "model",
    "n",
    "best_of",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "max_tokens",
    "skip_special_tokens",
    "stream",
    "stream_options",
    "logprobs",
];

/// Fields about tokens in the answer.
const OF_TOKENS: &[&str] = &["return_token_ids", "return_tokens_as_token_ids"];

/// Fields that say who asks, and change no answer.
pub const WITHOUT_EFFECT: &[&str] = &["user", "metadata", "safety_identifier", "prompt_cache_key", "request_id"];

/// Fields that are not implemented, with the values, in JSON, that ask for nothing.
const NOT_IMPLEMENTED: &[(&str, &[&str])] = &[
    ("include_stop_str_in_output", &["false"]),
    ("use_beam_search", &["false"]),
    ("allowed_token_ids", &[]),
    ("bad_words", &["[]"]),
    ("logits_processors", &["[]"]),
];

/// Fields that have no effect, with the values, in JSON, that ask for nothing. Answers are right without their effect.
const HARMLESS: &[(&str, &[&str])] = &[
    ("guided_decoding_backend", &[]),
    ("guided_whitespace_pattern", &[]),
    ("length_penalty", &["1", "1.0"]),
    ("early_stopping", &["false"]),
    ("spaces_between_special_tokens", &["true"]),
    ("priority", &["0"]),
    ("store", &["false"]),
    ("service_tier", &["\"auto\"", "\"default\""]),
    ("prediction", &[]),
    ("verbosity", &[]),
];

/// The names of a request's fields: of both kinds of requests, of its own kind, and of fields of its kind that are not implemented.
pub fn known(own: &'static [&'static str], not_implemented: &[(&'static str, &[&str])]) -> Vec<&'static str> {
    let names = NOT_IMPLEMENTED.iter().chain(HARMLESS).chain(not_implemented).map(|(name, _)| *name);
    let of_sampling = Parameter::ALL.iter().map(|parameter| parameter.name);
    [READ, OF_TOKENS, constraint::FIELDS, truncation::FIELDS, WITHOUT_EFFECT, own]
        .concat()
        .into_iter()
        .chain(of_sampling)
        .chain(names)
        .collect()
}

/// Errors for a field that asks for what is not implemented, here or in `more`. Ignores fields that have no effect.
pub fn expect_implemented(body: &Body, served: &Served, more: &[(&str, &[&str])]) -> Result<()> {
    let asks = |name: &str, neutral: &[&str]| {
        let is_neutral = |value: &Value| {
            neutral.iter().any(|text| serde_json::from_str::<Value>(text).is_ok_and(|neutral| neutral == *value))
        };
        body.get(name).is_some_and(|value| !is_neutral(value))
    };
    if let Some((name, neutral)) = NOT_IMPLEMENTED.iter().chain(more).find(|(name, neutral)| asks(name, neutral)) {
        let but = match neutral {
            [] => "leave it out".into(),
            values => format!("leave it out, or send {}", values[0]),
        };
        return Err(ApiError::field(name, format!("`{name}` is not implemented; {but}")));
    }
    let mut harmless = HARMLESS.iter().filter(|(name, neutral)| asks(name, neutral));
    harmless.try_for_each(|(name, _)| served.tolerance.ignore(name, "is not implemented"))
}

/// The special tokens that are left out of texts.
#[derive(Clone)]
pub struct Hidden {
    /// Whether special tokens are left out.
    skips: bool,
    /// The special tokens that are not left out, because they mark reasoning or calls.
    shown: Arc<[u32]>,
}

impl Hidden {
    /// Keeps `markers` in texts.
    pub fn show<'a>(&mut self, tokenizer: &Tokenizer, markers: impl Iterator<Item = &'a str>) {
        self.shown = markers.filter_map(|marker| tokenizer.token_id(marker)).collect();
    }

    /// Whether `token` is left out.
    pub fn hides(&self, tokenizer: &Tokenizer, token: u32) -> bool {
        self.skips && tokenizer.is_special(token) && !self.shown.contains(&token)
    }
}

/// The fields of a request.
pub struct Params {
    /// The model that computes them.
    pub model: Arc<ServedModel>,
    /// Completions of each prompt that are computed.
    pub n: usize,
    /// Completions of each prompt that are returned: the completions with the highest mean log-probability of a token.
    pub best: usize,
    /// Texts that end a completion.
    pub stops: Arc<[String]>,
    /// The special tokens that are left out of texts.
    pub hidden: Hidden,
    /// Whether the answer has the ids of tokens: of prompts, and of completions with the token that ends them.
    pub return_token_ids: bool,
    /// How log-probabilities name tokens.
    pub spelling: Spelling,
    /// Whether the answer comes in pieces.
    pub stream: bool,
    /// Whether the last piece says how many tokens there were.
    pub include_usage: bool,
    /// Whether each piece says how many tokens there were so far.
    pub usage_in_pieces: bool,
    /// New tokens before a stop token can be drawn.
    min_tokens: usize,
    /// Tokens that the request names as ends.
    stop_ids: Vec<u32>,
    /// Tokens that end a text.
    eos_ids: Vec<u32>,
    sampling: Sampling,
}

impl Params {
    /// Reads the fields of `body`. Tokens that end a text end a completion unless it says otherwise.
    pub fn read(body: &Body, served: &Served, model: Arc<ServedModel>) -> Result<Params> {
        let vocabulary = served.vocabulary;
        let best = body.count("n")?.unwrap_or(1);
        if best == 0 || best > MOST_CHOICES {
            return Err(ApiError::field("n", format!("`n` is {best}; it is from 1 to {MOST_CHOICES}")));
        }
        let n = body.count("best_of")?.unwrap_or(best);
        if n < best || n > MOST_CHOICES {
            let message = format!("`best_of` is {n}; it is from `n`, {best}, to {MOST_CHOICES}");
            return Err(ApiError::field("best_of", message));
        }
        let sampling = sampling(body, served)?;
        let stop_ids = body.ids("stop_token_ids", MOST_STOP_IDS)?;
        if let Some(id) = stop_ids.iter().find(|&&id| id as usize >= vocabulary) {
            return Err(ApiError::no_token("stop_token_ids", *id, vocabulary));
        }
        let eos_ids = if body.flag("ignore_eos")? { Vec::new() } else { served.tokenizer.eos_ids().to_vec() };
        let stops = body.texts("stop", MOST_STOPS)?;
        if let Some(stop) = stops.iter().find(|stop| stop.is_empty() || stop.len() > MOST_STOP_BYTES) {
            let message = format!("`stop` has a text of {} bytes; each has 1 to {MOST_STOP_BYTES}", stop.len());
            return Err(ApiError::field("stop", message));
        }
        let stream = body.flag("stream")?;
        if stream && n > best {
            let message = "`best_of` above `n` is not for `stream: true`: the best are known at the end";
            return Err(ApiError::field("best_of", message));
        }
        let options = body.object("stream_options", 16)?;
        if options.is_some() && !stream {
            return Err(ApiError::field("stream_options", "`stream_options` is for `stream: true`"));
        }
        let (mut include_usage, mut usage_in_pieces) = (false, false);
        for (name, value) in options.into_iter().flatten().filter(|(_, value)| !value.is_null()) {
            let Some(value) = value.as_bool() else {
                let message = format!("`stream_options` has {name}: {value}; it has true or false");
                return Err(ApiError::field("stream_options", message));
            };
            match name.as_str() {
                "include_usage" => include_usage = value,
                "continuous_usage_stats" => usage_in_pieces = value,
                // Padding against observers of encrypted streams, which the proxy before this server has to add.
                _ if !value => {}
                name => served.tolerance.ignore(&format!("stream_options.{name}"), "is not implemented")?,
            }
        }
        let min_tokens = body.count("min_tokens")?.unwrap_or(0);
        Ok(Params {
            model,
            n,
            best,
            stops: stops.into_iter().map(str::to_string).collect(),
            hidden: Hidden { skips: body.flag_on("skip_special_tokens")?, shown: Arc::default() },
            return_token_ids: body.flag("return_token_ids")?,
            spelling: if body.flag("return_tokens_as_token_ids")? { Spelling::Id } else { Spelling::Text },
            stream,
            include_usage,
            usage_in_pieces: usage_in_pieces && include_usage,
            min_tokens,
            stop_ids,
            eos_ids,
            sampling,
        })
    }

    /// Errors when a request with this many prompts has too many completions.
    pub fn expect_few(&self, prompts: usize) -> Result<()> {
        match self.n * prompts > MOST_COMPLETIONS {
            true => {
                let (n, count) = (self.n, self.n * prompts);
                let message = format!(
                    "`n` is {n} for each of {prompts} prompts, {count} completions; a request has {MOST_COMPLETIONS} at most"
                );
                Err(ApiError::field("n", message))
            }
            false => Ok(()),
        }
    }

    /// The request for the first completion of a prompt.
    ///
    /// Errors when prompt and completion are longer than `max_model_len`; without `max_tokens` the completion may fill it.
    pub fn request(&self, prompt: Vec<u32>, max_tokens: Option<usize>, max_model_len: usize) -> Result<Request> {
        let (len, fits) = (prompt.len(), expect_fits("prompt", &prompt, max_model_len)?);
        let max_new_tokens = max_tokens.unwrap_or(fits);
        if max_new_tokens > fits {
            return Err(ApiError::too_long(
                "max_tokens",
                format!(
                    "the prompt has {len} tokens and {max_new_tokens} are asked for; the server has room for {max_model_len} together"
                ),
            ));
        }
        let min_new_tokens = self.min_tokens;
        if min_new_tokens > max_new_tokens {
            let message =
                format!("`min_tokens` is {min_new_tokens}, more than the {max_new_tokens} tokens of `max_tokens`");
            return Err(ApiError::field("min_tokens", message));
        }
        let (sampling, stop_ids) = (self.sampling.clone(), [&self.stop_ids[..], &self.eos_ids].concat());
        let adapter = self.model.adapter;
        Ok(Request { adapter, prompt, sampling, max_new_tokens, min_new_tokens, stop_ids, ..Request::default() })
    }

    /// Errors when the answer to `requests` would be too large: by log-probabilities, and by prompts if they are repeated (`echo`, or as token ids).
    pub fn expect_small_answer(&self, requests: &[Request], echo: bool) -> Result<()> {
        let has_prompts = echo || self.return_token_ids;
        let values = |request: &Request| {
            let prompt = request.prompt.len();
            let of_prompt = request.prompt_logprobs.map_or(0, |top| prompt * (top + 1));
            let new = request.logprobs.map_or(0, |top| request.max_new_tokens * (top + 1));
            new + of_prompt + if has_prompts { prompt } else { 0 }
        };
        let count = self.n * requests.iter().map(values).sum::<usize>();
        match count > MOST_IN_ANSWER {
            true => {
                let message = format!(
                    "the answer would have {count} log-probabilities and repeated tokens; at most {MOST_IN_ANSWER}: ask for fewer \
                     log-probabilities, tokens or completions"
                );
                Err(ApiError::field("logprobs", message))
            }
            false => Ok(()),
        }
    }

    /// The log-probabilities that the engine computes for a client that asks for `logprobs`: `best_of` reads the log-probabilities of drawn tokens.
    pub fn logprobs_of_engine(&self, logprobs: Option<usize>) -> Option<usize> {
        logprobs.or((self.n > self.best).then_some(0))
    }

    /// What a drawn token that ends the completion, and is no text, tells clients; `None` for another token.
    pub fn stop_at(&self, token: u32) -> Option<StopReason> {
        match self.eos_ids.contains(&token) {
            true => Some(StopReason::None),
            false => self.stop_ids.contains(&token).then_some(StopReason::Token(token)),
        }
    }
}

/// The tokens that can follow a prompt in `field`. Errors when there is room for none.
pub fn expect_fits(field: &str, prompt: &[u32], max_model_len: usize) -> Result<usize> {
    let len = prompt.len();
    match max_model_len.saturating_sub(len) {
        0 => {
            let message =
                format!("the prompt has {len} tokens; with one new token, the server has room for {max_model_len}");
            Err(ApiError::too_long(field, message))
        }
        fits => Ok(fits),
    }
}

/// The sampling of a request: the server's default, with what the request says.
fn sampling(body: &Body, served: &Served) -> Result<Sampling> {
    let mut sampling = served.sampling.clone();
    for Parameter { name, field, .. } in Parameter::ALL {
        match field {
            Field::Number(field, _) => {
                let field = field(&mut sampling);
                *field = body.number(name)?.unwrap_or(*field);
            }
            Field::Tokens(field) => {
                let field = field(&mut sampling);
                if let Some(count) = body.integer(name)?.filter(|&count| count < -1) {
                    return Err(ApiError::field(
                        name,
                        format!("`{name}` is {count}; it is -1 or 0 for all tokens, or a number of tokens"),
                    ));
                }
                *field = body.integer(name)?.map_or(*field, tokens);
            }
        }
    }
    for name in ["presence_penalty", "frequency_penalty"] {
        if let Some(penalty) = body.number(name)?.filter(|penalty| !PENALTIES.contains(penalty)) {
            return Err(ApiError::field(name, format!("`{name}` is {penalty}; it is from -2 to 2")));
        }
    }
    sampling.logit_bias = logit_bias(body, served.vocabulary)?;
    sampling.seed = body.integer("seed")?.map_or_else(any_seed, |seed| seed as u64);
    match sampling.problem() {
        Some((name, problem)) => Err(ApiError::field(name, problem)),
        None => Ok(sampling),
    }
}

fn logit_bias(body: &Body, vocabulary: usize) -> Result<Vec<(u32, f32)>> {
    let wrong = |message| ApiError::field("logit_bias", message);
    let mut biases = Vec::new();
    let no_ids = |name: &&String| name.parse::<u32>().is_err();
    let fields = body.object("logit_bias", MOST_BIASES)?;
    let names: Vec<&String> = fields.into_iter().flat_map(Map::keys).filter(no_ids).take(MOST_NAMED).collect();
    if !names.is_empty() {
        return Err(wrong(format!("`logit_bias` has the keys {names:?}; its keys are token ids")));
    }
    for (token, bias) in fields.into_iter().flatten() {
        let (Ok(token), Some(bias)) = (token.parse::<u32>(), bias.as_f64()) else {
            return Err(wrong(format!("`logit_bias` has {token}: {bias}; it has numbers by token id")));
        };
        if token as usize >= vocabulary {
            return Err(ApiError::no_token("logit_bias", token, vocabulary));
        }
        if !BIASES.contains(&bias) {
            return Err(wrong(format!("`logit_bias` has {bias} for token {token}; biases are from -100 to 100")));
        }
        biases.push((token, bias as f32));
    }
    Ok(biases)
}

/// The number of most likely tokens per position that field `name` requests.
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
