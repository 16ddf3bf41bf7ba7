//! The tokens that a model reads for an item, and which of them are scored, by the rules of lm-evaluation-harness.
//!
//! A prompt and a choice are encoded together, and the choice has the tokens after the number of tokens of the prompt alone. The model reads the tokens of
//! the prompt alone, also if a token of both together spans the end of the prompt. White space at the end of
//! the prompt belongs to the choice, since tokens of most vocabularies begin with a space. If a sequence is too long, its beginning is cut off.

use crate::config::TaskConfig;
use crate::item::{Gold, Item};
use crate::space::is_python_space;
use ottava_common::{Error, Result};
use ottava_data::Tokenizer;

/// What a model computes for the items of a task, in their order.
#[derive(Clone, Debug, PartialEq)]
pub enum Requests {
    /// Log-likelihoods.
    LogLikelihoods {
        /// The sequences: one for each choice of an item, or for each window of its text.
        rows: Vec<Row>,
        /// The number of rows of each item.
        of_item: Vec<usize>,
    },
    /// Texts.
    Texts(Texts),
}

/// A sequence. Its last tokens are scored.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The tokens. The model does not read the last token.
    pub tokens: Vec<u32>,
    /// The number of scored tokens at the end, at least 1 and less than all tokens. Their log-likelihoods are added up.
    pub scored: usize,
}

/// Prompts to complete with the most likely tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Texts {
    /// The tokens of each prompt.
    pub prompts: Vec<Vec<u32>>,
    /// The text ends before the first of these strings.
    pub until: Vec<String>,
    /// The maximum number of new tokens.
    pub max_gen_toks: usize,
}

impl Requests {
    /// Returns the prompts, if the model draws texts.
    pub fn texts(&self) -> Option<&Texts> {
        match self {
            Requests::LogLikelihoods { .. } => None,
            Requests::Texts(texts) => Some(texts),
        }
    }

    /// Returns the number of tokens of the longest sequence that the model reads, new tokens included.
    pub fn longest(&self) -> usize {
        match self {
            Requests::LogLikelihoods { rows, .. } => rows.iter().map(|row| row.tokens.len() - 1).max().unwrap_or(0),
            Requests::Texts(Texts { prompts, max_gen_toks, .. }) => {
                prompts.iter().map(Vec::len).max().unwrap_or(0) + max_gen_toks
            }
        }
    }
}

/// Encodes for a model of `max_length` positions.
pub(crate) struct Encoder<'a> {
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) max_length: usize,
}

impl Encoder<'_> {
    /// Returns the rows of a choice of each item. `delimiter` precedes a choice.
    pub(crate) fn choices(&self, items: &[Item], delimiter: &str) -> Result<Requests> {
        let (mut rows, mut of_item) = (Vec::new(), Vec::new());
        for (number, item) in items.iter().enumerate() {
            for choice in &item.choices {
                let [context, continuation] = self.pair(&item.context, &(delimiter.to_string() + choice))?;
                rows.push(
                    self.row(context, &continuation)
                        .map_err(|reason| Error::Data(format!("item {number}, choice {choice:?}: {reason}")))?,
                );
            }
            of_item.push(item.choices.len());
        }
        Ok(Requests::LogLikelihoods { rows, of_item })
    }

    /// Returns the rows of windows over the text of each item. Windows do not overlap in scored tokens, and each window except the first one has as
    /// much context as fits.
    pub(crate) fn windows(&self, items: &[Item]) -> Result<Requests> {
        let (mut rows, mut of_item) = (Vec::new(), Vec::new());
        for (number, item) in items.iter().enumerate() {
            let Gold::Texts(texts) = &item.gold else { unreachable!("a text is scored") };
            let ids = if texts[0].is_empty() { Vec::new() } else { self.tokenizer.encode_prompt(&texts[0])? };
            if ids.is_empty() {
                return Err(Error::Data(format!("item {number}: the text has no tokens; leave the item out")));
            }
            let before = rows.len();
            let tokens = [vec![self.prefix()?], ids].concat();
            let mut start = 1;
            while start < tokens.len() {
                let end = tokens.len().min(start + self.max_length);
                let first = end.saturating_sub(self.max_length + 1);
                rows.push(Row { tokens: tokens[first..end].to_vec(), scored: end - start });
                start = end;
            }
            of_item.push(rows.len() - before);
        }
        Ok(Requests::LogLikelihoods { rows, of_item })
    }

    /// Returns the prompts of texts. Errors if there is no room for the new tokens.
    pub(crate) fn prompts(&self, config: &TaskConfig, items: &[Item]) -> Result<Requests> {
        let max_gen_toks = config.generation.clone().unwrap_or_default().max_gen_toks;
        let Some(room) = self.max_length.checked_sub(max_gen_toks).filter(|room| *room > 0) else {
            return Err(Error::Config(format!(
                "`generation.max_gen_toks` is {max_gen_toks}, and sequences have at most {} tokens, prompts included; lower it",
                self.max_length
            )));
        };
        let prompt = |item: &Item| {
            let ids = self.tokenizer.encode_prompt(&item.context)?;
            let ids = if ids.is_empty() { vec![self.prefix()?] } else { ids };
            Ok(ids[ids.len().saturating_sub(room)..].to_vec())
        };
        let prompts = items.iter().map(prompt).collect::<Result<_>>()?;
        Ok(Requests::Texts(Texts { prompts, until: config.until(), max_gen_toks }))
    }

    /// Encodes a context and its continuation.
    fn pair(&self, context: &str, continuation: &str) -> Result<[Vec<u32>; 2]> {
        let read = context.trim_end_matches(is_python_space);
        let continuation = context[read.len()..].to_string() + continuation;
        if read.is_empty() {
            let ids = self.tokenizer.encode(&continuation)?;
            let prefix = self.prefix()?;
            // If the continuation begins with the prefix, the model reads it once.
            return Ok(match ids.first() == Some(&prefix) {
                true => [ids[..1].to_vec(), ids[1..].to_vec()],
                false => [vec![prefix], ids],
            });
        }
        let whole = self.tokenizer.encode_prompt(&(read.to_string() + &continuation))?;
        let context = self.tokenizer.encode_prompt(read)?;
        let continuation = whole[context.len().min(whole.len())..].to_vec();
        Ok([context, continuation])
    }

    fn row(&self, context: Vec<u32>, continuation: &[u32]) -> Result<Row, String> {
        let scored = continuation.len();
        if scored == 0 {
            return Err(
                "the choice adds no tokens to the prompt; write another choice or another `target_delimiter`".into()
            );
        }
        if scored > self.max_length {
            return Err(format!(
                "the choice has {scored} tokens, and sequences have at most {}; raise the maximum length, or leave the item out",
                self.max_length
            ));
        }
        let tokens = [&context, continuation].concat();
        let first = tokens.len().saturating_sub(self.max_length + 1);
        Ok(Row { tokens: tokens[first..].to_vec(), scored })
    }

    /// Returns the token that precedes a text without a context.
    fn prefix(&self) -> Result<u32> {
        self.tokenizer.prefix_id().ok_or_else(|| {
            Error::Model(format!(
                "{}: the tokenizer names neither `bos_token` nor `eos_token`, and a text without a prompt follows one of them; add one to tokenizer_config.json",
                self.tokenizer.path().display()
            ))
        })
    }
}
