//! One completion while its events come in.

use crate::error::{ApiError, Result};
use crate::finish::{Finish, StopReason};
use crate::format::Part;
use crate::params::Params;
use crate::reader::Reader;
use ottava_data::Tokenizer;
use ottava_engine::{Event, FinishReason, TextStream, TokenLogprob};

/// A completion of one prompt.
pub struct Choice {
    stream: TextStream,
    /// Divides the text, if it may have reasoning or calls.
    reader: Option<Reader>,
    /// New tokens so far, a stop token included.
    pub tokens: usize,
    /// New tokens that are reasoning, with the tokens that mark it.
    pub reasoning_tokens: usize,
    /// The number of tokens of the prompt that were in the cache, if the completion has begun.
    pub cached_tokens: Option<usize>,
    /// The sum of the log-probabilities of new tokens, where the engine computes them.
    logprobs: f64,
    /// Whether tokens are left out: for a request for only the prompt's log-probabilities, the engine draws one token.
    silent: bool,
    /// What the last token tells about the end.
    stop: StopReason,
    /// Why the completion has ended, if it has.
    pub reason: Option<&'static str>,
    part: Delta,
}

/// The part of a completion since the last call of `take`.
#[derive(Default)]
pub struct Delta {
    /// The parts of the text.
    pub parts: Vec<Part>,
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
        self.parts.is_empty()
            && self.prompt_logprobs.is_none()
            && self.tokens.is_empty()
            && self.logprobs.is_empty()
            && self.finish.is_none()
    }
}

impl Choice {
    /// A completion of `prompt` without tokens, whose text starts with `text`.
    pub fn new(params: &Params, tokenizer: &Tokenizer, prompt: &[u32], text: String, silent: bool) -> Result<Choice> {
        let parts = if text.is_empty() { Vec::new() } else { vec![Part::Content(text)] };
        let part = Delta { parts, ..Delta::default() };
        let stream = TextStream::new(params.stops.clone()).after(tokenizer, prompt).map_err(ApiError::of_request)?;
        Ok(Choice {
            stream,
            reader: None,
            tokens: 0,
            reasoning_tokens: 0,
            cached_tokens: None,
            logprobs: 0.0,
            silent,
            stop: StopReason::None,
            reason: None,
            part,
        })
    }

    /// The same completion, whose text is divided.
    pub fn read_by(self, reader: Reader) -> Choice {
        Choice { reader: Some(reader), ..self }
    }

    fn is_reasoning(&self) -> bool {
        self.reader.as_ref().is_some_and(Reader::is_reasoning)
    }

    /// Adds an event. Returns whether the engine is to end the completion, because its text has reached a stop string, or has all calls that
    /// there may be.
    pub fn push(&mut self, event: Event, params: &Params, tokenizer: &Tokenizer) -> Result<bool> {
        if self.is_finished() {
            return Ok(false);
        }
        match event {
            Event::Prompt { logprobs, .. } => self.part.prompt_logprobs = Some(logprobs),
            Event::Embedding { .. } => {}
            Event::Token { .. } if self.silent => {}
            Event::Token { token, logprob, cached_tokens, .. } => {
                self.cached_tokens = Some(cached_tokens);
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
                let was_reasoning = self.is_reasoning();
                if params.hidden.hides(tokenizer, token) {
                    self.reasoning_tokens += usize::from(was_reasoning);
                    return Ok(false);
                }
                let piece = self.stream.push(tokenizer, token).map_err(ApiError::of_request)?;
                self.add_text(&piece.text, piece.stopped);
                self.reasoning_tokens += usize::from(was_reasoning || self.is_reasoning());
                if piece.stopped || self.reader.as_ref().is_some_and(Reader::is_full) {
                    self.finish("stop");
                    return Ok(true);
                }
            }
            Event::Finished { reason, cached_tokens, .. } => {
                self.cached_tokens = Some(cached_tokens);
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
        match &mut self.reader {
            Some(reader) => self.part.parts.extend(reader.push(text, finished)),
            None if text.is_empty() => {}
            None => self.part.parts.push(Part::Content(text.into())),
        }
    }

    fn finish(&mut self, reason: &'static str) {
        self.reason = Some(reason);
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
        self.reason.is_some()
    }

    /// The part since the last call.
    pub fn take(&mut self) -> Delta {
        std::mem::take(&mut self.part)
    }
}
