//! Log-probabilities in the two forms of OpenAI's API.

use crate::error::{ApiError, Result};
use ottava_lm::data::Tokenizer;
use ottava_lm::engine::{TextStream, TokenLogprob};
use serde_json::{Map, Value, json};

/// The `logprobs` of `/v1/completions`: lists with an entry per token.
#[derive(Default)]
pub struct Lists {
    tokens: Vec<Value>,
    token_logprobs: Vec<Value>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<usize>,
}

/// Offsets of tokens in the text of a choice, in characters. Tokens that are parts of one character all begin where it does.
#[derive(Default)]
pub struct Offsets {
    stream: TextStream,
    at: usize,
}

impl Offsets {
    /// Characters up to the end of the last token that completed any.
    pub fn at(&self) -> usize {
        self.at
    }

    /// The offset of the next token.
    pub fn push(&mut self, token: u32, tokenizer: &Tokenizer) -> Result<usize> {
        let begin = self.at;
        self.at += self.stream.push(tokenizer, token).map_err(ApiError::of_request)?.text.chars().count();
        Ok(begin)
    }

    /// After the last token of a prompt: new tokens are a text of their own.
    pub fn end_of_prompt(&mut self, tokenizer: &Tokenizer) -> Result<()> {
        self.at += self.stream.finish(tokenizer).map_err(ApiError::of_request)?.chars().count();
        self.stream = TextStream::default();
        Ok(())
    }
}

impl Lists {
    /// Adds a token that begins at character `at`; `logprob` is `None` for the first of a prompt, `first`, which follows nothing.
    pub fn push(&mut self, logprob: Option<&TokenLogprob>, first: u32, at: usize, tokenizer: &Tokenizer) -> Result<()> {
        let text = text_of(logprob.map_or(first, |logprob| logprob.token), tokenizer)?;
        self.text_offset.push(at);
        self.tokens.push(text.into());
        self.token_logprobs.push(logprob.map_or(Value::Null, |logprob| number(logprob.logprob)));
        self.top_logprobs.push(match logprob {
            None => Value::Null,
            Some(logprob) => {
                // Tokens that are parts of characters have one text; the likeliest of them stays, which comes first.
                let mut top = Map::new();
                for &(token, value) in logprob.top.iter().chain([&(logprob.token, logprob.logprob)]) {
                    top.entry(text_of(token, tokenizer)?).or_insert_with(|| number(value));
                }
                top.into()
            }
        });
        Ok(())
    }

    pub fn json(self) -> Value {
        json!({
            "tokens": self.tokens, "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs, "text_offset": self.text_offset,
        })
    }
}

/// An entry of the `logprobs` of `/v1/chat/completions`.
pub fn entry(logprob: &TokenLogprob, tokenizer: &Tokenizer) -> Result<Value> {
    let one = |token, value| {
        let text = text_of(token, tokenizer)?;
        Ok::<_, ApiError>(json!({"token": text, "logprob": number(value), "bytes": text.as_bytes()}))
    };
    let mut of_token = one(logprob.token, logprob.logprob)?;
    let top = logprob.top.iter().map(|&(token, value)| one(token, value)).collect::<Result<Vec<_>>>()?;
    of_token["top_logprobs"] = top.into();
    Ok(of_token)
}

fn text_of(token: u32, tokenizer: &Tokenizer) -> Result<String> {
    tokenizer.decode(&[token]).map_err(ApiError::of_request)
}

/// JSON has no infinity; clients of OpenAI's API read -9999 as one.
fn number(logprob: f32) -> Value {
    json!(if logprob.is_finite() { f64::from(logprob) } else { -9999.0 })
}

/// The log-probabilities of a prompt as vLLM gives them: for each token but the first, an object by token id.
pub fn of_prompt(logprobs: &[Option<TokenLogprob>], tokenizer: &Tokenizer) -> Result<Value> {
    let of_token = |logprob: &Option<TokenLogprob>| {
        let Some(logprob) = logprob else { return Ok(Value::Null) };
        let mut entries = Map::new();
        for &(token, value) in logprob.top.iter().chain([&(logprob.token, logprob.logprob)]) {
            let entry = json!({"logprob": number(value), "decoded_token": text_of(token, tokenizer)?});
            entries.insert(token.to_string(), entry);
        }
        Ok(entries.into())
    };
    Ok(logprobs.iter().map(of_token).collect::<Result<Vec<_>>>()?.into())
}
