//! Log-probabilities in the two forms of OpenAI's API.

use crate::error::{ApiError, Result};
use ottava_lm::data::Tokenizer;
use ottava_lm::engine::TokenLogprob;
use serde_json::{Map, Value, json};

/// The `logprobs` of `/v1/completions`: lists with an entry per token.
#[derive(Default)]
pub struct Lists {
    tokens: Vec<Value>,
    token_logprobs: Vec<Value>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<usize>,
    /// Characters so far.
    offset: usize,
}

impl Lists {
    /// Lists that continue a text of `offset` characters.
    pub fn after(offset: usize) -> Lists {
        Lists { offset, ..Lists::default() }
    }

    /// Characters up to the end of the last token.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Adds a token; `None` for the first of a prompt, `first`, which follows nothing.
    pub fn push(&mut self, logprob: Option<&TokenLogprob>, first: u32, tokenizer: &Tokenizer) -> Result<()> {
        let text = text_of(logprob.map_or(first, |logprob| logprob.token), tokenizer)?;
        self.text_offset.push(self.offset);
        self.offset += text.chars().count();
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
