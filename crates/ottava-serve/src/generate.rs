//! `POST /inference/v1/generate`, as vLLM has it: token ids in, token ids and log-probabilities out, for programs that train on completions.

use crate::answer::{Answer, Prepared};
use crate::body::{Body, Prompt};
use crate::choice::{Choice, Delta};
use crate::choices::Choices;
use crate::constraint;
use crate::error::{ApiError, Result};
use crate::finish::Finish;
use crate::json::{ListText, ObjectText};
use crate::logprobs::{Place, Spelling, entry, of_prompt};
use crate::metrics::Timer;
use crate::params::{self, Hidden, Params};
use crate::served::Served;
use crate::token_ids::TokenIds;
use crate::truncation::Truncation;
use ottava_engine::Request;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

/// The fields of a request. `cache_salt` changes no answer: weights of a server stay the same, and blocks of the prefix cache too.
const FIELDS: &[&str] =
    &["model", "token_ids", "sampling_params", "stream", "stream_options", "cache_salt", "priority"];
/// As in `params`.
const NOT_IMPLEMENTED: &[(&str, &[&str])] = &[("features", &[]), ("kv_transfer_params", &[])];
/// Fields of `sampling_params` that other requests do not have.
const OF_SAMPLING: &[&str] = &["prompt_logprobs"];
/// Of these, what is not implemented. Answers have no text, so no token is decoded for one.
const NOT_IMPLEMENTED_IN_SAMPLING: &[(&str, &[&str])] = &[
    ("detokenize", &["false", "true"]),
    ("extra_args", &["{}"]),
    ("flat_logprobs", &["false"]),
    ("skip_reading_prefix_cache", &["false"]),
];
/// The default of `max_tokens`, as vLLM's `SamplingParams` have it.
const MAX_TOKENS: usize = 16;

/// The fields that a request may have.
pub fn fields() -> Vec<&'static str> {
    let others = NOT_IMPLEMENTED.iter().map(|(name, _)| *name);
    FIELDS.iter().chain(params::WITHOUT_EFFECT).copied().chain(others).collect()
}

/// The fields that `sampling_params` may have.
fn fields_of_sampling() -> Vec<&'static str> {
    let mut names = params::known(OF_SAMPLING, NOT_IMPLEMENTED_IN_SAMPLING);
    names.retain(|name| !FIELDS.contains(name));
    names
}

/// Ids of tokens.
pub struct Ids {
    /// Whether log-probabilities are wanted.
    logprobs: bool,
    hidden: Hidden,
    prompt: Vec<u32>,
    /// Log-probabilities of the prompt as JSON, until they are told.
    prompt_logprobs: Option<String>,
    choices: Vec<Tokens>,
}

/// A choice, or the part of it since the last piece.
struct Tokens {
    place: Place,
    ids: TokenIds,
    logprobs: ListText,
    finish: Option<Finish>,
}

/// Reads a request, and starts its completions.
pub async fn generate(
    served: Arc<Served>,
    permit: OwnedSemaphorePermit,
    mut body: Body,
    timer: Timer,
) -> Result<Answer<Ids>> {
    let model = served.model(&body)?;
    let mut prompt = match body.take_prompt() {
        Some(Prompt::Ids(mut lists)) if lists.len() == 1 && !lists[0].is_empty() => lists.remove(0),
        _ => return Err(ApiError::field("token_ids", "`token_ids` is missing; it is a list of at least one token id")),
    };
    served.expect_known("token_ids", &prompt)?;
    params::expect_implemented(&body, &served, NOT_IMPLEMENTED)?;
    let body = body.unfold("sampling_params", &fields_of_sampling(), &served.tolerance)?;
    params::expect_implemented(&body, &served, NOT_IMPLEMENTED_IN_SAMPLING)?;
    let mut params = Params::read(&body, &served, model)?;
    (params.return_token_ids, params.spelling) = (true, Spelling::Id);
    let (logprobs, prompt_logprobs) =
        (params::logprobs(&body, "logprobs")?, params::logprobs(&body, "prompt_logprobs")?);
    let max_tokens = body.count("max_tokens")?.unwrap_or(MAX_TOKENS);
    if max_tokens == 0 {
        return Err(ApiError::field("max_tokens", "`max_tokens` is 0; it is at least 1"));
    }
    let grammar = constraint::grammar(&served, &body, None).await?;
    Truncation::read(&body, served.max_model_len.saturating_sub(max_tokens))?.shorten(&mut prompt);
    let request = params.request(prompt, Some(max_tokens), served.max_model_len);
    let request = request.map_err(|error| error.renamed(&[("prompt", "token_ids")]))?;
    let prompt = request.prompt.clone();
    let logprobs_of_engine = params.logprobs_of_engine(logprobs);
    let requests = vec![Request { logprobs: logprobs_of_engine, prompt_logprobs, grammar, ..request }];
    params.expect_small_answer(&requests, false)?;
    let (mut choices, mut of_form) = (Vec::new(), Vec::new());
    for _ in 0..params.n {
        choices.push(Choice::new(&params, &served.tokenizer, &prompt, String::new(), false)?);
        let place = Place::after(&served.tokenizer, &prompt)?.spelled(params.spelling);
        of_form.push(Tokens { place, ids: TokenIds::new(true), logprobs: ListText::default(), finish: None });
    }
    let (logprobs, hidden) = (logprobs.is_some(), params.hidden.clone());
    let form = Ids { logprobs, hidden, prompt, prompt_logprobs: None, choices: of_form };
    let id = body.text("request_id")?.map(str::to_string);
    Ok(Answer::start(served, permit, Prepared { params, choices, requests }, form, timer)?.with_id(id))
}

impl Choices for Ids {
    const NAMES: [&'static str; 3] = ["generate", "generate.chunk", "gen-"];
    const ID: &'static str = "request_id";

    fn add(&mut self, served: &Served, index: usize, part: Delta) -> Result<()> {
        let tokenizer = &served.tokenizer;
        if let (Some(logprobs), None) = (&part.prompt_logprobs, &self.prompt_logprobs) {
            self.prompt_logprobs = Some(of_prompt(logprobs, &self.prompt, 0, tokenizer)?);
        }
        let Tokens { place, ids, logprobs, finish } = &mut self.choices[index];
        ids.extend(&part.tokens);
        *finish = part.finish.or(finish.take());
        for logprob in part.logprobs.iter().filter(|_| self.logprobs) {
            logprobs.push(&entry(logprob, place, tokenizer)?);
            if !self.hidden.hides(tokenizer, logprob.token) {
                place.push(tokenizer, logprob.token)?;
            }
        }
        Ok(())
    }

    fn whole(&mut self, index: usize, number: usize) -> String {
        let Tokens { ids, logprobs, finish, .. } = &mut self.choices[index];
        let logprobs = match self.logprobs {
            true => ObjectText::new().json("content", &std::mem::take(logprobs).json()).end(),
            false => "null".into(),
        };
        let object = ids.write(ObjectText::new().field("index", &number)).json("logprobs", &logprobs);
        Finish::write(finish.take(), object).end()
    }

    fn piece(&mut self, index: usize) -> Option<String> {
        let Tokens { ids, finish, .. } = &self.choices[index];
        let is_empty = ids.is_empty() && finish.is_none();
        (!is_empty).then(|| self.whole(index, index))
    }

    fn beside(&mut self) -> Vec<(&'static str, String)> {
        self.prompt_logprobs.take().map(|logprobs| ("prompt_logprobs", logprobs)).into_iter().collect()
    }
}
