//! Prompts that the model completes, in the order of the epochs.
//!
//! Several data sets are mixed by shares of the prompts, just as `mixture.rs` mixes rows by shares of the tokens. Ranks take prompts in turns, so the
//! prompts of a step do not depend on the number of ranks.

use std::sync::Arc;

use serde_json::{Map, Value};

use crate::loader::{LoaderState, RowShare};
use crate::mixture::{DataState, SetState, next_set};
use crate::order::Split;
use crate::shards::TokenDataset;
use ottava_common::{Error, Result};

/// A check of the columns of a record. Errors with the reason.
pub type ColumnCheck<'a> = dyn FnMut(&Map<String, Value>) -> Result<(), String> + 'a;

/// A prompt with the fields of its record.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    /// The name of the data set; empty if the run has only one.
    pub set: String,
    /// The number of the prompt's document in the data set.
    pub document: usize,
    /// The tokens of the prompt; at least one.
    pub tokens: Vec<u32>,
    /// All fields of the record, including `prompt`, which rewards read. Of an example, its columns.
    pub columns: Map<String, Value>,
}

/// The prompts of a data set that are not too long.
pub struct PromptSet {
    /// The name of the data set; empty if the run has only one.
    pub name: String,
    /// The weight of its share: the share of the prompts of a run is this number divided by the sum over all data sets.
    pub share: u64,
    dataset: Arc<TokenDataset>,
    /// The training documents.
    train: Vec<usize>,
    /// The validation documents.
    validation: Vec<usize>,
    excess: Excess,
}

/// The prompts of a data set that are too long.
struct Excess {
    max_length: usize,
    /// The number of prompts that are left out because they are too long.
    left_out: usize,
    /// The number of tokens of the longest prompt.
    longest: usize,
}

impl PromptSet {
    /// Selects the prompts or examples of `dataset` with at most `max_length` tokens, and divides them by `split`. The share is 1.
    ///
    /// Errors with [`Error::Data`] if all training prompts are longer, or if the tables of the data can no longer be read. Panics if the data have
    /// no columns, which the caller must ensure.
    pub fn new(name: &str, dataset: Arc<TokenDataset>, split: &Split, max_length: usize) -> Result<PromptSet> {
        assert!(dataset.meta().kind.has_columns(), "the records are prompts or examples");
        let mut excess = Excess { max_length, left_out: 0, longest: 0 };
        let train = excess.leave_out(&dataset, (0..split.train_len()).map(|i| split.train(i)))?;
        if train.is_empty() {
            let (all, label, longest) = (split.train_len(), label(name), excess.longest);
            return Err(Error::Data(format!(
                "{label}all {all} prompts to train on have more than the {max_length} tokens that `data.max_length` leaves beside a completion, \
                 up to {longest}; raise that, or shorten the completions"
            )));
        }
        let validation = excess.leave_out(&dataset, (0..split.validation_len()).map(|i| split.validation(i)))?;
        Ok(PromptSet { name: name.into(), share: 1, dataset, train, validation, excess })
    }

    /// Returns the number of training prompts.
    pub fn train_len(&self) -> usize {
        self.train.len()
    }

    /// Returns the number of validation prompts.
    pub fn validation_len(&self) -> usize {
        self.validation.len()
    }

    /// Returns the number of training and validation prompts that are left out because they are too long.
    pub fn left_out(&self) -> usize {
        self.excess.left_out
    }

    /// Returns a sentence for the log if prompts are left out.
    pub fn describe_left_out(&self) -> Option<String> {
        let Excess { max_length, left_out, longest } = self.excess;
        let all = self.dataset.len();
        let label = label(&self.name);
        (left_out > 0).then(|| {
            format!("{label}{left_out} of {all} prompts have more than {max_length} tokens and are left out; the longest has {longest}")
        })
    }

    /// Returns a hash of files, tokenizer and options, which differs between different data.
    pub fn key(&self) -> &str {
        &self.dataset.meta().key
    }

    /// Returns validation prompt number `i`. Errors with [`Error::Data`] if a file can no longer be read.
    pub fn validation(&self, i: usize) -> Result<Prompt> {
        self.prompt(self.validation[i])
    }

    /// Calls `check` with the columns of each prompt. Errors with [`Error::Data`], with the reason that `check` gives.
    pub(super) fn check(&self, check: &mut ColumnCheck) -> Result<()> {
        self.train.iter().chain(&self.validation).try_for_each(|&document| {
            let wrong = |reason| Error::Data(format!("{}record {}: {reason}", label(&self.name), document + 1));
            check(&self.dataset.columns(document)?).map_err(wrong)
        })
    }

