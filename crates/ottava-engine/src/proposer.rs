//! Speculative decoding (Leviathan et al. 2023, arXiv:2211.17192): proposes tokens, which a step verifies.

use crate::draft::{Draft, Wanted};
use crate::ngram::Ngram;
use crate::request::RequestId;
use ottava_common::error::{Error, Result};

/// The maximum number of tokens of a proposal, chosen so that all tokens of a request are in one pass.
pub(super) const MOST_TOKENS: usize = 32;

/// A proposer of the next tokens of requests.
pub enum Proposer {
    /// A lookup in the tokens of the request.
    Ngram(Ngram),
    /// A smaller model with the same tokenizer.
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

    /// Returns the maximum number of tokens of a proposal.
    pub fn tokens(&self) -> usize {
        match self {
            Proposer::Ngram(ngram) => ngram.tokens,
            Proposer::Draft(draft) => draft.tokens(),
        }
    }

    /// Returns a proposal for each of `wanted`, which may be empty. `running` has all requests that may need proposals later.
    ///
    /// Errors in the same cases as a forward pass of a draft model.
    pub fn propose(&mut self, running: &[RequestId], wanted: &[Wanted]) -> Result<Vec<Vec<u32>>> {
        match self {
            Proposer::Ngram(ngram) => Ok(wanted.iter().map(|one| ngram.propose(one.tokens, one.most)).collect()),
            Proposer::Draft(draft) => draft.propose(running, wanted),
        }
    }
}
