//! Batches of preferences: pairs of completions, or completions with labels. Each completion is in one row with its prompt.

use std::sync::Arc;

use ottava_tensor::ops::IGNORE_INDEX;

use crate::loader::{Batch, LoaderState, RowShare, append_document, pad_row, whole_documents};
use crate::order::{Permutation, Split};
use crate::packing::RowLayout;
use crate::shards::{PreferenceKind, TokenDataset};
use ottava_common::{Error, Result};

/// The rows of preferences. For pairs, rows of chosen and of rejected completions alternate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreferenceBatch {
    /// The rows.
    pub batch: Batch,
    /// The document of each row.
    pub documents: Vec<usize>,
    /// Whether the completion of each row is chosen or desirable.
    pub chosen: Vec<bool>,
    /// Only for completions with labels, if the loss needs it: the prompt of each row with the completion of another record. The divergence from the
    /// reference model is estimated from these rows.
    pub mismatched: Option<Batch>,
}

/// Preference records whose rows all have targets.
pub struct Records {
    dataset: Arc<TokenDataset>,
    layout: RowLayout,
    kind: PreferenceKind,
    target: RowTarget,
    /// The first document of each record.
    first: Vec<usize>,
    left_out: usize,
    /// Whether batches have [`PreferenceBatch::mismatched`].
    mismatches: bool,
}

/// The targets of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowTarget {
    /// The tokens of the completion. A completion is truncated at the end of the row. A record is left out if one of its rows has no target.
    Completion,
    /// Only the token whose score is the reward: the last token that is not padding, as in transformers. This token is an input, and is not
    /// predicted. A record with a sequence longer than a row is left out, as in TRL.
    Reward {
        /// The id of the padding token; `None` if the last token counts in any case.
        padding: Option<i64>,
    },
}

impl Records {
    /// Returns the training records of `split`.
    ///
    /// Errors with [`Error::Data`] if there are no training records.
    pub fn train(dataset: Arc<TokenDataset>, split: &Split, layout: RowLayout, target: RowTarget) -> Result<Records> {
        let documents = (0..split.train_len()).map(|i| split.train(i)).collect();
        let records = Records::of(dataset, documents, layout, target)?;
        match records.first.is_empty() {
            true => Err(Error::Data(format!(
                "all records of the preferences are left out, since {} `data.max_length` = {}; raise that",
                target.excess(),
                layout.seq_len
            ))),
            false => Ok(records),
        }
    }

    /// Returns the validation records of `split`. Errors with [`Error::Data`] if the tables of the data can no longer be read.
    pub fn validation(
        dataset: Arc<TokenDataset>,
        split: &Split,
        layout: RowLayout,
        target: RowTarget,
    ) -> Result<Records> {
        let documents = (0..split.validation_len()).map(|i| split.validation(i)).collect();
        Records::of(dataset, documents, layout, target)
    }

    fn of(dataset: Arc<TokenDataset>, documents: Vec<usize>, layout: RowLayout, target: RowTarget) -> Result<Records> {
        let kind = dataset.meta().kind.preference().expect("the data are preferences");
        let mut first = Vec::with_capacity(documents.len() / kind.documents());
        for record in documents.chunks_exact(kind.documents()) {
            let fits = |&i: &usize| match target {
                RowTarget::Completion => dataset.has_target(i, layout.inputs(dataset.document_len(i)?)),
                RowTarget::Reward { .. } => Ok(dataset.document_len(i)? <= layout.seq_len),
            };
            if record.iter().map(fits).collect::<Result<Vec<_>>>()?.into_iter().all(|fits| fits) {
                first.push(record[0]);
            }
        }
        let left_out = documents.len() / kind.documents() - first.len();
        Ok(Records { dataset, layout, kind, target, first, left_out, mismatches: kind == PreferenceKind::Labels })
    }

    /// Returns the same records; their batches are without [`PreferenceBatch::mismatched`].
    pub fn without_mismatches(self) -> Records {
        Records { mismatches: false, ..self }
    }

