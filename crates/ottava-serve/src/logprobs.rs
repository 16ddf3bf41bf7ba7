//! Log-probabilities in the two forms of OpenAI's API, as JSON. They become text token by token, so an answer with many takes little more memory
//! than its text.

use crate::error::{ApiError, Result};
use crate::json::{ListText, ObjectText, text};
use ottava_data::{Detokenizer, Tokenizer};
use ottava_engine::TokenLogprob;
use serde::Serialize;
use serde_json::{Map, Value, json};

/// How log-probabilities name a token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Spelling {
    /// By its text, which several tokens may share.
    #[default]
    Text,
    /// As `token_id:N`.
    Id,
}

/// The place of the next token in the text of a choice.
#[derive(Default)]
pub struct Place {
    detokenizer: Detokenizer,
    /// Characters before it.
    at: usize,
    spelling: Spelling,
}

impl Place {
    /// The first place after `prompt`, which is not part of the text.
    pub fn after(tokenizer: &Tokenizer, prompt: &[u32]) -> Result<Place> {
        let detokenizer = Detokenizer::after(tokenizer, prompt).map_err(ApiError::of_request)?;
        Ok(Place { detokenizer, ..Place::default() })
    }

    /// The same place, whose log-probabilities name tokens in another way.
    pub fn spelled(self, spelling: Spelling) -> Place {
        Place { spelling, ..self }
    }

    /// The name that log-probabilities give a token, which has these bytes here.
    fn name(&self, token: u32, bytes: &[u8]) -> String {
        match self.spelling {
            Spelling::Text => String::from_utf8_lossy(bytes).into_owned(),
            Spelling::Id => format!("token_id:{token}"),
        }
    }

    /// Adds a token, and returns the character at which it begins. Tokens that are parts of one character all begin where it does.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<usize> {
        let decoded = self.detokenizer.push(tokenizer, token).map_err(ApiError::of_request)?;
        let begin = self.at + usize::from(decoded.breaks);
        self.at += decoded.text.chars().count();
        Ok(begin)
    }

    /// The bytes that a token has here.
    fn bytes(&self, tokenizer: &Tokenizer, token: u32) -> Result<Vec<u8>> {
        self.detokenizer.bytes(tokenizer, token).map_err(ApiError::of_request)
    }

    /// The text that a token has here; U+FFFD for a part of a character.
    pub fn text(&self, tokenizer: &Tokenizer, token: u32) -> Result<String> {
        Ok(String::from_utf8_lossy(&self.bytes(tokenizer, token)?).into_owned())
    }
}

/// The `logprobs` of `/v1/completions`: lists with an entry per token.
#[derive(Default)]
pub struct Lists {
    tokens: ListText,
    token_logprobs: ListText,
    top_logprobs: ListText,
    text_offset: ListText,
}

impl Lists {
    /// Adds a token at `place`; `logprob` is `None` for the first of a prompt, which follows nothing. A token that `is_text` moves the place.
    pub fn push(
        &mut self,
        token: u32,
        logprob: Option<&TokenLogprob>,
        place: &mut Place,
        is_text: bool,
        tokenizer: &Tokenizer,
    ) -> Result<()> {
        let name = |token| Ok::<_, ApiError>(place.name(token, &place.bytes(tokenizer, token)?));
        self.tokens.push(&text(&name(token)?));
        self.token_logprobs.push(&text(&logprob.map(|logprob| number(logprob.logprob))));
        self.top_logprobs.push(&match logprob {
            None => "null".to_string(),
            Some(logprob) => {
                // Tokens that are parts of characters have one text; the likeliest of them stays, which comes first.
                let mut top = Map::new();
                for &(token, value) in logprob.top.iter().chain([&(logprob.token, logprob.logprob)]) {
                    top.entry(name(token)?).or_insert_with(|| number(value).into());
                }
                text(&top)
            }
        });
        let at = if is_text { place.push(tokenizer, token)? } else { place.at };
        self.text_offset.push(&text(&at));
        Ok(())
    }

    pub fn json(self) -> String {
        let Lists { tokens, token_logprobs, top_logprobs, text_offset } = self;
        let object = ObjectText::new().json("tokens", &tokens.json()).json("token_logprobs", &token_logprobs.json());
        object.json("top_logprobs", &top_logprobs.json()).json("text_offset", &text_offset.json()).end()
    }
}

/// A token of the `logprobs` of `/v1/chat/completions`.
#[derive(Serialize)]
struct Entry {
    token: String,
    logprob: f64,
    bytes: Vec<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<Entry>>,
}

/// An entry of the `logprobs` of `/v1/chat/completions`, of a token at `place`.
pub fn entry(logprob: &TokenLogprob, place: &Place, tokenizer: &Tokenizer) -> Result<String> {
    let one = |token, value| {
        let bytes = place.bytes(tokenizer, token)?;
        Ok::<_, ApiError>(Entry { token: place.name(token, &bytes), logprob: number(value), bytes, top_logprobs: None })
    };
    let top = logprob.top.iter().map(|&(token, value)| one(token, value)).collect::<Result<Vec<_>>>()?;
    Ok(text(&Entry { top_logprobs: Some(top), ..one(logprob.token, logprob.logprob)? }))
}

/// JSON has no infinity; clients of OpenAI's API read -9999 as one.
fn number(logprob: f32) -> f64 {
    if logprob.is_finite() { f64::from(logprob) } else { -9999.0 }
}

/// The log-probabilities of a prompt as vLLM gives them: for each token but the first, an object by token id. Text begins after the first `added`
/// tokens.
pub fn of_prompt(
    logprobs: &[Option<TokenLogprob>],
    prompt: &[u32],
    added: usize,
    tokenizer: &Tokenizer,
) -> Result<String> {
    let (mut list, mut place) = (ListText::default(), Place::default());
    for (number_of, (logprob, &token)) in logprobs.iter().zip(prompt).enumerate() {
        list.push(&match logprob {
            None => "null".to_string(),
            Some(logprob) => {
                let mut entries = Map::new();
                for &(token, value) in logprob.top.iter().chain([&(logprob.token, logprob.logprob)]) {
                    let entry = json!({"logprob": number(value), "decoded_token": place.text(tokenizer, token)?});
                    entries.insert(token.to_string(), entry);
                }
                text(&Value::from(entries))
            }
        });
        if number_of >= added {
            place.push(tokenizer, token)?;
        }
    }
    Ok(list.json())
}
