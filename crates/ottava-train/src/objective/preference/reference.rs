//! What the log-probabilities or rewards of the model are compared with.

use super::evaluation::OfRecord;
use crate::phase::{Passes, Phase};
use ottava_common::error::{Error, Result};
use ottava_common::hash::sha256;
use ottava_common::input;
use ottava_data::{PreferenceBatch, Records};
use ottava_recipe::mode::Pass;
use ottava_settings::RunConfig;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// The file of the log-probabilities of the reference model, in the run's folder.
pub(super) const REFERENCE: &str = "reference.json";

/// The largest such file: some 40 bytes for each document.
const MAX_REFERENCE_BYTES: u64 = 4 << 30;

/// What the log-probabilities or rewards of the model are compared with.
pub(in crate::objective) enum Reference {
    /// Log-probabilities by the model that the run starts from, which are computed before the first step.
    Stored(StoredReference),
    /// Log-probabilities of the model without its adapters, in each step.
    Base,
    /// Zeros, without a reference model.
    Zeros,
    /// The margins of the data, for a reward model.
    Margins,
}

/// How a run gets the log-probabilities of its reference model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::objective) enum ReferenceModel {
    /// From passes before the first step.
    BeforeTraining,
    /// From passes before each step.
    BeforeEachStep,
    /// There is none.
    Absent,
}

impl ReferenceModel {
    /// As `[preference]` of `config` says.
    pub(in crate::objective) fn of(config: &RunConfig) -> ReferenceModel {
        match (config.preference.has_reference(), config.preference.precompute_ref_log_probs) {
            (false, _) => ReferenceModel::Absent,
            (true, Some(true)) => ReferenceModel::BeforeTraining,
            (true, _) => ReferenceModel::BeforeEachStep,
        }
    }

    /// The reference values of the data with this `key`; none is computed yet.
    pub(in crate::objective) fn values(self, key: &str) -> Reference {
        match self {
            ReferenceModel::BeforeTraining => {
                Reference::Stored(StoredReference { data: key.into(), log_probs: BTreeMap::new() })
            }
            ReferenceModel::BeforeEachStep => Reference::Base,
            ReferenceModel::Absent => Reference::Zeros,
        }
    }

    /// The passes over rows besides the steps of `config`. A batch has `parts` micro-batches: 2 with mismatched rows, otherwise 1.
    pub(in crate::objective) fn passes(self, config: &RunConfig, parts: usize) -> Vec<Passes> {
        let over = |phase, pass| {
            let rows = if phase == Phase::Evaluation { config.evaluation_rows() } else { config.micro_batch_rows() };
            Passes { phase, pass, micro_batches: parts, rows }
        };
        let mut passes = Vec::new();
        if config.validates() {
            passes.push(over(Phase::Evaluation, Pass::Evaluation));
        }
        match self {
            ReferenceModel::BeforeTraining => passes.push(over(Phase::Reference, Pass::Evaluation)),
            ReferenceModel::BeforeEachStep => {
                let micro_batches = config.training.gradient_accumulation_steps;
                passes.push(Passes { micro_batches, ..over(Phase::Rows, Pass::Reference) });
                if config.validates() {
                    passes.push(over(Phase::Evaluation, Pass::Reference));
                }
            }
            ReferenceModel::Absent => {}
        }
        passes
    }
}

impl Reference {
    /// The log-probabilities that are computed before the first step, if they are.
    pub(super) fn stored(&mut self) -> Option<&mut StoredReference> {
        match self {
            Reference::Stored(stored) => Some(stored),
            Reference::Base | Reference::Zeros | Reference::Margins => None,
        }
    }

    /// What the log says of the reference, after the loss.
    pub(super) fn describe(&self) -> &'static str {
        match self {
            Reference::Margins => "",
            Reference::Stored(_) => {
                "; the reference is the model that the run starts from, whose log-probabilities are computed before the first step"
            }
            Reference::Base => "; the reference is the model without its adapters, which runs in each step",
            Reference::Zeros => "; there is no reference model",
        }
    }

    /// What the rows of a batch of `records` are compared with; `None` if each step computes it.
    pub(super) fn known(&self, records: &Records, batch: &PreferenceBatch, side: Side) -> Result<Option<Vec<f64>>> {
        let each = records.documents(0).count();
        let of_row = |(row, document): (usize, &usize)| match self {
            Reference::Base => Ok(None),
            Reference::Zeros => Ok(Some(0.0)),
            Reference::Margins => records.margin(*document).map(f64::from).map(Some),
            Reference::Stored(stored) => {
                // The place of the document in its record.
                let place = row % each;
                let of_record = &stored.log_probs[&(document - place)];
                Ok(Some(match side {
                    Side::Own => of_record[place],
                    Side::Mismatched => of_record[of_record.len() - 1],
                }))
            }
        };
        batch.documents.iter().enumerate().map(of_row).collect()
    }
}

/// The rows whose log-probabilities are asked for.
#[derive(Clone, Copy)]
pub(super) enum Side {
    /// Prompts with their completions.
    Own,
    /// Prompts with completions of other records.
    Mismatched,
}

/// Log-probabilities by the model that the run has started from.
#[derive(Serialize, Deserialize)]
pub(in crate::objective) struct StoredReference {
    /// The key of the data.
    data: String,
    /// By the first document of a record.
    pub(super) log_probs: BTreeMap<usize, OfRecord>,
}

impl StoredReference {
    /// The bytes of its file.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("plain data")
    }

    /// SHA-256 of its file.
    pub(super) fn digest(&self) -> String {
        sha256(&self.to_bytes())
    }

    /// Reads the log-probabilities that the run has stored at `path`. Ignores a file with another SHA-256 than `digest`, and a file of other data.
    pub(super) fn read(&mut self, path: &Path, digest: Option<&str>) -> Result<()> {
        if !path.exists() {
            return Ok(());
        }
        let bytes = input::read(path, MAX_REFERENCE_BYTES).map_err(Error::io(path))?;
        if digest != Some(&*sha256(&bytes)) {
            tracing::warn!(
                "{} is not the file that the run has written: the log-probabilities of the reference model are computed again",
                path.display()
            );
            return Ok(());
        }
        let found: StoredReference = serde_json::from_slice(&bytes).map_err(|error| {
            Error::Checkpoint(format!("{}: {error}; remove the file to compute it again", path.display()))
        })?;
        if found.data == self.data {
            *self = found;
        }
        Ok(())
    }
}
