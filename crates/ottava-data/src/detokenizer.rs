//! Converts tokens back to text, one by one. The bytes of a token depend on the tokens before it.
//!
//! A SentencePiece tokenizer writes a space at the beginning of most tokens, and drops the space of the first token of a text. So the text of a token
//! depends on whether it is the first token. If a continuation were decoded alone, it would lose its first space.

use crate::tokenizer::Tokenizer;
use ottava_common::error::Result;

/// The maximum number of tokens that one character spans: one token per byte.
const MOST_PARTS: usize = 4;

impl Tokenizer {
    /// Returns the bytes of token `id` after the token `before`; `before` is `None` at the beginning of a text. An id without an entry has no bytes.
    fn bytes_after(&self, before: Option<u32>, id: u32) -> Result<Vec<u8>> {
        if let Some(bytes) = self.bytes_anywhere(id)? {
            return Ok(bytes);
        }
        let Some(before) = before else { return Ok(self.decode(&[id])?.into_bytes()) };
        let (known, both) = (self.decode(&[before])?, self.decode(&[before, id])?);
        match both.strip_prefix(&known) {
            Some(text) => Ok(text.into()),
            None => Ok(self.decode(&[id])?.into_bytes()),
        }
    }
}

/// Decodes the tokens of a text one by one. Invalid UTF-8 becomes U+FFFD, as in `String::from_utf8_lossy`.
#[derive(Clone, Debug, Default)]
pub struct Detokenizer {
    /// The previous token; `None` at the beginning of a text.
    before: Option<u32>,
    /// The first bytes of a character that may be completed by the next token.
    partial: Vec<u8>,
}

/// The text that a token completes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decoded {
    /// The text; empty if the token ends within a character.
    pub text: String,
    /// Whether the text begins with the U+FFFD of a character that earlier tokens began and that this token does not continue.
    pub breaks: bool,
}

impl Detokenizer {
    /// Creates a detokenizer for the tokens after `prompt`. They may complete a character that the prompt began. If the prompt has only special
    /// tokens, which are not text, the next token begins a text.
    ///
    /// Errors with [`Error::Data`](ottava_common::Error::Data) if the tokenizer cannot decode the prompt.
    pub fn after(tokenizer: &Tokenizer, prompt: &[u32]) -> Result<Detokenizer> {
        let mut all = Detokenizer::default();
        if prompt.iter().all(|&id| tokenizer.is_special(id)) {
            return Ok(all);
        }
        for &id in &prompt[prompt.len().saturating_sub(MOST_PARTS)..] {
            all.push(tokenizer, id)?;
        }
        Ok(all)
    }

    /// Returns the bytes that `token` would add.
    ///
    /// Has the errors of [`Detokenizer::after`].
    pub fn bytes(&self, tokenizer: &Tokenizer, token: u32) -> Result<Vec<u8>> {
        tokenizer.bytes_after(self.before, token)
    }

    /// Adds a token, and returns the text that later tokens cannot change.
    ///
    /// Has the errors of [`Detokenizer::after`].
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<Decoded> {
        let begun = self.partial.len();
        self.partial.extend(self.bytes(tokenizer, token)?);
        self.before = Some(token);
        let (mut text, mut rest, mut breaks) = (String::new(), self.partial.as_slice(), false);
        let partial = loop {
            let error = match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    break Vec::new();
                }
                Err(error) => error,
            };
            let (valid, after) = rest.split_at(error.valid_up_to());
            text.push_str(&String::from_utf8_lossy(valid));
            let Some(wrong) = error.error_len() else { break after.to_vec() };
            breaks |= text.is_empty() && wrong == begun;
            text.push(char::REPLACEMENT_CHARACTER);
            rest = &after[wrong..];
        };
        self.partial = partial;
        Ok(Decoded { text, breaks })
    }

    /// Returns the text of an incomplete character at the end of all tokens.
    pub fn finish(&mut self) -> &'static str {
        if std::mem::take(&mut self.partial).is_empty() { "" } else { "\u{fffd}" }
    }
}

#[cfg(test)]
#[path = "detokenizer_tests.rs"]
mod tests;