    /// Returns the number of records.
    #[expect(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(&self) -> usize {
        self.first.len()
    }

    /// Returns the number of records that are left out, by the rules of [`RowTarget`].
    pub fn left_out(&self) -> usize {
        self.left_out
    }

    /// Returns the first document of a record.
    pub fn first(&self, record: usize) -> usize {
        self.first[record]
    }

    /// Returns the documents of a record.
    pub fn documents(&self, record: usize) -> impl Iterator<Item = usize> {
        self.first[record]..self.first[record] + self.kind.documents()
    }

    /// Returns the rows of `records`. Errors with [`Error::Data`] if a file of tokens can no longer be read.
    pub fn batch(&self, records: &[usize]) -> Result<PreferenceBatch> {
        let documents: Vec<usize> = records.iter().flat_map(|&record| self.documents(record)).collect();
        let empty = || {
            let batch = Batch::with_capacity(documents.len(), self.layout.seq_len);
            Batch { documents: self.layout.document_mask.then(Vec::new), ..batch }
        };
        let mut batch = empty();
        for &document in &documents {
            match self.target {
                RowTarget::Completion => {
                    whole_documents(&self.dataset, &self.layout, &[document as u64], &mut batch)?;
                }
                RowTarget::Reward { padding } => self.reward_row(document, padding, &mut batch)?,
            }
        }
        let mut mismatched = None;
        if self.mismatches {
            let mut rows = empty();
            records.iter().try_for_each(|&record| self.mismatch(record, &mut rows))?;
            mismatched = Some(rows);
        }
        let chosen = documents.iter().map(|&document| self.dataset.is_chosen(document)).collect::<Result<_>>()?;
        Ok(PreferenceBatch { batch, documents, chosen, mismatched })
    }

    /// Appends a document. Its only target is the token whose score is the reward.
    fn reward_row(&self, document: usize, padding: Option<i64>, batch: &mut Batch) -> Result<()> {
        let (start, ids) = (batch.inputs.len(), self.dataset.document(document)?);
        let rewarded = ids.iter().rposition(|&id| padding != Some(i64::from(id))).unwrap_or(0);
        batch.inputs.extend(ids.iter().map(|&id| id as i32));
        batch.targets.resize(start + ids.len(), IGNORE_INDEX);
        batch.targets[start + rewarded] = ids[rewarded] as i32;
        batch.documents.iter_mut().for_each(|lengths| lengths.push(ids.len()));
        pad_row(&self.dataset, start + self.layout.seq_len, batch);
        Ok(())
    }

    /// Appends the prompt of `record` with the completion of the previous record. The first record gets the completion of the last record.
    fn mismatch(&self, record: usize, rows: &mut Batch) -> Result<()> {
        let (document, other) = (self.first[record], self.first[(record + self.len() - 1) % self.len()]);
        let prompt = self.dataset.tokens(document, 0..self.dataset.first_target(document)?)?;
        let completion =
            self.dataset.tokens(other, self.dataset.first_target(other)?..self.dataset.document_len(other)?)?;
        let mut tokens = [prompt, completion].concat();
        tokens.truncate(self.layout.inputs(tokens.len()) + 1);
        let end = rows.inputs.len() + self.layout.seq_len;
        append_document(&self.dataset, &tokens, rows);
        pad_row(&self.dataset, end, rows);
        Ok(())
    }

    /// Whether a document is chosen or desirable. Has the errors of [`Records::batch`].
    pub fn is_chosen(&self, document: usize) -> Result<bool> {
        self.dataset.is_chosen(document)
    }

    /// Returns the margin of a document, from [`TokenDataset::margin`].
    pub fn margin(&self, document: usize) -> Result<f32> {
        self.dataset.margin(document)
    }

    /// Returns the number of target tokens of a document in its row. Has the errors of [`Records::batch`].
    pub fn targets(&self, document: usize) -> Result<usize> {
        let inputs = self.layout.inputs(self.dataset.document_len(document)?);
        let tokens = self.dataset.tokens(document, 1..inputs + 1)?;
        Ok(tokens.into_iter().filter(|&token| self.dataset.target(token) != IGNORE_INDEX).count())
    }

    /// Returns the number of tokens in the rows of a record, without padding. Has the errors of [`Records::batch`].
    pub fn tokens(&self, record: usize) -> Result<usize> {
        let inputs = |document: usize| {
            let len = self.dataset.document_len(document)?;
            Ok(if self.target == RowTarget::Completion { self.layout.inputs(len) } else { len })
        };
        self.documents(record).map(inputs).sum()
    }
}

impl RowTarget {
    /// Returns why records are left out, as the words before the maximum number of tokens.
    pub fn excess(self) -> &'static str {
        match self {
            RowTarget::Completion => "a prompt leaves no room for its completion within",
            RowTarget::Reward { .. } => "a sequence has more tokens than",
        }
    }
}

/// An endless stream of batches. Each epoch has another order.
pub struct PreferenceLoader {
    records: Records,
    state: LoaderState,
    share: RowShare,
}

impl PreferenceLoader {
    /// Starts at `state`. Errors with [`Error::Checkpoint`] if the state does not fit the data.
    pub fn new(records: Records, state: LoaderState, share: RowShare) -> Result<PreferenceLoader> {
        state.expect_item(records.len(), "records of preferences")?;
        Ok(PreferenceLoader { records, state, share })
    }

    /// Returns the next `count` records of this rank; ranks take records in turns. All ranks must request the same numbers of records.
    pub fn next_batch(&mut self, count: usize) -> Result<PreferenceBatch> {
        let RowShare { rank, world } = self.share;
        let turns: Vec<usize> = (0..count * world).map(|_| self.state.next_item(self.records.len())).collect();
        let mine: Vec<usize> = turns.into_iter().skip(rank).step_by(world).collect();
        self.records.batch(&mine)
    }

    /// Returns the position of the next batch.
    pub fn state(&self) -> LoaderState {
        self.state
    }

    /// Returns the records.
    pub fn records(&self) -> &Records {
        &self.records
    }

    /// Returns the records that the first `steps` steps of `per_step` records each read, without repetitions, in the order of the data.
    pub fn read_by(&self, steps: u64, per_step: usize) -> Vec<usize> {
        let all = self.records.len() as u64;
        let order = Permutation::new(all, self.state.seed, 0);
        let mut read: Vec<usize> = match steps.saturating_mul(per_step as u64) {
            count if count < all => (0..count).map(|place| order.get(place) as usize).collect(),
            _ => (0..all as usize).collect(),
        };
        read.sort_unstable();
        read
    }
}

#[cfg(test)]
#[path = "preference_tests.rs"]
mod tests;
