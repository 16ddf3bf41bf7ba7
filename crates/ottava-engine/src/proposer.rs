//! Speculative decoding (Leviathan et al. 2023, arXiv:2211.17192): what proposes the tokens that a step verifies.

use crate::draft::{Draft, Wanted};
use crate::ngram::Ngram;
use crate::request::RequestId;
use ottava_common::error::{Error, Result};

/// Tokens of a proposal at most, so that the tokens of a request are in one pass.
const MOST_TOKENS: usize = 32;

/// Proposes the next tokens of requests.
pub enum Proposer {
    /// By lookup in the tokens of the request.
    Ngram(Ngram),
    /// By a smaller model of the same tokenizer.
    Draft(Box<Draft>),
}

impl Proposer {
    /// Errors with [`Error::Config`] for sizes that cannot be used.
    pub fn check(&self) -> Result<()> {
        if let Proposer::Ngram(Ngram { shortest, longest, .. }) = *self
            && (shortest == 0 || shortest > longest)
        {
            return Err(Error::Config(format!(
                "prompt_lookup_min is {shortest} and prompt_lookup_max is {longest}; they are numbers from 1 up, the second not below the first"
            )));
        }
        match self.tokens() {
            1..=MOST_TOKENS => Ok(()),
            tokens => Err(Error::Config(format!(
                "num_speculative_tokens is {tokens}; it is a number from 1 to {MOST_TOKENS}"
            ))),
        }
    }

    /// Tokens of a proposal at most.
    pub fn tokens(&self) -> usize {
        match self {
            Proposer::Ngram(ngram) => ngram.tokens,
            Proposer::Draft(draft) => draft.tokens(),
        }
    }

    /// A proposal for each of `wanted`, maybe of no tokens. `running` are all requests that may want others later.
    ///
    /// Errors as a forward of a draft model.
    pub fn propose(&mut self, running: &[RequestId], wanted: &[Wanted]) -> Result<Vec<Vec<u32>>> {
        match self {
            Proposer::Ngram(ngram) => Ok(wanted.iter().map(|one| ngram.propose(one.tokens, one.most)).collect()),
            Proposer::Draft(draft) => draft.propose(running, wanted),
        }
    }
}
