//! Tokens back to text, one by one: the bytes of each token in the context of earlier tokens.
//!
//! A tokenizer of the kind of SentencePiece writes a space at the beginning of most tokens, and drops the space of the first token of a text. So
//! the text of a token depends on whether a token is before it, and a continuation decoded alone would lose its first space.

use crate::tokenizer::Tokenizer;
use ottava_common::error::Result;

/// The most tokens that a character is in: one for each of its bytes.
const MOST_PARTS: usize = 4;

impl Tokenizer {
    /// The bytes of token `id` in a text, where `before` precedes it; `None` at the beginning of a text. An id without an entry has none.
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

/// Decodes the tokens of a text one by one. Bytes that are no UTF-8 become U+FFFD, as `String::from_utf8_lossy` has them.
#[derive(Clone, Debug, Default)]
pub struct Detokenizer {
    /// The last token; `None` at the beginning of a text.
    before: Option<u32>,
    /// The first bytes of a character whose other bytes may follow.
    partial: Vec<u8>,
}

/// The text that a token completes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decoded {
    /// The text; empty for a token in the middle of a character.
    pub text: String,
    /// Whether the text begins with the U+FFFD of a character that earlier tokens began, and that this one does not continue.
    pub breaks: bool,
}

impl Detokenizer {
    /// Decodes the tokens after `prompt`: a character that it begins is completed by them. Special tokens alone are no text: what follows them
    /// begins one.
    ///
    /// Errors with [`Error::Data`](ottava_common::Error::Data) if the tokenizer cannot decode them.
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

    /// The bytes that `token` would add.
    ///
    /// Errors as [`Detokenizer::after`].
    pub fn bytes(&self, tokenizer: &Tokenizer, token: u32) -> Result<Vec<u8>> {
        tokenizer.bytes_after(self.before, token)
    }

    /// Adds a token, and returns the text that is certain now.
    ///
    /// Errors as [`Detokenizer::after`].
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

    /// The text of a character that is cut off at the end of all tokens.
    pub fn finish(&mut self) -> &'static str {
        if std::mem::take(&mut self.partial).is_empty() { "" } else { "\u{fffd}" }
    }
}

#[cfg(test)]
#[path = "detokenizer_tests.rs"]
mod tests;
