//! `POST /v1/completions`.

use crate::answer::{Answer, Form};
use crate::body::{Body, ids};
use crate::choice::{Choice, Part};
use crate::error::{ApiError, Result};
use crate::logprobs::{Lists, of_prompt};
use crate::metrics::Timer;
use crate::params::{self, Params};
use crate::served::Served;
use axum::response::Response;
use ottava_lm::engine::Request;
use serde_json::{Value, json};
use std::sync::Arc;

/// Prompts of one request, at most.
const MOST_PROMPTS: usize = 1024;

/// Texts, with lists of log-probabilities.
struct Texts {
    /// Whether log-probabilities are wanted, and whether the prompt's come before those of new tokens.
    logprobs: bool,
    echo: bool,
    prompts: Vec<Vec<u32>>,
    n: usize,
    /// Characters of each choice so far.
    offsets: Vec<usize>,
}

/// Answers a request.
pub async fn completions(served: Arc<Served>, body: Body, timer: Timer) -> Result<Response> {
    served.expect_model(&body)?;
    let params = Params::read(&body, served.tokenizer.eos_ids())?;
    let (echo, logprobs) = (body.flag("echo")?, params::logprobs(&body, "logprobs")?);
    let prompt_logprobs = if echo { logprobs } else { params::logprobs(&body, "prompt_logprobs")? };
    if body.text("suffix")?.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ApiError::field("suffix", "`suffix` is not implemented"));
    }
    let max_tokens = body.count("max_tokens")?.unwrap_or(16);
    if max_tokens == 0 && !echo {
        return Err(ApiError::field("max_tokens", "`max_tokens` is 0; without `echo` there is nothing to answer"));
    }
    let prompts = prompts(&served, &body).await?;
    let (mut requests, mut choices) = (Vec::new(), Vec::new());
    for prompt in &prompts {
        let text = if echo { served.tokenizer.decode(prompt).map_err(ApiError::of_request)? } else { String::new() };
        for choice in 0..params.n {
            // The engine draws one token at least.
            let request = params.request(prompt.clone(), choice, Some(max_tokens.max(1)), served.max_model_len)?;
            requests.push(Request { logprobs, prompt_logprobs, ..request });
            choices.push(Choice::new(&params, text.clone(), max_tokens == 0));
        }
    }
    let offsets = vec![0; requests.len()];
    let form = Texts { logprobs: logprobs.is_some(), echo, prompts, n: params.n, offsets };
    Answer::start(served, params, form, choices, requests, timer).await?.respond().await
}

/// The tokens of each prompt: of one text, several texts, token ids, or several lists of these.
async fn prompts(served: &Arc<Served>, body: &Body) -> Result<Vec<Vec<u32>>> {
    let wrong = || ApiError::field("prompt", "`prompt` is a text, token ids, or a list of texts or of token ids");
    let prompt = body.get("prompt").ok_or_else(wrong)?;
    let list = match (prompt, ids(prompt)) {
        (Value::Array(list), None) => list.as_slice(),
        _ => std::slice::from_ref(prompt),
    };
    if list.len() > MOST_PROMPTS {
        let count = list.len();
        return Err(ApiError::field("prompt", format!("there are {count} prompts; at most {MOST_PROMPTS}")));
    }
    let add_special_tokens = body.flag_on("add_special_tokens")?;
    let mut prompts = Vec::with_capacity(list.len());
    for prompt in list {
        prompts.push(match prompt {
            Value::String(text) => served.encode(text.clone(), add_special_tokens).await?,
            prompt => ids(prompt).ok_or_else(wrong)?,
        });
    }
    if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
        return Err(ApiError::field("prompt", "the prompt has no token; give at least one"));
    }
    prompts.iter().try_for_each(|prompt| served.expect_known(prompt))?;
    Ok(prompts)
}

impl Form for Texts {
    const NAMES: [&'static str; 3] = ["text_completion", "text_completion", "cmpl"];

    fn choice(&mut self, served: &Served, index: usize, part: Part) -> Result<Value> {
        let tokenizer = &served.tokenizer;
        let mut lists = Lists::after(self.offsets[index]);
        let mut choice = json!({"index": index, "text": part.text, "logprobs": null, "finish_reason": part.finish});
        match part.prompt_logprobs {
            Some(logprobs) if self.echo => {
                for (logprob, &token) in logprobs.iter().zip(&self.prompts[index / self.n]) {
                    lists.push(logprob.as_ref(), token, tokenizer)?;
                }
            }
            Some(logprobs) => choice["prompt_logprobs"] = of_prompt(&logprobs, tokenizer)?,
            None => {}
        }
        for logprob in &part.logprobs {
            lists.push(Some(logprob), logprob.token, tokenizer)?;
        }
        self.offsets[index] = lists.offset();
        if self.logprobs {
            choice["logprobs"] = lists.json();
        }
        Ok(choice)
    }

    fn piece(&mut self, served: &Served, index: usize, part: Part) -> Result<Value> {
        self.choice(served, index, part)
    }
}
