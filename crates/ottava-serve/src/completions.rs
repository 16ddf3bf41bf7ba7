//! `POST /v1/completions`.

use crate::answer::{Answer, Form};
use crate::body::{Body, Prompt};
use crate::choice::{Choice, Delta};
use crate::constraint;
use crate::error::{ApiError, Result};
use crate::logprobs::{Lists, Offsets, of_prompt};
use crate::metrics::Timer;
use crate::params::{self, Params};
use crate::served::Served;
use ottava_lm::engine::Request;
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

/// Fields that only completions have.
const OWN: &[&str] = &["prompt", "echo", "prompt_logprobs", "add_special_tokens"];
/// As in `params`.
const NOT_IMPLEMENTED: &[(&str, &[&str])] = &[("suffix", &["\"\""])];

/// The fields that a request may have.
pub fn fields() -> Vec<&'static str> {
    params::known(OWN, NOT_IMPLEMENTED)
}

/// Texts, with lists of log-probabilities.
pub struct Texts {
    /// Whether log-probabilities are wanted, and whether the prompt's come before those of new tokens.
    logprobs: bool,
    echo: bool,
    /// The prompts, for `echo`.
    prompts: Vec<Vec<u32>>,
    skip_special_tokens: bool,
    n: usize,
    /// Characters of each choice so far.
    offsets: Vec<Offsets>,
}

/// Reads a request, and starts its completions.
pub async fn completions(
    served: Arc<Served>,
    permit: OwnedSemaphorePermit,
    mut body: Body,
    timer: Timer,
) -> Result<Answer<Texts>> {
    let model = served.model(&body)?.clone();
    params::expect_implemented(&body, NOT_IMPLEMENTED)?;
    let params = Params::read(&body, &served, model)?;
    let (echo, logprobs) = (body.flag("echo")?, params::logprobs(&body, "logprobs")?);
    let prompt_logprobs = if echo { logprobs } else { params::logprobs(&body, "prompt_logprobs")? };
    let max_tokens = body.count("max_tokens")?.unwrap_or(16);
    let grammar = constraint::grammar(&served, &body, None).await?;
    if max_tokens == 0 && !echo {
        return Err(ApiError::field("max_tokens", "`max_tokens` is 0; without `echo` there is nothing to answer"));
    }
    let special = body.flag_on("add_special_tokens")?;
    let prompt = body.take_prompt().ok_or_else(|| ApiError::field("prompt", "`prompt` is missing"))?;
    params.expect_few(prompt.len())?;
    let (mut requests, mut texts) = (Vec::new(), Vec::new());
    for prompt in prompts(&served, "prompt", prompt, special).await? {
        texts.push(if echo { served.tokenizer.decode(&prompt).map_err(ApiError::of_request)? } else { String::new() });
        // The engine draws one token at least.
        let request = params.request(prompt, Some(max_tokens.max(1)), served.max_model_len)?;
        let (logprobs, grammar) = (params.logprobs_of_engine(logprobs), grammar.clone());
        requests.push(Request { logprobs, prompt_logprobs, grammar, ..request });
    }
    params.expect_small_answer(&requests, echo)?;
    let choice = |index: usize| Choice::new(&params, texts[index / params.n].clone(), max_tokens == 0);
    let choices: Vec<Choice> = (0..texts.len() * params.n).map(choice).collect();
    let prompts = if echo { requests.iter().map(|request| request.prompt.clone()).collect() } else { Vec::new() };
    let offsets = choices.iter().map(|_| Offsets::default()).collect();
    let (n, skip_special_tokens) = (params.n, params.skip_special_tokens);
    let form = Texts { logprobs: logprobs.is_some(), echo, prompts, skip_special_tokens, n, offsets };
    Answer::start(served, permit, params, form, choices, requests, timer)
}

/// The tokens of each prompt in `field`.
pub async fn prompts(served: &Served, field: &str, prompt: Prompt, special: bool) -> Result<Vec<Vec<u32>>> {
    let prompts = match prompt {
        Prompt::Ids(lists) => lists,
        Prompt::Texts(texts) => {
            let mut lists = Vec::with_capacity(texts.len());
            for text in texts {
                lists.push(served.encode(field, text, special).await?);
            }
            lists
        }
    };
    if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
        return Err(ApiError::field(field, format!("`{field}` has a text without tokens; give at least one")));
    }
    prompts.iter().try_for_each(|prompt| served.expect_known(field, prompt))?;
    Ok(prompts)
}

impl Form for Texts {
    const NAMES: [&'static str; 3] = ["text_completion", "text_completion", "cmpl"];

    fn choice(&mut self, served: &Served, index: usize, part: Delta) -> Result<Value> {
        let tokenizer = &served.tokenizer;
        let offsets = &mut self.offsets[index];
        let mut lists = Lists::default();
        let mut choice = json!({"index": index, "text": part.text, "logprobs": null, "finish_reason": part.finish});
        match part.prompt_logprobs {
            Some(logprobs) if self.echo => {
                for (logprob, &token) in logprobs.iter().zip(&self.prompts[index / self.n]) {
                    let at = offsets.push(token, tokenizer)?;
                    lists.push(logprob.as_ref(), token, at, tokenizer)?;
                }
                offsets.end_of_prompt(tokenizer)?;
            }
            Some(logprobs) => choice["prompt_logprobs"] = of_prompt(&logprobs, tokenizer)?,
            None => {}
        }
        for logprob in &part.logprobs {
            let is_text = !(self.skip_special_tokens && tokenizer.is_special(logprob.token));
            let at = if is_text { offsets.push(logprob.token, tokenizer)? } else { offsets.at() };
            lists.push(Some(logprob), logprob.token, at, tokenizer)?;
        }
        if self.logprobs {
            choice["logprobs"] = lists.json();
        }
        Ok(choice)
    }

    fn piece(&mut self, served: &Served, index: usize, part: Delta) -> Result<Option<Value>> {
        self.choice(served, index, part).map(Some)
    }
}