    fn prompt(&self, document: usize) -> Result<Prompt> {
        let (tokens, columns) = (self.dataset.document(document)?, self.dataset.columns(document)?);
        Ok(Prompt { set: self.name.clone(), document, tokens, columns })
    }
}

/// Returns the beginning of a message about the data set `name`.
fn label(name: &str) -> String {
    if name.is_empty() { String::new() } else { format!("data set `{name}`: ") }
}

impl Excess {
    /// Returns the `documents` that are not too long, and counts the other documents.
    fn leave_out(&mut self, dataset: &TokenDataset, documents: impl Iterator<Item = usize>) -> Result<Vec<usize>> {
        let mut kept = Vec::new();
        for document in documents {
            let len = dataset.document_len(document)?;
            self.longest = self.longest.max(len);
            match len <= self.max_length {
                true => kept.push(document),
                false => self.left_out += 1,
            }
        }
        Ok(kept)
    }
}

/// An endless stream of prompts. Each epoch has another order.
pub struct PromptLoader {
    sets: Vec<PromptSet>,
    shares: Vec<u64>,
    places: Vec<LoaderState>,
    /// The number of prompts so far, for each data set.
    counts: Vec<u64>,
    share: RowShare,
}

impl PromptLoader {
    /// Starts at `state`, which must be the same on all ranks; [`DataState::start`] is the start of a run. Prompts of `sets` are mixed by their
    /// shares.
    ///
    /// Errors with [`Error::Checkpoint`] if the state does not fit the data. Panics if there are no sets, or if the rank is not below the world,
    /// which the caller must exclude.
    pub fn new(sets: Vec<PromptSet>, state: &DataState, share: RowShare) -> Result<PromptLoader> {
        assert!(!sets.is_empty() && share.rank < share.world, "{share:?}");
        let states = state.sets(sets.len())?;
        for (set, SetState { rows, .. }) in sets.iter().zip(&states) {
            let what =
                if set.name.is_empty() { "prompts".into() } else { format!("prompts of data set `{}`", set.name) };
            rows.expect_item(set.train_len(), &what)?;
        }
        let (places, counts) = states.into_iter().map(|state| (state.rows, state.tokens)).unzip();
        Ok(PromptLoader { shares: sets.iter().map(|set| set.share).collect(), sets, places, counts, share })
    }

    /// Returns the next `count` prompts of this rank: every `world`th prompt of the next `count` times `world` prompts. All ranks must request the
    /// same numbers of prompts.
    ///
    /// Errors with [`Error::Data`] if a file can no longer be read.
    pub fn next(&mut self, count: usize) -> Result<Vec<Prompt>> {
        let RowShare { rank, world } = self.share;
        let turns: Vec<(usize, usize)> = (0..count * world).map(|_| self.advance()).collect();
        let mine = turns.into_iter().skip(rank).step_by(world);
        mine.map(|(set, document)| self.sets[set].prompt(document)).collect()
    }

    /// Returns the prompts of [`PromptLoader::next`], and does not move on.
    pub fn peek(&mut self, count: usize) -> Result<Vec<Prompt>> {
        let (places, counts) = (self.places.clone(), self.counts.clone());
        let prompts = self.next(count);
        (self.places, self.counts) = (places, counts);
        prompts
    }

    /// Returns the data set and the document of the next prompt.
    fn advance(&mut self) -> (usize, usize) {
        let set = next_set(&self.shares, &self.counts);
        self.counts[set] += 1;
        let documents = &self.sets[set].train;
        (set, documents[self.places[set].next_item(documents.len())])
    }

    /// Returns the position of the next prompt of all ranks.
    pub fn state(&self) -> DataState {
        let states = self.places.iter().zip(&self.counts).map(|(&rows, &tokens)| SetState { rows, tokens });
        DataState::of(states.collect())
    }

    /// Returns the data sets.
    pub fn sets(&self) -> &[PromptSet] {
        &self.sets
    }

    /// Returns the number of validation prompts of all data sets.
    pub fn validation_len(&self) -> usize {
        self.sets.iter().map(PromptSet::validation_len).sum()
    }

    /// Returns validation prompt number `i`, counted over all data sets in order. It is the same on all ranks. Has the errors of
    /// [`PromptLoader::next`].
    pub fn validation(&self, i: usize) -> Result<Prompt> {
        let mut place = i;
        for set in &self.sets {
            match place.checked_sub(set.validation_len()) {
                Some(rest) => place = rest,
                None => return set.validation(place),
            }
        }
        panic!("prompt {i} of {} for validation", self.validation_len())
    }
}

#[cfg(test)]
#[path = "prompts_tests.rs"]
mod tests;
