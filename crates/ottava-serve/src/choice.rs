//! One completion while its events come in.

use crate::error::{ApiError, Result};
use crate::finish::{Finish, StopReason};
use crate::params::Params;
use crate::tool_calls::{Call, CallStream};
use ottava_data::Tokenizer;
use ottava_engine::{Event, FinishReason, TextStream, TokenLogprob};

/// A completion of one prompt.
pub struct Choice {
    stream: TextStream,
    /// Finds calls in the text, where the answer may have some.
    calls: Option<CallStream>,
    /// New tokens so far, a stop token included.
    pub tokens: usize,
    /// The sum of the log-probabilities of new tokens, where the engine computes them.
    logprobs: f64,
    /// Whether tokens are left out: for a request for only the prompt's log-probabilities, the engine draws one token.
    silent: bool,
    /// What the last token tells about the end.
    stop: StopReason,
    finished: bool,
    part: Delta,
}

/// The part of a completion since the last call of `take`.
#[derive(Default)]
pub struct Delta {
    /// Without calls, where they are found.
    pub text: String,
    pub calls: Vec<Call>,
    /// Log-probabilities of the prompt's tokens; `None` for the first, which has no predecessor.
    pub prompt_logprobs: Option<Vec<Option<TokenLogprob>>>,
    /// New tokens, with one that ended the completion, if the answer has ids of tokens.
    pub tokens: Vec<u32>,
    /// Log-probabilities of `tokens`; of tokens without one that ended the completion, if the answer has no ids.
    pub logprobs: Vec<TokenLogprob>,
    /// Why the completion ended; in the last part.
    pub finish: Option<Finish>,
}

impl Delta {
    /// Whether there is something to tell.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
            && self.calls.is_empty()
            && self.prompt_logprobs.is_none()
            && self.tokens.is_empty()
            && self.logprobs.is_empty()
            && self.finish.is_none()
    }
}

impl Choice {
    /// A completion of `prompt` without tokens, whose text starts with `text`.
    pub fn new(params: &Params, tokenizer: &Tokenizer, prompt: &[u32], text: String, silent: bool) -> Result<Choice> {
        let part = Delta { text, ..Delta::default() };
        let stream = TextStream::new(params.stops.clone()).after(tokenizer, prompt).map_err(ApiError::of_request)?;
        Ok(Choice {
            stream,
            calls: None,
            tokens: 0,
            logprobs: 0.0,
            silent,
            stop: StopReason::None,
            finished: false,
            part,
        })
    }

    /// The same completion, in whose text calls are found.
    pub fn with_calls(self, calls: Option<CallStream>) -> Choice {
        Choice { calls, ..self }
    }

    /// Adds an event. Returns whether the engine is to end the completion, because its text has reached a stop string, or has all calls that
    /// there may be.
    pub fn push(&mut self, event: Event, params: &Params, tokenizer: &Tokenizer) -> Result<bool> {
        if self.finished {
            return Ok(false);
        }
        match event {
            Event::Prompt { logprobs, .. } => self.part.prompt_logprobs = Some(logprobs),
            Event::Embedding { .. } => {}
            Event::Token { .. } if self.silent => {}
            Event::Token { token, logprob, .. } => {
                self.tokens += 1;
                self.logprobs += logprob.as_ref().map_or(0.0, |logprob| f64::from(logprob.logprob));
                if params.return_token_ids {
                    self.part.tokens.push(token);
                }
                let stop = params.stop_at(token);
                if stop.is_none() || params.return_token_ids {
                    self.part.logprobs.extend(logprob);
                }
                if let Some(stop) = stop {
                    self.stop = stop;
                    return Ok(false);
                }
                if params.skip_special_tokens && tokenizer.is_special(token) {
                    return Ok(false);
                }
                let piece = self.stream.push(tokenizer, token).map_err(ApiError::of_request)?;
                self.add_text(&piece.text, piece.stopped);
                if piece.stopped || self.calls.as_ref().is_some_and(CallStream::is_full) {
                    self.finish("stop");
                    return Ok(true);
                }
            }
            Event::Finished { reason, .. } => {
                let word = match reason {
                    // Only the server itself cancels, for a stop string or a client that has gone.
                    FinishReason::Stop | FinishReason::Cancelled => "stop",
                    FinishReason::Length => "length",
                    FinishReason::Stuck => return Err(self.stuck()),
                };
                let rest = self.stream.finish();
                self.add_text(&rest, true);
                self.finish(if self.silent { "length" } else { word });
            }
        }
        Ok(false)
    }

    /// Adds text; the last if `finished`.
    fn add_text(&mut self, text: &str, finished: bool) {
        match &mut self.calls {
            Some(calls) => {
                let found = calls.push(text, finished);
                self.part.text.push_str(&found.content);
                self.part.calls.extend(found.calls);
            }
            None => self.part.text.push_str(text),
        }
    }

    fn finish(&mut self, reason: &'static str) {
        self.finished = true;
        let stop = self.stream.stop().map(|text| StopReason::Text(text.to_string()));
        let stop = stop.unwrap_or_else(|| std::mem::take(&mut self.stop));
        self.part.finish = Some(Finish { reason, stop });
    }

    /// The error of a text that its constraint ends before it matches.
    fn stuck(&self) -> ApiError {
        ApiError::invalid(format!(
            "after {} tokens, the constraint allows no further token of the model, or its parser has reached its limits; change the constraint",
            self.tokens
        ))
    }

    /// The mean log-probability of its tokens, where the engine computes them.
    pub fn mean_logprob(&self) -> f64 {
        self.logprobs / self.tokens.max(1) as f64
    }

    /// Whether it has ended.
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// The part since the last call.
    pub fn take(&mut self) -> Delta {
        std::mem::take(&mut self.part)
    }
}
